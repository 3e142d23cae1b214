"""KV cache eviction for vLLM.

Importing this package loads neither torch nor vLLM: `vllm_kvevict.policies` needs torch,
and only `vllm_kvevict.engine` needs vLLM.
"""

__version__ = "0.2.0"
