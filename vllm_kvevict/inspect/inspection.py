"""What policies keep of a prompt, seen in a real engine: the numbers of ``python -m vllm_kvevict.inspect``."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_kvevict.engine  # noqa: F401  adds the arguments of eviction to vLLM's
from vllm_kvevict.chats import ChatRequest
from vllm_kvevict.engine import versions
from vllm_kvevict.engine.config import ENGINE_DEFAULTS, KVEvictionError, check_parts, require_options
from vllm_kvevict.engine.errors import in_one_line
from vllm_kvevict.engine.frontend import command_line
from vllm_kvevict.engine.memory import bytes_for, overruled_memory
from vllm_kvevict.engine.request_options import plan_for
from vllm_kvevict.engine.worker import recording
from vllm_kvevict.inspect.conversations import Reading, reading_of_chat, reading_of_text
from vllm_kvevict.inspect.data import Inspection, Kept
from vllm_kvevict.policy_list import PolicySpec
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import can_look_ahead

QUIET = {
    "enforce_eager": True,  # one prompt is read: neither graphs nor compiled code would pay
    "enable_prefix_caching": False,  # each policy reads the prompt itself
    "use_tqdm_on_load": False,
}
"""How the engine runs unless its arguments say otherwise."""

BLOCK = 128
"""Tokens of a block on CPUs: what vLLM takes there by itself, in 0.33 only once layers exist, too late to ask."""

MEMORY_ARGUMENTS = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")
"""Arguments of vLLM's with which users choose the KV memory."""

ANSWER_LENGTH = 2
"""With one token the request could end before it is evicted: before a second one it waits for that."""


TEMPLATE_ARGUMENTS = (
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
)
"""Arguments of vLLM's front end that a chat's prompt depends on."""


def parse_server_arguments(program: str, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `vllm serve`, those alone that were given; ends the command at a bad one.

    Returns:
        the engine's, and those of ``TEMPLATE_ARGUMENTS``, with the text of the template.

    Raises:
        ValueError: one is of the front end's others, or the template cannot be read; one sentence.
    """
    parser = FlexibleArgumentParser(prog=program, usage=f"{program} ... [arguments of vllm serve]")
    versions.load(versions.moves().make_arg_parser)(parser)
    # So that nobody's wish is taken for a default: --no-enforce-eager, or --model with the one that vLLM would take.
    parser.set_defaults(**QUIET, model=None)
    values = vars(command_line.parse(parser, words))
    if values["model_tag"] is not None:
        parser.error(f"unrecognized arguments: {values['model_tag']}")
    given = {name: value for name, value in values.items() if value != parser.get_default(name)}
    template = {name: given.pop(name) for name in TEMPLATE_ARGUMENTS if name in given}
    try:
        if "chat_template" in template:
            template["chat_template"] = load_chat_template(template["chat_template"])
    except VLLMValidationError as error:
        raise ValueError(f"--chat-template: {error.args[0]}") from error
    of_engine = vars(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([]))
    for name in given:
        if name not in of_engine:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is for a server's front end, which is not started here: leave it out")
    return given, template


@dataclass(frozen=True)
class Wanted:
    """What is to be seen.

    Attributes:
        model: folder or Hugging Face id.
        text: of the prompt; empty if a chat is read.
        policies: without doubles; parameters in ``arguments["kv_eviction_config"]`` are those of the first, which has
            no others.
        budget: as of ``--kv-budget``.
        prefix_len: choose among so many first tokens, and keep the others.
        arguments: of vLLM's engine.
        tell: is told what goes on.
        turns: evict the prompt turn by turn, which end after so many tokens.
        chats: what is read instead of a prompt, turn by turn: a chat, and one that branches off.
        template: see TEMPLATE_ARGUMENTS.
    """

    model: str
    text: str
    policies: Sequence[PolicySpec]
    budget: float
    prefix_len: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda line: None
    turns: Sequence[int] = ()
    chats: Sequence[ChatRequest] = ()
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Entries of ``--kv-eviction-config``."""
        return dict(self.arguments.get("kv_eviction_config") or {})

    def fields(self, policy: PolicySpec) -> dict[str, Any]:
        """What a request with one of the policies says."""
        fields: dict[str, Any] = {"kv_eviction": policy.policy, "kv_budget": self.budget}
        return fields if self.prefix_len is None else fields | {"kv_prefix_len": self.prefix_len}

    @property
    def in_turns(self) -> bool:
        """Whether it is evicted turn by turn."""
        return bool(self.turns or self.chats)

    @property
    def min_turn(self) -> int | None:
        """Tokens of a turn that is evicted on its own: as on a server, where single prompts of any length are."""
        given = self.options.get("min_turn")
        return self.options.get("min_prompt", ENGINE_DEFAULTS["min_prompt"]) if given is None else given


def inspect(wanted: Wanted) -> Inspection:
    """Read a prompt once with each policy and see what it keeps.

    An engine takes parameters for one policy only, at its start: each of the others that has its own gets an engine.

    Raises:
        ValueError: the prompt, a policy or an argument cannot be served.
        RuntimeError: vLLM does not start.
    """
    for chat in wanted.chats:
        if chat.has_template and not wanted.template.get("trust_request_chat_template"):
            raise ValueError(
                "the chat has a chat_template, which servers take with --trust-request-chat-template only: add it"
            )
    if wanted.in_turns:
        name = "--chat" if wanted.chats else "--turns"
        for entry in wanted.policies:
            check_parts(entry.policy, int(wanted.budget) if wanted.budget > 1 else None, name)
    found = _inspected(replace(wanted, policies=[entry for entry in wanted.policies if not entry.texts]))
    others = {}
    for entry in wanted.policies:
        if entry.texts:
            of_engine = {name: value for name, value in wanted.options.items() if name in ENGINE_DEFAULTS}
            if not can_look_ahead(entry.policy):
                of_engine.pop("lookahead", None)  # as in an engine whose own policy is another
            asked = {**wanted.arguments, "kv_eviction_config": of_engine | entry.parameters}
            others[entry] = _inspected(replace(wanted, policies=[entry], arguments=asked))
    return _in_order(wanted.policies, found, others)


def _in_order(
    policies: Sequence[PolicySpec], found: Inspection, others: Mapping[PolicySpec, Inspection]
) -> Inspection:
    """What several engines show, as one: the policies without parameters come from one of them."""
    plain = [entry for entry in policies if not entry.texts]
    kept = dict(zip(plain, found.kept, strict=True)) | {entry: one.kept[0] for entry, one in others.items()}
    branch = found.branch
    if branch is not None:
        branches = {entry: one.branch for entry, one in others.items() if one.branch is not None}
        branch = _in_order(policies, branch, branches)
    return replace(found, kept=[replace(kept[entry], policy=str(entry)) for entry in policies], branch=branch)


def _inspected(wanted: Wanted) -> Inspection:
    """What an engine shows whose own policy is the first."""
    first = wanted.policies[0]
    wanted.tell(f"starting vLLM with {wanted.model}" + (f" for {first}" if first.texts else ""))
    with _engine(wanted) as llm:
        return read(llm, wanted)


def read(llm: LLM, wanted: Wanted) -> Inspection:
    """The same in an engine that runs, records (:func:`recording.record`) and evicts prompts of any length."""
    readings = _readings(llm.llm_engine.vllm_config, llm.renderer, wanted)
    first, *branches = (_read(llm, wanted, reading) for reading in readings)
    return replace(first, branch=branches[0] if branches else None)


def _readings(vllm_config: Any, renderer: Any, wanted: Wanted) -> list[Reading]:
    """What is read: a text, or a chat and perhaps another one."""
    if not wanted.chats:
        return [reading_of_text(vllm_config, renderer, wanted.text, wanted.turns)]
    return [reading_of_chat(vllm_config, renderer, chat, wanted.template) for chat in wanted.chats]


def _read(llm: LLM, wanted: Wanted, reading: Reading) -> Inspection:
    """One of the prompts."""
    prompt = reading.prompt
    wanted.tell(f"the prompt has {len(prompt.ids):,} tokens")
    ranks = llm.collective_rpc(recording.layout)
    layers, layout = sorted({layer for of_rank, _ in ranks for layer in of_rank}), ranks[0][1]
    shape = len(layers), layout.model_rows, len(prompt.ids)
    kept: list[Kept] = []
    turns: tuple[int, ...] = ()
    answer: list[int] = []
    for entry in wanted.policies:
        mask, plan, tokens = _mask(llm, reading, wanted.fields(entry), shape)
        # Those before the eviction see the whole prompt, so they are the same with every policy that waits for them.
        answer = answer or tokens[: max(0, plan.evicted_at - len(prompt.ids))]
        kept.append(Kept(entry.policy, wanted.budget, mask))
        if reading.turns and plan.parts:
            turns = tuple(part.end for part in plan.parts)
        wanted.tell(f"{entry.policy} keeps {kept[-1].entries.sum():,} of {kept[-1].mask.size:,} entries")
    evicted = turns[-1] if turns else wanted.prefix_len or len(prompt.ids)
    text = llm.get_tokenizer().decode(answer) if answer else ""
    return Inspection(
        wanted.model, prompt, evicted, layers, layout.page_size, layout.page_bytes, kept, turns, text
    )


@contextlib.contextmanager
def _engine(wanted: Wanted) -> Iterator[LLM]:
    """An engine that evicts with the first policy and lets requests name the others, however short they are."""
    own, *others = (entry.policy for entry in wanted.policies)
    config = {**wanted.options, "min_prompt": 0, "min_turn": wanted.min_turn}
    scope = "turns" if wanted.in_turns else "prompt"
    config |= {"scope": scope, "policies": list(dict.fromkeys(others))}
    ours = {"kv_eviction": own, "kv_budget": wanted.budget, "kv_eviction_config": config}
    blocks = {"block_size": BLOCK} if current_platform.is_cpu() else {}
    settings = {**QUIET, **blocks, **wanted.arguments, **ours}
    with _starting():
        vllm_config = EngineArgs(model=wanted.model, **settings).create_engine_config(UsageContext.LLM_CLASS)
        renderer = renderer_from_config(vllm_config)
    try:
        _check_lengths(_readings(vllm_config, renderer, wanted), vllm_config.model_config.max_model_len)
    finally:
        renderer.shutdown()
    with _starting():
        llm = LLM(wanted.model, **settings, **_kv_memory(wanted, settings, vllm_config))
    try:
        if reason := overruled_memory(settings.get("kv_cache_memory_bytes"), llm.llm_engine.vllm_config):
            wanted.tell(reason)  # the log's warnings are not shown
        llm.collective_rpc(recording.record)
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()  # engines refer to themselves, and another one may follow


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Say in one sentence why vLLM does not start."""
    try:
        yield
    except KVEvictionError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"vLLM does not start ({in_one_line(error)}): set VLLM_LOGGING_LEVEL=INFO to see more"
        ) from error


def _check_lengths(readings: Sequence[Reading], longest: int) -> None:
    """Refuse prompts that are too long for the model before an engine starts for them.

    Raises:
        KVEvictionError: one sentence.
    """
    tokens = max(len(reading.prompt.ids) for reading in readings)
    if tokens >= longest:
        raise KVEvictionError(
            f"the prompt's {tokens:,} tokens and one of an answer exceed the {longest:,} tokens of --max-model-len: "
            "shorten the prompt or, if the model allows it, raise --max-model-len",
            "prompt",
        )


def _kv_memory(wanted: Wanted, settings: Mapping[str, Any], config: Any) -> dict[str, int]:
    """On a CPU, the KV memory that one prompt of the longest length needs with any of the policies.

    By itself vLLM would take nearly all memory of the machine. Nothing where the user has chosen; where there is less
    than is needed, so that vLLM refuses in terms of its own flags; and on GPUs, where it measures first what is free.
    """
    if any(settings.get(name) is not None for name in MEMORY_ARGUMENTS) or not current_platform.is_cpu():
        return {}
    if config.cache_config.kv_cache_memory_bytes is not None:  # by vLLM's environment variable
        return {}
    options, tokens = require_options(config), config.model_config.max_model_len
    whole = replace(wanted, prefix_len=None)
    asked = [whole.fields(entry) for entry in wanted.policies]
    if wanted.prefix_len is not None and wanted.prefix_len <= tokens:
        asked += [wanted.fields(entry) for entry in wanted.policies]
    if wanted.in_turns:  # not layer by layer, so as much as what is kept whole
        asked.append({"kv_eviction": "full"})
    # vLLM's check at start-up asks for the longest prompt with the engine's own policy.
    plans = [plan_for(options, tokens, fields) for fields in (None, *asked)]
    needed = bytes_for(config, plans, tokens)
    return {"kv_cache_memory_bytes": needed} if needed < psutil.virtual_memory().available else {}


def _mask(
    llm: LLM, reading: Reading, fields: dict[str, Any], shape: tuple[int, int, int]
) -> tuple[np.ndarray, Plan, list[int]]:
    """Read a prompt as a request with these fields; what its evictions leave, bool [layers, KV heads, tokens], and the
    tokens that were written until then."""
    ids = reading.prompt.ids
    llm.reset_prefix_cache()  # what is found there is not evicted again, so it would not be seen
    try:
        fields = reading.fields(llm, fields)
        plan = plan_for(require_options(llm.llm_engine.vllm_config), len(ids), fields)
        length = ANSWER_LENGTH + max(0, plan.evicted_at - len(ids))
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0, extra_args=fields)
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    except VLLMValidationError as error:
        raise ValueError(error.args[0]) from error
    joined = recording.evictions(llm.collective_rpc(recording.take_decisions))
    done = recording.of_request(joined, output.request_id)
    mask, written = np.ones(shape, bool), list(output.outputs[0].token_ids)
    if plan.prompt is None:  # all of it fits the budget, or the policy evicts nothing
        return mask, plan, written
    if not done and len(written) < length:
        raise ValueError("the prompt leaves no room for an answer: raise --max-model-len")
    if not done:
        raise ValueError(
            f"{fields['kv_eviction']} cannot evict this model, which it keeps whole: leave it out"
        )
    mask[:, :, : plan.evicted_at] = False
    for layer, heads in done[-1].kept.items():
        for head, positions in enumerate(heads):
            mask[layer, head, positions[positions < len(ids)].numpy()] = True
    return mask, plan, written
