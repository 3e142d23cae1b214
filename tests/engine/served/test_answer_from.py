"""Answers that exist are scored as they were written: `kv_answer_from` says where in a prompt they begin."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.served import test_answers_anywhere as anywhere
from tests.engine.support.masked import CLOSE
from tests.engine.support.running import VOCAB, Ask, evicting_engine, run
from vllm_kvevict.engine.config import KVEvictionError, Options
from vllm_kvevict.engine.request_options import plan_for

RULES, ASKS = anywhere.RULES, anywhere.ASKS[:4]
SMALL = {**anywhere.SMALL, "max_num_batched_tokens": 100}


@pytest.fixture(scope="module")
def llm(models):
    options = RULES.options("ada-snapkv")
    with evicting_engine(models("llama"), eviction=options, **SMALL) as llm:
        yield llm


def scores(llm, ask: Ask, answer: list[int], fields: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of all tokens where each token of an answer is, [tokens, vocabulary]."""
    extra = {**(ask.sampling(False).extra_args or {}), **fields}
    sampling = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=VOCAB, detokenize=False, extra_args=extra
    )
    prompt = {"prompt_token_ids": ask.prompt + answer}
    (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    rows = torch.full((len(answer), VOCAB), float("nan"))
    for row, entries in zip(rows, output.prompt_logprobs[ask.length :], strict=True):
        for token, entry in entries.items():
            row[token] = entry.logprob
    return rows.log_softmax(-1)


@pytest.mark.engine
def test_an_answer_is_scored_as_it_was_written(llm) -> None:
    for ask, answer in zip(ASKS, run(llm, ASKS, logits=True), strict=True):
        written = answer.logits.log_softmax(-1)
        found = scores(llm, ask, answer.tokens, {"kv_answer_from": ask.length})
        torch.testing.assert_close(found, written, **CLOSE)
        # The control: a prompt that has it all, and one whose answer begins a token later, are cut elsewhere.
        first = RULES.positions(ask)[0] - ask.length
        for fields in ({}, {"kv_answer_from": ask.length + 1}, {"kv_decode_budget": 0}):
            other = scores(llm, ask, answer.tokens, {**fields, "kv_prefix_len": ask.prefix_len or ask.length})
            torch.testing.assert_close(other[:first], written[:first], **CLOSE)
            assert not torch.allclose(other[first + 2 :], written[first + 2 :], **CLOSE), (ask, fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_answer_from": 0}, "0"),
        ({"kv_answer_from": 71}, "70 tokens.* 71"),
        ({"kv_answer_from": 1.5}, "1.5"),
        ({"kv_answer_from": "all"}, "'all'"),
        ({"kv_answer_from": 40, "kv_prefix_len": 41}, r"kv_prefix_len \(41\).* 40"),
        ({"kv_answer_from": 40, "kv_decode_budget": 0}, "takes a kv_decode_budget"),
    ],
    ids=str,
)
def test_bad_fields(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(KVEvictionError, match=f"^kv_answer_from .*{words}"):
        plan_for(Options.parse({"policy": "full", **RULES.options("ada-snapkv")}), 70, fields)
