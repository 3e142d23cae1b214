"""What servers import, and how one begins in a process that is forked from one that has imported this."""

import gc
import importlib
import sys

IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.entrypoints.cli.main",
    "vllm_kvevict.engine.worker.cpu",
    "vllm_kvevict.__main__",
    "tests.engine.support.quick_starts",
)

gc.disable()  # what is imported stays: to look through it for garbage meanwhile takes a quarter of the time
for name in IMPORTED:
    importlib.import_module(name)
gc.freeze()
gc.enable()


def main() -> int | None:
    """Run ``sys.argv``; the engine and its workers are forked, too."""
    from vllm import logger
    from vllm.entrypoints.cli import main as cli

    from tests.engine.support.quick_starts import forked_processes, quick_starts
    from vllm_kvevict import __main__ as ours

    logger._configure_vllm_root_logger()  # vLLM reads those variables where it is imported
    with quick_starts(), forked_processes():
        return {"vllm": cli.main, "vllm-kvevict": ours.main}[sys.argv[0]]()
