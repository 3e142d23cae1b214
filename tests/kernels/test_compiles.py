"""Every Triton kernel compiles for GPUs of three generations."""

import os
import subprocess
import sys


def test_every_kernel_compiles_for_every_gpu(pytestconfig):
    """In a process of its own, since kernels may have been imported for the interpreter here.

    What was compiled before is looked at again, but not compiled again. Triton finds it by everything that it follows
    from: the kernel's source and that of what it calls, arguments, target, options, Triton itself. What does not
    compile is never kept.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.compiling"],
        env=env | {"TRITON_CACHE_DIR": str(pytestconfig.cache.mkdir("triton"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
