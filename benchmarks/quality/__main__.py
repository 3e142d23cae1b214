"""What ``vllm-kvevict quality`` runs, under the name that older records give it."""

import sys

from vllm_kvevict.quality.__main__ import main

if __name__ == "__main__":
    sys.exit(main(program="python -m benchmarks.quality"))
