"""Every Triton kernel compiles for GPUs of three generations."""

import os
import subprocess
import sys


def test_every_kernel_compiles_for_every_gpu(tmp_path):
    """In a process of its own, since kernels may have been imported for the interpreter here."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.compiling"],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
