"""Triton's kernels without a GPU: launches run in Triton's interpreter, on CPU tensors."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Launches are interpreted meanwhile.

    Triton's own switch counts when `triton` and the kernels are imported, which other tests of the process, or vLLM,
    may have done before; and it would reach them too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs, "propagate_env", False)  # what a test starts decides for itself
        patch.setattr(triton.knobs.runtime, "interpret", True)
        patch.setattr(JITFunction, "run", lambda self, *args, **kw: _interpreted(self.fn).run(*args, **kw))
        # A function that a kernel calls, of Triton's library or ours.
        patch.setattr(JITFunction, "__call__", lambda self, *args, **kw: _interpreted(self.fn)(*args, **kw))
        patch.setattr(InterpreterBuilder, "cast_impl", _cast)
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        with quick_launches():
            yield


@contextlib.contextmanager
def quick_launches() -> Iterator[None]:
    """What the interpreter does for every launch is done once, where Triton's own switch has brought it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", _numpy_type)
        with _language(patch):
            yield


@contextlib.contextmanager
def _language(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's language means the interpreter's meanwhile.

    The interpreter sees to that for every launch, and again for every function that a kernel calls, which takes longer
    than to run them.
    """
    function = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # one that knows both
    scope = interpreter._patch_lang(function)
    patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
    try:
        yield
    finally:
        scope.restore()


@cache
def _interpreted(function: Callable[..., Any]) -> InterpretedFunction:
    return InterpretedFunction(function)


# The interpreter makes a table of all types whenever it asks for one.
_original_numpy_type = interpreter._get_np_dtype
_of_scalar = cache(_original_numpy_type)


def _numpy_type(kind: Any) -> np.dtype:
    return _original_numpy_type(kind) if kind.scalar.is_ptr() else _of_scalar(kind.scalar)


# The interpreter keeps bfloat16 as uint16. It multiplies matrices of these integers, truncates where a GPU rounds, and
# takes denormal numbers for others.
_original_cast, _original_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def _widen(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _cast(self: InterpreterBuilder, src: TensorHandle, dst_type: Any) -> TensorHandle:
    wide = _widen(src)
    if dst_type.scalar != tl.bfloat16:
        return wide if dst_type.scalar == wide.dtype else _original_cast(self, wide, dst_type)
    rounded = torch.tensor(wide.data).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *others: Any) -> TensorHandle:
    return _original_dot(self, _widen(a), _widen(b), *others)
