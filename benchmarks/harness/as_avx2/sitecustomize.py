"""Python runs this first in every process that has this folder on its path.

vLLM has a library for each kind of processor, and asks torch which one to load.
"""

import torch

torch.cpu._is_avx512_supported = lambda: False
torch.cpu._is_avx512_bf16_supported = lambda: False
