"""When the project's kernel serves decodes, and when vLLM's op does."""

import logging
from types import SimpleNamespace

import pytest
import torch

from vllm_kvevict.engine import cpu
from vllm_kvevict.kernels.build import BuildError
from vllm_kvevict.kernels.decode_attention import DecodeAttention


def _kernel(transposed=True, dtype=torch.bfloat16, softcap=0.0):
    storage = torch.zeros(1, 2 * 32 * 64, dtype=dtype)
    cache = SimpleNamespace(
        layout=SimpleNamespace(keys_are_transposed=transposed), storage=storage, page_size=32, head_dim=64
    )
    return cpu.CPUPages(storage, 32, None).decode_attention(cache, 2, softcap)


def test_the_kernel_serves_decodes():
    assert isinstance(_kernel(), DecodeAttention)


@pytest.mark.parametrize(
    "unlike",
    [{"transposed": False}, {"dtype": torch.float16}, {"softcap": 30.0}],
    ids=lambda unlike: next(iter(unlike)),
)
def test_what_it_does_not_serve(unlike):
    assert _kernel(**unlike) is None


def test_without_a_compiler_there_is_a_warning_and_vllms_op(monkeypatch):
    def fail(*_):
        raise BuildError("no C++ compiler was found: install g++ or name one in CXX")

    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: seen.append(entry.getMessage())
    monkeypatch.setattr(cpu, "DecodeAttention", fail)
    cpu.logger.addHandler(handler)
    try:
        assert _kernel() is None
    finally:
        cpu.logger.removeHandler(handler)
    (message,) = seen
    assert "slower" in message and "install g++" in message
