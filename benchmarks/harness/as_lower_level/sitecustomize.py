"""Python runs this first in every process that has this folder on its path.

vLLM asks torch what the processor has, and chooses its library and its attention by that.
"""

import os

import torch

torch.cpu._is_amx_tile_supported = lambda: False
# The variable of vllm_kvevict.kernels.processor, which is not installed wherever this runs.
if os.environ.get("VLLM_KVEVICT_CPU_LEVEL") == "avx2":
    torch.cpu._is_avx512_supported = lambda: False
    torch.cpu._is_avx512_bf16_supported = lambda: False
