"""The vLLM side: flags, scheduler, workers, attention. Importing this package adds the flags to vLLM."""

from vllm_kvevict.engine.registration import install
from vllm_kvevict.engine.registration import register as register

install()
