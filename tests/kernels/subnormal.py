"""A process of its own: whether the kernel for prompts multiplies subnormal numbers that happen to be in memory.

Prints 1 if the processor noted such a number as an operand, else 0. Memory that is allocated holds nothing else.
"""

import ctypes
import sys

import torch

from tests.kernels.test_prefill_attention import _behind, _case

C = ctypes.CDLL(None)
MATH = ctypes.CDLL("libm.so.6")
MXCSR, DENORMAL = 28, 1 << 1
"""Where glibc's fenv_t has the register, on x86-64, and the flag in it."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def fill_free_memory(size: int = 16 << 20) -> None:
    """Leave subnormal numbers in the memory that is allocated next."""
    C.mallopt(M_MMAP_THRESHOLD, 2 * size)
    C.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    C.malloc.restype, C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    C.free.argtypes = [ctypes.c_void_p]
    block = C.malloc(size)
    ctypes.memmove(block, (ctypes.c_uint32 * (size // 4))(*[1] * (size // 4)), size)
    C.free(block)


def noted() -> bool:
    """Whether the flag is set; clears all flags."""
    state = (ctypes.c_uint8 * 32)()
    MATH.fegetenv(state)
    MATH.fesetenv(ctypes.c_void_p(-1))  # the default
    return bool(state[MXCSR] & DENORMAL)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "control":
        noted()
        torch.full((64,), 1e-40) * 3
    else:
        dtype = getattr(torch, sys.argv[1])
        case = _behind(_case(dtype, 64, 1, 2, [50]), [[37]], 32)
        case.pages.nan_to_num_()
        case.run()
        noted()
        fill_free_memory()
        case.run()
    print(int(noted()))


if __name__ == "__main__":
    main()
