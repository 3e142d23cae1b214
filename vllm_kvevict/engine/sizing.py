"""What a server would admit, without one: the numbers of ``vllm-kvevict sizing``."""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.errors import in_one_line
from vllm_kvevict.engine.frontend.checks import check_stages
from vllm_kvevict.engine.layers import FULL_ATTENTION, NULL_BLOCKS, layer_types
from vllm_kvevict.engine.memory import is_asynchronous, most_choosing, rank_capacities, stage_layers
from vllm_kvevict.engine.request_options import RENDERED, TURNS, Rendered, plan_for
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import AdmissionControl, Shortage
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds, last_that
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import schedule_of
from vllm_kvevict.server import Server


def most_layers(server: Server) -> int:
    """Layers of the pipeline stage that has the most."""
    return max(map(len, stage_layers(server.layers, server.pipeline_parallel_size)))


def blocks(server: Server) -> int:
    """vLLM's blocks: the stage with the most layers has room for the fewest, and every stage gets as many."""
    pages = server.layout.pages_of(server.block_size) * most_layers(server)
    return server.memory // (server.layout.reserved_bytes * pages)


def counted_blocks(server: Server) -> int:
    """Those that vLLM's check at start-up counts."""
    return max(0, blocks(server) - NULL_BLOCKS)


def read_model(name: str, max_model_len: int | None, dtype: str) -> dict[str, Any]:
    """What the KV cache depends on, as vLLM would serve it; no weights are read.

    Args:
        name: a folder, a file of a configuration or a Hugging Face id.
        max_model_len, dtype: as for ``vllm serve``.

    Raises:
        ValueError: one sentence that names ``--model``.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = name
        if Path(name).is_file():
            path = folder
            Path(folder, "config.json").symlink_to(Path(name).resolve())
        try:
            args = EngineArgs(model=path, max_model_len=max_model_len, dtype=dtype, skip_tokenizer_init=True)
            model = args.create_model_config()
        except Exception as error:
            sentence = (
                in_one_line(error)
                .replace(f"{folder}/config.json", name)
                .replace(folder, name)
                .partition(". ")[0]
                .rstrip(".")
            )
            raise ValueError(f"--model {name}: vLLM refuses it ({sentence})") from error
    if model.use_mla or not set(layer_types(model.hf_text_config)) <= FULL_ATTENTION:
        raise ValueError(
            f"--model {name}: models with layers of several kinds, or with MLA, are not supported by this command"
        )
    return {
        "layers": model.get_total_num_hidden_layers(),
        "query_heads": model.get_num_attention_heads(ParallelConfig()),
        "kv_heads": model.get_total_num_kv_heads(),
        "head_dim": model.get_head_size(),
        "max_len": model.max_model_len,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def size(server: Server, settings: Mapping[str, Any], prompt: int, output: int) -> dict[str, Any]:
    """A row of the table, memory in bytes, for requests of ``prompt`` and ``output`` tokens.

    ``vllm_kvevict.sizing.LEGEND`` says what its columns mean. Settings are as of ``additional_config["kv_eviction"]``;
    ValueError names one that cannot be served.
    """
    options = Options.parse({"page_size": server.page_size, **settings})
    stages = stage_layers(server.layers, server.pipeline_parallel_size)
    check_stages(options.config, list(map(len, stages)), "--policy")
    control = _admission_control(server, options, stages)
    plan = plan_for(options, prompt, most_output=output)
    bounds, step, at = control.bounds, server.max_num_batched_tokens, max(prompt, plan.evicted_at)
    counts = [after_eviction(plan, at, rank, server.page_size) for rank in bounds.ranks]
    crowd = Crowd(control, plan, prompt, output, counts)
    at_once, limit = crowd.most_running(step)
    alone = crowd.newcomer(0)
    now = [count.at(at) for count in counts]
    ends = [bounds.most_held(plan, rank, count, prompt + output - 1) for rank, count in enumerate(counts)]
    page_bytes = server.layout.reserved_bytes
    return {
        "budget": "full" if plan.config.policy == "full" else f"{options.budget:g}",
        "answer": entries_of_answer(plan, prompt, output),
        "kept": prompt if plan.prompt is None else plan.config.budget_for(prompt),
        "reading": page_bytes * max(alone.terms.peak),
        "evicted": page_bytes * max(now),
        "end": page_bytes * max(ends),
        "at once": at_once,
        "at end": min(rank.pages // pages for rank, pages in zip(bounds.ranks, ends, strict=True)),
        "longest": _bounds(server, stages, counted_blocks(server)).longest_prompt(
            partial(plan_for, options), server.max_len
        ),
        "layered": "yes" if alone.terms.by_layer else "no",
        "cached": cached(plan, bounds.ranks, now),
        "limit": limit.value if limit and at_once < step else "tokens of a step",
        "price": f"{price(options, prompt, output):.2f}",
    }


def price(options: Options, prompt: int, output: int) -> float:
    """How much memory, times how long, an answer takes with its lookahead, over that without; in entries, not pages."""
    plan = plan_for(options, prompt)
    ahead = min(plan.evicted_at - prompt, output)
    if ahead <= 0:
        return 1.0
    kept = plan.config.budget_for(prompt)
    return 1 + ahead * (prompt - kept) / (output * (kept + output / 2))


def entries_of_answer(plan: Plan, prompt: int, output: int) -> int:
    """The most entries of an answer that each KV head holds on average; its last token is not stored."""
    last = prompt + output - 1
    if plan.answer is None or plan.answer.last_eviction(last) is None:
        return output - 1
    return plan.answer.positions[0] - prompt


def cached(plan: Plan, ranks: Sequence[RankCapacity], pages: Sequence[int]) -> int:
    """How many evicted prefixes that hold so many pages of each rank can be cached; what is kept whole never is."""
    if plan.prompt is None:
        return 0
    return min(min(rank.pages // held, rank.most_prefixes) for rank, held in zip(ranks, pages, strict=True))


def conversations(server: Server, settings: Mapping[str, Any], prompt: int, turn: int) -> dict[str, int]:
    """Two more columns of a row: how many conversations stay cached, if the memory holds nothing else.

    Each has as many tokens as the prompt, in turns of ``turn`` tokens; what is left over belongs to the last one. Their
    tails are one turn more, the last question and answer, that is not evicted yet. Where what comes before the first
    question stays whole, that is the first turn.

    Raises:
        ValueError: the settings cannot evict turn by turn.
    """
    options = Options.parse({"page_size": server.page_size, **settings})
    bounds = _admission_control(
        server, options, stage_layers(server.layers, server.pipeline_parallel_size)
    ).bounds
    fields: dict[str, Any] = {TURNS: [*range(turn, prompt - turn + 1, turn), prompt]}
    if options.keep_first:
        fields[RENDERED] = Rendered(whole=fields[TURNS][0])
    plan = plan_for(options, prompt, fields)
    chats, with_tail = [], []
    for rank in bounds.ranks:
        most = rank.most_prefixes // max(1, len(plan.parts))
        chain, tail = pages_of_chain(plan, prompt, prompt + turn, rank, server.page_size)
        chats.append(min(most, rank.pages // chain))
        with_tail.append(min(most, rank.pages // (chain + tail)))
    return {"chats": min(chats), "with tail": min(with_tail)}


def pages_of_chain(
    plan: Plan, prompt: int, tokens: int, rank: RankCapacity, page_size: int
) -> tuple[int, int]:
    """Pages of a rank that the entries of a conversation own, and those of what follows them up to so many tokens.

    Each entry fills the partial pages of the one before, in rows that it fills a page of; it copies the others.
    """
    ends = [part.end for part in plan.parts] or [prompt]
    counts = [after_eviction(plan, end, rank, page_size) for end in ends]
    last = counts[-1]
    chain = last.pages + sum(itertools.starmap(_stored_twice, itertools.pairwise(counts)))
    return chain, last.at(tokens) - last.pages + last.partial


def _stored_twice(count: PageCount, behind: PageCount) -> int:
    """Partial pages of an entry that the one behind it does not fill, since it has no full page in their place."""
    full, then = count.pages - count.partial, behind.pages - behind.partial
    return max(0, count.partial - (then - full))


@dataclass(frozen=True)
class Crowd:
    """Requests of one kind that arrive together, whose prompts are read one after the other.

    Attributes:
        plan: of each.
        prompt, output: tokens of each.
        counts: pages of each on every rank, once it is evicted.
    """

    control: AdmissionControl
    plan: Plan
    prompt: int
    output: int
    counts: list[PageCount]

    @property
    def steps(self) -> int:
        """Steps that reading a prompt takes."""
        positions = self.plan.prompt.positions if self.plan.prompt else ()
        return max(-(-self.prompt // self.control.step_tokens), len(positions))

    def newcomer(self, running: int) -> Account:
        """The next request, which a step reads beside a token of each that runs."""
        first_step = min(self.prompt, self.control.step_tokens - running)
        return self.control.open(self.plan, first_step, self.prompt, self.output)

    def most_running(self, most: int) -> tuple[int, Shortage | None]:
        """How many run at once, ``most`` at most, and what one more would lack."""
        if self.plan.evicted_at > self.prompt:
            return self._most_after_waiting(most)
        count = last_that(lambda running: self.shortage(self._ages(running - 1)) is None, 0, most)
        return count, self.shortage(self._ages(count))

    def _ages(self, count: int) -> list[int]:
        """Tokens that the answers of so many have if none has waited, of which the last was read just now."""
        return [min(self.steps * place, self.output - 1) for place in range(count)]

    def _most_after_waiting(self, most: int) -> tuple[int, Shortage | None]:
        """The same where a prompt is held whole for a while, so that others wait for its eviction; until the first one
        that had to has ended."""
        ahead, ages, found, lacking = self.plan.evicted_at - self.prompt, list[int](), 0, None
        waited = 0
        while waited <= 2 * self.output and len(ages) < most:
            lacks = self.shortage(ages)
            if lacks is None:
                ages = [*(age + self.steps for age in ages), 0]
                if len(ages) > found:
                    found, lacking = len(ages), None
            elif not ages:
                return 0, lacks
            else:
                lacking = lacking or lacks
                wait = min((ahead if age < ahead else self.output) - age for age in ages)
                waited += wait
                ages = [age + wait for age in ages]
            ages = [age for age in ages if age < self.output]
        return found, lacking

    def shortage(self, ages: Sequence[int]) -> Shortage | None:
        """What one more request would lack beside others whose answers have so many tokens."""
        new = self.newcomer(len(ages))
        if not self.control.bounds.have_room_for(new.terms.peak):
            return Shortage.PROMPTS
        running = [self._running(new, self.prompt + age) for age in ages]
        return self.control.shortage(new, running)

    def _running(self, new: Account, tokens: int) -> Account:
        """One that has so many tokens; in its lookahead it holds, or is promised, the whole prompt."""
        if tokens < self.plan.evicted_at:
            return replace(new, held=new.terms.peak, tokens=tokens)
        return replace(new, counts=self.counts, tokens=tokens)


def reserve(server: Server, settings: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Bytes that the fullest rank sets aside beside the KV memory, and the policies that it is for."""
    options = Options.parse({"page_size": server.page_size, **settings})
    query_heads, kv_heads = (
        max(1, heads // server.tensor_parallel_size) for heads in (server.query_heads, server.kv_heads)
    )
    size = options.reserve_size(server.max_len, HeadDims(server.head_dim, query_heads // kv_heads))
    return 4 * size * most_layers(server) * query_heads, options.reserved_for


def kept_queries(server: Server, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that the fullest rank keeps of each request's queries, and the most requests that it has room for.

    A server whose ``--max-num-seqs`` is lower has room for so many.
    """
    queries, entries = Options.parse({"page_size": server.page_size, **settings}).kept_queries
    if not queries:
        return 0, 0
    query_heads = max(1, server.query_heads // server.tensor_parallel_size)
    layers, layout = most_layers(server), server.layout
    requests = most_choosing(server.memory, layers, layout, entries)
    # A query has the size of a key.
    return queries * query_heads * layers * layout.computed_key.nbytes, requests


def after_eviction(plan: Plan, tokens: int, rank: RankCapacity, page_size: int) -> PageCount:
    """Pages of a request on a rank once so many tokens of its prompt are read, and evicted where a part of it ends.

    Rows that compete are taken to end anywhere in a page.
    """
    rows, layers = rank.rows, rank.num_model_layers
    parts = [part for part in plan.parts if part.end <= tokens]
    budgets = [tokens - (parts[-1].end if parts else 0)] * layers
    for part in parts:
        of_part = schedule_of(part).layer_budgets(part, layers)
        budgets = [kept + more for kept, more in zip(budgets, of_part, strict=True)]
    on_rank = budgets[rank.first_layer :][: rank.num_layers]
    lengths = [budget for budget in on_rank for _ in range(rank.num_kv_heads)]
    if any(schedule_of(part).is_ragged(part.config) for part in parts):
        spread = [(2 * row + 1) * page_size // (2 * rows) - page_size // 2 for row in range(rows)]
        lengths = [max(1, min(kept + more, tokens)) for kept, more in zip(lengths, spread, strict=True)]
    residues = [sum(kept % page_size == rest for kept in lengths) for rest in range(page_size)]
    return PageCount.from_residues(sum(-(-kept // page_size) for kept in lengths), tokens, residues)


def _admission_control(server: Server, options: Options, stages: Sequence[range]) -> AdmissionControl:
    """The one that the server's ledger would ask. All of vLLM's blocks are pages."""
    bounds = _bounds(server, stages, blocks(server))
    return AdmissionControl(bounds, server.max_num_batched_tokens, options.decode_reserve, server.max_len)


def _bounds(server: Server, stages: Sequence[range], num_blocks: int) -> MemoryBounds:
    """With so many of vLLM's blocks."""
    pages = [server.layout.pages_of(num_blocks * server.block_size) * len(stage) for stage in stages]
    ranks = rank_capacities(list(stages), server.layout, pages)
    step = server.max_num_batched_tokens
    return MemoryBounds(ranks, server.page_size, step, len(stages), is_asynchronous())
