"""After the prompt, once the model has repeated it chunk by chunk (kvzip), in rows behind it that are dropped again.

    prompt                                  n    rows of the repeat of chunk [lo, hi), in a step of their own
    |--------|--------|--------|--------|   |    | request to repeat it | tok[lo:hi] |
                  lo       hi               |    n                                   n + R

The rows stand at positions n, n + 1, ... for every chunk, and attend to the prompt and to the rows before them. The
request has no rows of its own meanwhile. The last repeat is followed by the decision, as of other policies whose layers
share one budget. The queries of the prompt's window, if the configuration has one, are kept until then.

Owns nothing: a schedule has no state, and what the repeats say is the request's (``schedules/inputs.py``). What a
repeat stores is dropped in its step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.policies.cuts import Question
from vllm_kvevict.policies.inputs import REPEATED
from vllm_kvevict.policies.kvzip import MIN_CHUNK, repeat_attention
from vllm_kvevict.schedules.base import RankCapacity, pages_for
from vllm_kvevict.schedules.evictor import Evictor, ExtraRows, LayerStep, QueryRows, ResidentRequest
from vllm_kvevict.schedules.repeat_prompts import MOST_EXTRA_ROWS
from vllm_kvevict.schedules.reports import ExtraTokens
from vllm_kvevict.schedules.shared import ByScore


class ByRepeat(ByScore):
    """The candidates of all layers compete, by what each received while the prompt was repeated."""

    reads_token_ids = True
    repeats_prompt = True

    def most_extra_rows(self, params: Mapping[str, Any]) -> int:
        return int(params["kvzip_chunk"]) + MOST_EXTRA_ROWS

    def chunks(self, config: EvictionConfig, n: int, longest: int) -> list[tuple[int, int]]:
        size = _chunk_size(config, n, longest)
        return [(start, min(start + size, n)) for start in range(0, n, size)]

    def conflict_with_length(self, config: EvictionConfig, n: int, longest: int) -> str | None:
        if _chunk_size(config, n, longest) >= min(MIN_CHUNK, n):
            return None
        most = longest - MIN_CHUNK - MOST_EXTRA_ROWS - 1
        return (
            f"repeats the tokens it evicts after the prompt, so with --max-model-len {longest} it can evict at most "
            f"{max(most, 0)} tokens, not {n}"
        )

    def extra_entries(self, config: EvictionConfig, n: int, page_size: int) -> int:
        chunk = min(config.params["kvzip_chunk"], n)
        rows = chunk + MOST_EXTRA_ROWS
        if config.params["kvzip_sees"] == "all":
            return rows
        # Copies of what the rows see come before them, in pages of their own.
        return page_size * pages_for(config.params["sinks"] + chunk + rows, page_size)

    def peak(self, config: EvictionConfig, n: int, rank: RankCapacity, page_size: int, by_layer: bool) -> int:
        return rank.rows * pages_for(n + self.extra_entries(config, n, page_size), page_size)

    def begin_extra(self, evictor: Evictor, resident: ResidentRequest, extra: ExtraTokens) -> int:
        if resident.plan.config.params["kvzip_sees"] == "all":
            return resident.request_slot
        return evictor.open_scratch(resident, self._seen(evictor, resident, extra))

    def after_layer(self, evictor: Evictor, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if rows.extra is None:
            return
        resident, last = rows.resident, evictor.is_last(step.layer)
        self._note(evictor, step, resident, rows.extra)
        if rows.evicts:
            asked = resident.collected.window
            evictor.score(step, rows, None if asked is None else asked[step.layer])
        if not last:
            return
        evictor.drop_extra_entries(resident)
        if rows.evicts and evictor.has_all_layers:
            evictor.decide(resident)
        elif rows.evicts:
            evictor.send_tally(resident, Question())

    def _seen(self, evictor: Evictor, resident: ResidentRequest, extra: ExtraTokens) -> Tensor:
        """The tokens over which a chunk's scores are taken, beside the repeat's own: int64, ascending."""
        sinks = min(resident.plan.config.params["sinks"], extra.start)
        first = torch.arange(sinks, device=evictor.cache.device)
        chunk = torch.arange(extra.start, extra.stop, device=evictor.cache.device)
        return torch.cat((first, chunk))

    def _note(self, evictor: Evictor, step: LayerStep, resident: ResidentRequest, extra: ExtraRows) -> None:
        """Note what the chunk's tokens received in a layer."""
        n, chunk = resident.plan.evict_at, extra.tokens
        assert n is not None
        seen, cache = self._seen(evictor, resident, chunk), evictor.cache
        if resident.scratch is None:
            entries = torch.cat((seen, torch.arange(n, n + extra.count, device=cache.device)))
            keys = cache.read_keys_at(resident.request_slot, step.layer, entries)
        else:
            keys = cache.read_keys(resident.scratch, step.layer, len(seen) + extra.count)
        places = slice(len(seen) - (chunk.stop - chunk.start), len(seen))
        tokens = evictor.tokens(step, resident, extra.rows)
        sums = resident.collected.sums_of(evictor.sources, tokens)
        most = repeat_attention(tokens.query, keys, places, step.scale, step.softcap)
        sums[REPEATED][:, chunk.start : chunk.stop] = most


def _chunk_size(config: EvictionConfig, n: int, longest: int) -> int:
    """Tokens of a chunk: what the policy says, but no more than a request of ``longest`` tokens has room for."""
    # vLLM counts one token more than is computed, since a request that ends there would sample.
    return min(config.params["kvzip_chunk"], n, longest - n - MOST_EXTRA_ROWS - 1)
