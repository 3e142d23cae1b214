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

from vllm_kvevict.policies.inputs import REPEATED
from vllm_kvevict.policies.kvzip import MIN_CHUNK, MOST_SINKS, repeat_attention
from vllm_kvevict.schedules.base import RankCapacity, pages_for
from vllm_kvevict.schedules.inputs import LayerStep, LayerTokens
from vllm_kvevict.schedules.lookahead import LookaheadEviction
from vllm_kvevict.schedules.plan import Phase
from vllm_kvevict.schedules.repeat_prompts import MOST_EXTRA_ROWS
from vllm_kvevict.schedules.reports import ExtraTokens
from vllm_kvevict.schedules.shared import ByScore, EvictionByScore
from vllm_kvevict.schedules.step_rows import ExtraRows, QueryRows


class EvictionByRepeat(EvictionByScore):
    """Of one prompt, by what its tokens receive in the repeats."""

    def evicts_after(self, position: int) -> bool:
        return False

    def begin_extra(self, extra: ExtraTokens) -> int:
        if self.phase.config.params["kvzip_sees"] == "all":
            return self.resident.request_slot
        return self.open_scratch(self._seen(extra))

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if rows.extra is None:
            return
        self.note_repeat(step, rows.extra)
        if rows.evicts:
            asked = self.collected.window
            super().after_layer(step, rows, None if asked is None else asked[step.layer])

    def _seen(self, extra: ExtraTokens) -> Tensor:
        """The entries over which a chunk's scores are taken, beside the repeat's own: int64 [rows or 1, N]."""
        device, chunk, pinned = self.evictor.cache.device, self._of_phase(extra), self.selection.pinned
        first = torch.arange(self._sinks_before(chunk), device=device)
        before = torch.zeros(1) if pinned is None else torch.from_numpy(pinned.ravel())
        own = before.to(device, torch.int64)[:, None] + torch.arange(chunk.start, chunk.stop, device=device)
        return torch.cat((first.expand(len(own), -1), own), 1)

    def note_repeat(self, step: LayerStep, extra: ExtraRows) -> None:
        """Note what a chunk's tokens received in a layer; after the last one its repeat is dropped."""
        tokens, chunk = self.tokens(step, extra.rows), self._of_phase(extra.tokens)
        first = self._sinks_before(chunk)
        if self.scratch is None:
            keys = self._seen_keys(tokens, first, chunk, extra.count)
        else:
            length = first + chunk.stop - chunk.start + extra.count
            keys = self.evictor.cache.read("key", self.scratch, step.layer, length)
        places = slice(first, first + chunk.stop - chunk.start)
        sums = self.collected.sums_of(self.evictor.sources, tokens)
        most = repeat_attention(tokens.query, keys, places, step.scale, step.softcap)
        sums[REPEATED][:, chunk] = most
        if self.evictor.is_last(step.layer):
            self.drop_extra_entries()

    def _of_phase(self, extra: ExtraTokens) -> slice:
        """The tokens of the phase that are repeated."""
        return slice(extra.start - self.phase.begins, extra.stop - self.phase.begins)

    def _sinks_before(self, chunk: slice) -> int:
        """How many of the request's first entries scores are taken over, beside the chunk and the repeat's own.

        Where earlier parts were evicted these are what is left of them at the front, attention sinks first.
        """
        sinks: int = self.resident.plan.config.params["sinks"]
        if self.selection.pinned is None:
            return min(sinks, chunk.start)
        return min(sinks, MOST_SINKS, int(self.selection.pinned.min()))

    def _seen_keys(self, tokens: LayerTokens, first: int, chunk: slice, count: int) -> Tensor:
        """The keys over which a chunk's scores are taken, [Hkv, N, d]: the first ones, the chunk's, the repeat's."""
        sources, n = self.evictor.sources, self.resident.tokens - self.phase.begins
        parts = [
            sources.cache.read("key", tokens.request_slot, tokens.step.layer, first),
            tokens.keys_between(sources, chunk.start, chunk.stop),
            tokens.keys_between(sources, n, n + count),
        ]
        return torch.cat(parts, 1)


class RepeatAfterLookahead(LookaheadEviction, EvictionByRepeat):
    """Of one prompt whose answer has begun: what its repeats say is noted as soon as it is read."""

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if rows.extra is None:
            EvictionByScore.after_layer(self, step, rows, window)
        else:
            self.note_repeat(step, rows.extra)


class ByRepeat(ByScore):
    """The candidates of all layers compete, by what each received while the prompt was repeated."""

    eviction, after_lookahead = EvictionByRepeat, RepeatAfterLookahead
    reads_token_ids = True
    repeats_prompt = True

    def most_extra_rows(self, params: Mapping[str, Any]) -> int:
        return int(params["kvzip_chunk"]) + MOST_EXTRA_ROWS

    def chunks(self, phase: Phase, longest: int) -> list[tuple[int, int]]:
        stop, size = phase.repeated_at, _chunk_size(phase, longest)
        return [(start, min(start + size, stop)) for start in range(phase.begins, stop, size)]

    def conflict_with_length(self, phase: Phase, longest: int) -> str | None:
        if _chunk_size(phase, longest) >= min(MIN_CHUNK, phase.repeated_at - phase.begins):
            return None
        most = longest - MIN_CHUNK - MOST_EXTRA_ROWS - 1
        return (
            f"repeats the tokens it evicts after the prompt, so with --max-model-len {longest} it can evict at most "
            f"{max(most, 0)} tokens, not {phase.repeated_at}"
        )

    def extra_entries(self, phase: Phase, page_size: int) -> int:
        params = phase.config.params
        chunk = min(params["kvzip_chunk"], phase.n)
        rows = chunk + MOST_EXTRA_ROWS
        if params["kvzip_sees"] == "all":
            return rows
        # Copies of what the rows see come before them, in pages of their own. A later part has no sinks itself; how
        # many stand in for them, its configuration does not say.
        sinks = MOST_SINKS if phase.begins else params["sinks"]
        return page_size * pages_for(sinks + chunk + rows, page_size)

    def peak(self, phase: Phase, rank: RankCapacity, page_size: int, by_layer: bool) -> int:
        return rank.rows * pages_for(phase.end + self.extra_entries(phase, page_size), page_size)


def _chunk_size(phase: Phase, longest: int) -> int:
    """Tokens of a chunk: what the policy says, but no more than a request of ``longest`` tokens has room for."""
    # vLLM counts one token more than is computed, since a request that ends there would sample.
    room = longest - phase.repeated_at - MOST_EXTRA_ROWS - 1
    return min(phase.config.params["kvzip_chunk"], phase.repeated_at - phase.begins, room)
