"""Fidelity without a server: what is masked, against transformers' own attention with a mask."""

import torch
from transformers import AutoModelForCausalLM

from benchmarks.quality import NEEDLE
from benchmarks.quality.offline import Plain, decided
from vllm_kvevict.quality.results import Column

TOKENS, N, AHEAD = torch.arange(90).mul(37).remainder(200).tolist(), 60, 8


@torch.inference_mode()
def test_rows_behind_an_eviction_see_what_each_head_keeps():
    plain = Plain(NEEDLE)
    whole = plain.whole(TOKENS)
    at, kept = decided(plain, Column("ada-snapkv:kernel=5,window=4,lookahead=8", 0.3, "prompt"), N)
    assert at == N + AHEAD and {len(heads) for heads in kept} == {len(kept[0])}
    assert sum(map(len, kept[0])) == len(kept[0]) * (18 + AHEAD)
    assert all(set(range(N, at)) <= set(row.tolist()) for heads in kept for row in heads)
    assert decided(plain, Column("ada-snapkv:lookahead=0", 0.3, "prompt"), N)[0] == N

    # The same in all layers, which one mask can say.
    kept = [kept[0]] * len(kept)
    model = AutoModelForCausalLM.from_pretrained(NEEDLE, dtype=torch.float32, attn_implementation="eager")
    heads = model.config.num_attention_heads
    mask = torch.zeros(1, heads, len(TOKENS), len(TOKENS))
    mask.masked_fill_(torch.ones(len(TOKENS), len(TOKENS)).triu(1).bool(), -torch.inf)
    seen = model(torch.tensor([TOKENS]), attention_mask=mask).logits[0]
    torch.testing.assert_close(whole, seen, atol=1e-4, rtol=1e-4)
    for head in range(heads):
        gone = torch.ones(at, dtype=torch.bool)
        gone[kept[0][head * len(kept[0]) // heads]] = False
        mask[0, head, at:, :at].masked_fill_(gone, -torch.inf)
    expected = model(torch.tensor([TOKENS]), attention_mask=mask).logits[0, at:]
    torch.testing.assert_close(plain.behind(TOKENS, at, kept), expected, atol=1e-4, rtol=1e-4)
    assert (expected - whole[at:]).abs().max() > 0.01
