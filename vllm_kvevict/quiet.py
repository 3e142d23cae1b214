"""Lets vLLM and transformers say less, for commands whose output is something else."""

import logging
import os
import warnings

ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of workers
}


def quieten(level: str = "ERROR") -> None:
    """Call it before vLLM is imported; what the user has set stays.

    Args:
        level: of what vLLM logs.
    """
    for name, value in {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": level}.items():
        os.environ.setdefault(name, value)
    # Some of it is logged before vLLM reads the variable.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    warnings.simplefilter("ignore", FutureWarning)
