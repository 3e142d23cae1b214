"""What servers import, and how one begins in a process that is forked from one that has imported this."""

import gc
import sys

import vllm.entrypoints.openai.api_server
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import logger
from vllm.entrypoints.cli import main as cli

import vllm_kvevict.engine.worker.cpu  # noqa: F401
from tests.engine.support.quick_starts import forked_processes, quick_starts
from vllm_kvevict import __main__ as ours

gc.freeze()


def main() -> int | None:
    """Run ``sys.argv``; the engine and its workers are forked, too."""
    logger._configure_vllm_root_logger()  # vLLM reads those variables where it is imported
    with quick_starts(), forked_processes():
        return {"vllm": cli.main, "vllm-kvevict": ours.main}[sys.argv[0]]()
