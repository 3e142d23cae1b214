"""Measurements as on a processor of a lower level: both sides do without what is above it."""

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
print(torch.backends.cpu.get_cpu_capability(), processor.level(), pick_vec_isa().bit_width(), end=" ")
print(torch.cpu._is_amx_tile_supported(), *libraries)
'''
exec(SEEN)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", SEEN], check=True)
"""


def seen(**environment: str) -> list[list[str]]:
    """What a benchmark's process and a process that it starts compute with."""
    own = {
        name: value for name, value in os.environ.items() if name not in {ASK, *lower_level.LIMITS["avx2"]}
    }
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=own | environment, capture_output=True, text=True, check=True
    )
    return [line.split() for line in done.stdout.splitlines() if line.startswith(("AVX", "DEFAULT"))]


@pytest.mark.long
@pytest.mark.skipif("avx2" not in processor.levels(), reason="this processor has no AVX2")
def test_both_sides_compute_with_avx2():
    assert seen(**{ASK: "avx2"}) == [["AVX2", "avx2", "256", "False", "_C_AVX2.abi3.so"]] * 2


@pytest.mark.long
@pytest.mark.skipif("amx" not in processor.levels(), reason="this processor has no AMX")
def test_both_sides_compute_without_amx():
    assert seen(**{ASK: "avx512"}) == [["AVX512", "avx512", "512", "False", "_C.abi3.so"]] * 2


@pytest.mark.long
@pytest.mark.skipif("avx512" not in processor.levels(), reason="this processor has no AVX-512")
def test_nothing_is_limited_otherwise():
    highest = next(iter(processor.levels()))
    for *found, library in seen():
        assert found == ["AVX512", highest, "512", str(highest == "amx")]
        assert library in {"_C.abi3.so", "_C_AVX512.abi3.so"}


def test_the_path_of_others_stays():
    environment = {"PYTHONPATH": "/a:/b", ASK: "avx2"}
    lower_level.limit(environment)
    lower_level.limit(environment)
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(lower_level.FOLDER), "/a", "/b"]
    assert environment.items() >= lower_level.LIMITS["avx2"].items()
