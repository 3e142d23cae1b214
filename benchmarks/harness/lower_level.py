"""Measure as on a processor that has AVX2 and not AVX-512, or no AMX: the other side, too, must do without.

``VLLM_KVEVICT_CPU_LEVEL`` limits this project's kernels alone. A comparison under it would not be one.
"""

import os
import runpy
from collections.abc import MutableMapping
from pathlib import Path

from vllm_kvevict.kernels import processor

FOLDER = Path(__file__).parent / "as_lower_level"
"""Where the module lies that limits what vLLM finds."""
LIMITS = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",  # torch's operators, and what its compiler makes
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
"""What torch and its libraries for matrix products read, by level."""


def limited(environment: MutableMapping[str, str]) -> bool:
    """Whether this environment asks for measurements at a level that both sides can be limited to."""
    return environment.get(processor.ENVIRONMENT) in LIMITS


def limit(environment: MutableMapping[str, str]) -> None:
    """Limit all that processes with this environment compute with to the level that it asks for."""
    environment.update(LIMITS[environment[processor.ENVIRONMENT]])
    path = environment.get("PYTHONPATH", "")
    if str(FOLDER) not in path.split(os.pathsep):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), path]))


def limit_all() -> None:
    """Limit this process and those that it starts, if the environment asks for it; before anything is computed."""
    if limited(os.environ):
        limit(os.environ)
        runpy.run_path(str(FOLDER / "sitecustomize.py"))
