"""The way of a request on a GPU, with Triton's interpreter in place of the card."""

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.v1.attention.backends import fa_utils

from tests.engine.served.test_hits import ROUNDED
from tests.engine.served.test_int8 import stored
from tests.engine.served.test_masked_model import check
from tests.engine.support.emulated import emulated_gpu
from tests.engine.support.running import Ask, evicting_engine, num_preemptions, run
from vllm_kvevict.engine.worker.attention import RaggedImpl
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.engine.worker.cuda import CUDAPages
from vllm_kvevict.engine.worker.model_runners import forbid_decode_graphs
from vllm_kvevict.engine.worker.runtime import get_runtime
from vllm_kvevict.kernels.layout import INT8

# One policy of each kind: counts known before or not, one layer or all decide, scored by the mean of the window or not.
POLICIES = ("snapkv", "ada-snapkv", "lava", "cake", "ada-criticalkv", "streaming-llm", "h2o")


@pytest.mark.engine
@pytest.mark.parametrize("kv_dtype", ["auto", INT8])
def test_policies(models, kv_dtype):
    model = models("llama", layers=2)
    asks = [Ask(70, policy, 0.5, max_tokens=3, seed=i) for i, policy in enumerate(POLICIES)]
    asks.append(Ask(60, "ada-snapkv", 40.0, prefix_len=50, max_tokens=2))
    asks.append(Ask(33, "full", max_tokens=2))
    with emulated_gpu(), evicting_engine(model, kv_cache_dtype=kv_dtype) as llm:
        answers = run(llm, asks, logits=True)
    check(model, asks, answers, **({"stored": stored, **ROUNDED} if kv_dtype == INT8 else {}))
    if kv_dtype == INT8:
        with pytest.raises(AssertionError):  # exact entries are further away
            check(model, asks, answers, **ROUNDED)


@pytest.mark.engine
def test_chunks_small_pages_and_preemption_by_paged_attention_alone(models):
    model = models("llama", layers=2)
    asks = [Ask(length, "ada-snapkv", 0.5, max_tokens=40) for length in (60, 61, 90)]
    with (
        emulated_gpu(),
        evicting_engine(
            model,
            eviction={"page_size": 16, "kernels": False, "decode_reserve": 1},
            block_size=32,
            max_model_len=144,
            max_num_batched_tokens=48,
            num_gpu_blocks_override=6,
        ) as llm,
    ):
        answers = run(llm, asks, logits=True)
        assert num_preemptions(llm) > 0
    # Who was preempted was evicted again, and kept the same.
    check(model, asks, [dataclasses.replace(answer, kept=answer.kept[-1:]) for answer in answers])


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma2"])
def test_layers_with_windows_beside_ours(models, architecture):
    """With sinks, which our kernel for decodes knows nothing of, and with a softcap."""
    model = models(architecture)
    asks = [Ask(150, "ada-snapkv", 0.5, max_tokens=4), Ask(100, "snapkv", 0.5, max_tokens=4)]
    settings = {"max_model_len": 256, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 9}
    with emulated_gpu(), evicting_engine(model, **settings) as llm:
        kernels = llm.collective_rpc(_has_decode_kernel)
        answers = run(llm, asks, logits=True)
    assert kernels == [architecture != "gpt_oss"]
    check(model, asks, answers)


def _has_decode_kernel(worker):
    return get_runtime().rank.decode_attention is not None


def test_padding_and_profiling():
    """Rows that no request fills are served as such, and steps without any request leave zeros."""
    impl = RaggedImpl(2, 16, 1.0, 1)
    output = torch.ones(3, 2, 16)
    assert not impl.forward(None, None, None, None, None, None, output).any()


def test_a_prompt_that_ends_with_one_token_is_no_decode():
    """Both runners would take such a step for a decode and replay a graph, in which nothing is evicted."""
    v1 = SimpleNamespace(_is_uniform_decode=lambda **counts: True)
    v2 = SimpleNamespace(req_states=None, gather_batch_req_state=lambda *step: ("state", 1))
    reading = [True]
    for runner in (v1, v2):
        forbid_decode_graphs(runner, lambda: reading[0])
    assert v1._is_uniform_decode(num_tokens=1) is False
    assert v2.gather_batch_req_state(None, False) == ("state", None)
    reading[0] = False
    assert v1._is_uniform_decode(num_tokens=1) is True
    assert v2.gather_batch_req_state(None, False) == ("state", 1)


def test_flash_attention_knows_what_it_is_called_with():
    """Its module imports on CUDA only, so what it accepts is read from the source."""
    source = Path(vllm.__file__).with_name("vllm_flash_attn") / "flash_attn_interface.py"
    functions = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    (accepted,) = (node.args for node in functions if node.name == "flash_attn_varlen_func")
    pages = CUDAPages.__new__(CUDAPages)
    pages.key_pages, pages.value_pages, pages.flash_attention = None, None, 3
    called: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fa_utils, "flash_attn_varlen_func", lambda **given: called.update(given), raising=False)
        pages.attend(None, None, Sequences(None, None, None, 8, 1), 1.0, 0.0)
    assert called.keys() <= {argument.arg for argument in accepted.args}
    assert {"seqused_k", "block_table", "cu_seqlens_q"} <= called.keys()
