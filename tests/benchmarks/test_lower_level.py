"""Measurements as on a processor with AVX2: both sides do without AVX-512."""

import os
import subprocess
import sys

import pytest

from benchmarks.harness import lower_level
from vllm_kvevict.kernels import processor

ASK = processor.ENVIRONMENT
SHOW = """
import benchmarks, subprocess, sys
SEEN = '''
import torch
from torch._inductor.cpu_vec_isa import pick_vec_isa
from vllm_kvevict.kernels import processor
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ones(8) + 1
libraries = {line.rpartition("/")[2].strip() for line in open("/proc/self/maps") if "/vllm/_C" in line}
print(torch.backends.cpu.get_cpu_capability(), processor.level(), pick_vec_isa().bit_width(), *libraries)
'''
exec(SEEN)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", SEEN], check=True)
"""


def seen(**environment: str) -> list[list[str]]:
    """What a benchmark's process and a process that it starts compute with."""
    own = {name: value for name, value in os.environ.items() if name not in {ASK, *lower_level.LIMITS}}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=own | environment, capture_output=True, text=True, check=True
    )
    return [line.split() for line in done.stdout.splitlines() if line.startswith(("AVX", "DEFAULT"))]


@pytest.mark.long
@pytest.mark.skipif("avx2" not in processor.levels(), reason="this processor has no AVX2")
def test_both_sides_compute_with_avx2():
    assert seen(**{ASK: "avx2"}) == [["AVX2", "avx2", "256", "_C_AVX2.abi3.so"]] * 2


@pytest.mark.long
@pytest.mark.skipif("avx512" not in processor.levels(), reason="this processor has no AVX-512")
def test_nothing_is_limited_otherwise():
    for capability, level, bits, library in seen():
        assert (capability, level, bits) == ("AVX512", processor.level(), "512")
        assert library in {"_C.abi3.so", "_C_AVX512.abi3.so"}


@pytest.mark.parametrize(("level", "wanted"), [("avx2", True), ("avx", False), ("", False), (None, False)])
def test_only_avx2_is_asked_for(level, wanted):
    assert lower_level.limited({} if level is None else {ASK: level}) == wanted


def test_the_path_of_others_stays():
    environment = {"PYTHONPATH": "/a:/b"}
    lower_level.limit(environment)
    lower_level.limit(environment)
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(lower_level.FOLDER), "/a", "/b"]
    assert environment.items() >= lower_level.LIMITS.items()
