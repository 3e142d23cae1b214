"""Run requests through a real engine and bring back tokens, logits, and what every layer and head kept."""

import contextlib
import dataclasses
import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from tests.engine.support.quick_starts import forked_processes
from vllm_kvevict.engine.frontend.repeats import repeat_prompts
from vllm_kvevict.engine.worker import recording
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

if current_platform.is_cpu():
    # Workers are forked: what is imported here is not imported in each of them again.

    import vllm_kvevict.engine.worker.cpu  # noqa: F401

VOCAB = 512
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
KV_BYTES = 1 << 27
GPU_SHARE = 0.3
"""Of a GPU's memory, which must be free when an engine starts: several may run beside each other."""


@dataclass
class Ask:
    """A request: a prompt of ``length`` random tokens, unless it says its ``tokens``, and what to do with it."""

    length: int
    policy: str = "full"
    budget: float | None = None
    prefix_len: int | None = None
    max_tokens: int = 16
    seed: int = 0
    adapter: LoRARequest | None = field(default=None, kw_only=True)
    params: str | None = field(default=None, kw_only=True)
    decode_budget: int | None = field(default=None, kw_only=True)
    lookahead: int | None = field(default=None, kw_only=True)
    turns: tuple[int, ...] = field(default=(), kw_only=True)
    whole: int = field(default=0, kw_only=True)
    tokens: Sequence[int] = field(default=(), kw_only=True)

    @property
    def evicted_to(self) -> int:
        """Tokens of the prompt that are evicted, where any are."""
        return self.turns[-1] if self.turns else self.prefix_len or self.length

    @property
    def prompt(self) -> list[int]:
        if self.tokens:
            return list(self.tokens)
        chooser = random.Random(1000 * self.seed + self.length)
        return [chooser.randrange(8, VOCAB) for _ in range(self.length)]

    @property
    def request(self) -> dict[str, Any]:
        """As vLLM takes it."""
        return {"prompt_token_ids": self.prompt}

    def config(self, **params: Any) -> EvictionConfig:
        """How it is evicted on a server with these parameters."""
        assert self.budget is not None
        budget = {"keep_ratio": self.budget} if self.budget <= 1 else {"budget": int(self.budget)}
        return EvictionConfig(self.policy, **budget, **params)

    def sampling(self, logits: bool) -> SamplingParams:
        fields: dict[str, Any] = {"kv_eviction": self.policy}
        if self.budget is not None:
            fields["kv_budget"] = self.budget
        if self.prefix_len is not None:
            fields["kv_prefix_len"] = self.prefix_len
        if self.params is not None:
            fields["kv_params"] = self.params
        if self.turns:
            fields["kv_turns"] = list(self.turns)
        if self.whole:
            fields["kv_rendered"] = {"whole": self.whole}
        if self.decode_budget is not None:
            fields["kv_decode_budget"] = self.decode_budget
        if self.lookahead is not None:
            fields["kv_lookahead"] = self.lookahead
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0,
            ignore_eos=True,
            extra_args=fields,
            logprobs=VOCAB if logits else None,
            detokenize=False,  # of each of those, too, which takes longer than all else
        )


@dataclass
class Answer:
    """What came back.

    Attributes:
        tokens: generated ids.
        logits: [generated, vocabulary], empty unless asked for.
        kept: by global layer, for each global KV head the kept positions, of every eviction in order.
        scores: by global layer and rank, what the choice was made from.
        prompt: its tokens as they were read, those of images included.
    """

    tokens: list[int]
    logits: torch.Tensor
    kept: list[dict[int, list[list[int]]]] = field(default_factory=list)
    scores: list[dict[int, torch.Tensor]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)


OTHER_NAMES = {
    "max_num_seqs": "max_num_active_seqs",
    "max_num_batched_tokens": "max_num_scheduled_tokens",
    "kv_cache_dtype": "cache_dtype",
}
"""Of settings in vLLM's configuration, some of them where workers get buffers for more."""


def check_taken(settings: dict[str, Any], vllm_config: Any) -> None:
    """vLLM overrules some settings, depending on the platform: what tests them would then be another test's copy."""
    parts = [vars(part) for part in vars(vllm_config).values() if dataclasses.is_dataclass(part)]
    for name, given in settings.items():
        names = {name, OTHER_NAMES.get(name)}
        found = [value for part in parts for field, value in part.items() if field in names]
        if found and given is not None:
            assert given in found or f"torch.{given}" in map(str, found), (
                f"vLLM made {found} of {name}={given!r}"
            )


@contextlib.contextmanager
def engine(model: Path, **settings: Any) -> Iterator[LLM]:
    """An engine that is shut down at the end."""
    asked = dict(settings)  # by the test; how much memory there is, a process's environment may say
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": KV_BYTES,
    }
    if not current_platform.is_cpu():
        defaults["gpu_memory_utilization"] = GPU_SHARE
    settings = {**defaults, **settings}
    with (
        # vLLM compiles a helper of its sampler even in eager mode, which takes longer than these tests.
        torch._dynamo.config.patch(disable=settings["enforce_eager"]),
        forked_processes(),
    ):
        llm = LLM(
            str(model), max_logprobs=-1, logprobs_mode="raw_logits", disable_log_stats=False, **settings
        )
        try:
            check_taken(asked, llm.llm_engine.vllm_config)
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()  # engines refer to themselves, and each holds its KV memory
            gc.freeze()  # what is left was imported, and is not looked through again


@contextlib.contextmanager
def evicting_engine(model: Path, *, eviction: dict[str, Any] | None = None, **settings: Any) -> Iterator[LLM]:
    """An engine with eviction on, opt-in per request unless ``eviction`` says more, recording decisions.

    Without prefix caching unless told otherwise, so that each request has an eviction to record.
    """
    options = {"policy": "full", "min_prompt": 0, "policies": "all", **(eviction or {})}
    settings = {"enable_prefix_caching": False, **settings}
    with engine(model, additional_config={"kv_eviction": options}, **settings) as llm:
        llm.collective_rpc(recording.record, args=(True,))
        yield llm


def run(llm: LLM, asks: Sequence[Ask], *, logits: bool = False, recorded: bool = True) -> list[Answer]:
    """All requests at once."""
    prompts = [ask.request for ask in asks]
    sampling, adapters = [ask.sampling(logits) for ask in asks], [ask.adapter for ask in asks]
    outputs = llm.generate(
        prompts, sampling, use_tqdm=False, lora_request=adapters if any(adapters) else None
    )
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        rows = torch.full((len(completion.token_ids), VOCAB), float("nan")) if logits else torch.empty(0)
        for row, entries in zip(rows, completion.logprobs or (), strict=False):
            for token, entry in entries.items():
                row[token] = entry.logprob
        answers.append(Answer(list(completion.token_ids), rows, prompt=list(output.prompt_token_ids)))
    if recorded:
        bring_decisions(llm, [output.request_id for output in outputs], answers)
    return answers


def run_preempted(
    llm: LLM, asks: Sequence[Ask], *at: int, resets: bool = True, recorded: bool = False, **options: Any
) -> list[Answer]:
    """All requests at once, and all that run preempted before the steps of these numbers, 0 for the first.

    Args:
        resets: whether the cache is reset then.
        options: of :func:`run`.
    """
    steps, step = itertools.count(), llm.llm_engine.step

    def counted() -> Any:
        if next(steps) in at:
            _preempt(llm, resets)
        return step()

    with mock.patch.object(llm.llm_engine, "step", counted):
        return run(llm, asks, recorded=recorded, **options)


def _preempt(llm: LLM, resets: bool) -> None:
    """Preempt all that run."""
    if resets:
        assert llm.reset_prefix_cache(reset_running_requests=True)
        return
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), 0.0)


def run_aborted(llm: LLM, asks: Sequence[Ask], after: Sequence[int]) -> list[list[int] | None]:
    """Tokens of all requests at once; None of those that are aborted before they end.

    Args:
        after: how many steps each is aborted; 0: never.
    """
    engine = llm.llm_engine
    for index, ask in enumerate(asks):
        engine.add_request(f"r{index}", {"prompt_token_ids": ask.prompt}, ask.sampling(logits=False))
    done: dict[str, list[int]] = {}
    for step in itertools.count(1):
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        engine.abort_request([f"r{index}" for index, last in enumerate(after) if last == step])
        if not engine.has_unfinished_requests():
            break
    return [done.get(f"r{index}") for index in range(len(asks))]


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def assert_same(
    expected: Sequence[Answer], answers: Sequence[Answer], kept: bool = True, **tolerance: float
) -> None:
    """The same tokens, from the same entries unless told otherwise, and equal logits where both have some."""
    for index, (one, other) in enumerate(zip(expected, answers, strict=True)):
        assert one.tokens == other.tokens, index
        assert not kept or one.kept == other.kept, index
        if one.logits.numel() and other.logits.numel():
            torch.testing.assert_close(one.logits, other.logits, **(tolerance or CLOSE))


def decided(llm: LLM, outputs: Sequence[Any]) -> list[Answer]:
    """Tokens of what came back, with what was kept of each request."""
    answers = [
        Answer(list(output.outputs[0].token_ids), torch.empty(0), prompt=list(output.prompt_token_ids))
        for output in outputs
    ]
    bring_decisions(llm, [output.request_id for output in outputs], answers)
    return answers


def plain_prompts(llm: LLM) -> RepeatPrompts:
    """What the model is asked when it repeats a prompt that is no chat."""
    return repeat_prompts(llm.llm_engine.renderer, None)


def metric(llm: LLM, name: str) -> int:
    """A counter or gauge, summed over ranks."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def num_preemptions(llm: LLM) -> int:
    """Preemptions since the engine started."""
    return metric(llm, "num_preemptions")


def bring_decisions(llm: LLM, names: Sequence[str], answers: Sequence[Answer]) -> None:
    """Give answers what was kept of their requests, and the scores behind it.

    Args:
        names: of the requests, by vLLM.
    """
    joined = recording.evictions(llm.collective_rpc(recording.take_decisions))
    for name, answer in zip(names, answers, strict=True):
        for eviction in recording.of_request(joined, name):
            kept = eviction.kept.items()
            answer.kept.append({layer: [head.tolist() for head in heads] for layer, heads in kept})
            answer.scores.append(eviction.scores)
