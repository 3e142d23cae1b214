"""What this machine's processor can do, and what follows for kernels and for the choice of a dtype."""

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "VLLM_KVEVICT_CPU_LEVEL"
"""Compiles kernels for a lower level than the processor's, to test or measure what an older one would do."""


@dataclass(frozen=True)
class Level:
    """What a kernel is compiled for.

    Attributes:
        lanes: fp32 numbers of a vector. As many as a register holds: the compiler takes wider vectors apart, element by
            element where it shifts or blends, and the kernel is then several times slower.
        feature: what the processor must have, as Linux names it; None: nothing.
        flags: compiler flags that leave out whatever is above the level.
    """

    lanes: int
    feature: str | None
    flags: tuple[str, ...] = ()


X86 = {
    "amx": Level(16, "amx_bf16"),
    "avx512": Level(16, "avx512f", ("-DNO_AMX",)),
    "avx2": Level(8, "avx2", ("-mno-avx512f",)),
    "avx": Level(8, "avx", ("-mno-avx2",)),
    "sse": Level(4, None, ("-mno-avx",)),
}
"""Levels of x86 processors, highest first; what is above a flag's feature goes with it.

Compilers older than these processors know no flag for AMX, so the kernels themselves leave it out where asked to.
"""
OTHERS = {"generic": Level(4, None)}
"""Of all other processors. Arm's vectors have four lanes; nothing was measured there."""


def levels() -> dict[str, Level]:
    """The levels that this processor has, highest first."""
    known = X86 if platform.machine() in ("x86_64", "AMD64") else OTHERS
    present = features()
    return {name: level for name, level in known.items() if level.feature is None or level.feature in present}


def level() -> str:
    """The level that kernels are compiled for: the highest one, unless ``VLLM_KVEVICT_CPU_LEVEL`` names another.

    Raises:
        ValueError: the variable names a level that the processor has not.
    """
    possible = list(levels())
    name = os.environ.get(ENVIRONMENT) or possible[0]
    if name not in possible:
        raise ValueError(
            f"{ENVIRONMENT} must be one of {', '.join(possible)} on this processor, got {name!r}"
        )
    return name


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16; else each number is converted.

    Of x86 processors those have them that have AVX512_BF16: the first ones with AVX-512 have not. Other processors are
    taken to have them.
    """
    if level() in OTHERS:
        return True
    return level() == "amx" or (level() == "avx512" and "avx512_bf16" in features())


def fast_dtype() -> str:
    """The dtype in which this processor multiplies matrices fast: ``bfloat16`` or ``float32``."""
    return "bfloat16" if multiplies_bfloat16() else "float32"


@functools.cache
def features() -> frozenset[str]:
    """The processor's features as Linux lists them; empty where it does not."""
    return frozenset(described("flags", "Features").split())


def described(*names: str) -> str:
    """What Linux says of the first processor under one of these names; empty where it says nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
