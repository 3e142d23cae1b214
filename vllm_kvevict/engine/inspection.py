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
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_kvevict.engine  # noqa: F401  adds the arguments of eviction to vLLM's
from vllm_kvevict.engine.config import ENGINE_DEFAULTS, KVEvictionError, require_options
from vllm_kvevict.engine.errors import in_one_line
from vllm_kvevict.engine.memory import bytes_for
from vllm_kvevict.engine.worker import recording
from vllm_kvevict.inspect.data import Inspection, Kept, Prompt
from vllm_kvevict.inspect.text import tokenize
from vllm_kvevict.policy_list import Entry

QUIET = {
    "enforce_eager": True,  # one prompt is read: neither graphs nor compiled code would pay
    "enable_prefix_caching": False,  # each policy reads the prompt itself
    "use_tqdm_on_load": False,
}
"""How the engine runs unless its arguments say otherwise."""

MEMORY_ARGUMENTS = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")
"""Arguments of vLLM's with which users choose the KV memory."""

ANSWER_LENGTH = 2
"""With one token the request could end before it is evicted: before a second one it waits for that."""


def parse_engine_arguments(program: str, words: Sequence[str]) -> dict[str, Any]:
    """vLLM's engine arguments from a command line, those alone that were given; ends the command at a bad one."""
    parser = FlexibleArgumentParser(prog=program, usage=f"{program} ... [vLLM's engine arguments]")
    EngineArgs.add_cli_args(parser)
    # So that nobody's wish is taken for a default: --no-enforce-eager, or --model with the one that vLLM would take.
    parser.set_defaults(**QUIET, model=None)
    given = vars(parser.parse_args(list(words)))
    return {name: value for name, value in given.items() if value != parser.get_default(name)}


@dataclass(frozen=True)
class Wanted:
    """What is to be seen.

    Attributes:
        model: folder or Hugging Face id.
        text: of the prompt.
        policies: without doubles; parameters in ``arguments["kv_eviction_config"]`` are those of the first, which has
            no others.
        budget: as of ``--kv-budget``.
        prefix_len: choose among so many first tokens, and keep the others.
        arguments: of vLLM's engine.
        tell: is told what goes on.
    """

    model: str
    text: str
    policies: Sequence[Entry]
    budget: float
    prefix_len: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda line: None

    @property
    def options(self) -> dict[str, Any]:
        """Entries of ``--kv-eviction-config``."""
        return dict(self.arguments.get("kv_eviction_config") or {})

    def fields(self, policy: Entry) -> dict[str, Any]:
        """What a request with one of the policies says."""
        fields: dict[str, Any] = {"kv_eviction": policy.policy, "kv_budget": self.budget}
        return fields if self.prefix_len is None else fields | {"kv_prefix_len": self.prefix_len}


def inspect(wanted: Wanted) -> Inspection:
    """Read a prompt once with each policy and see what it keeps.

    An engine takes parameters for one policy only, at its start: each of the others that has its own gets an engine.

    Raises:
        ValueError: the prompt, a policy or an argument cannot be served.
        RuntimeError: vLLM does not start.
    """
    plain = [entry for entry in wanted.policies if not entry.texts]
    found = _inspected(replace(wanted, policies=plain))
    kept = dict(zip(plain, found.kept, strict=True))
    for entry in wanted.policies:
        if entry.texts:
            of_engine = {name: value for name, value in wanted.options.items() if name in ENGINE_DEFAULTS}
            asked = {**wanted.arguments, "kv_eviction_config": of_engine | entry.parameters}
            kept[entry] = _inspected(replace(wanted, policies=[entry], arguments=asked)).kept[0]
    return replace(found, kept=[replace(kept[entry], policy=str(entry)) for entry in wanted.policies])


def _inspected(wanted: Wanted) -> Inspection:
    """What an engine shows whose own policy is the first."""
    first = wanted.policies[0]
    wanted.tell(f"starting vLLM with {wanted.model}" + (f" for {first}" if first.texts else ""))
    with _engine(wanted) as llm:
        return read(llm, wanted)


def read(llm: LLM, wanted: Wanted) -> Inspection:
    """The same in an engine that runs, records (:func:`recording.record`) and evicts prompts of any length."""
    prompt = tokenize(llm.get_tokenizer(), wanted.text)
    if not prompt.ids:
        raise ValueError("the prompt has no tokens")
    wanted.tell(f"the prompt has {len(prompt.ids):,} tokens")
    ranks = llm.collective_rpc(recording.layout)
    layers = sorted({layer for rank in ranks for layer in rank.layers})
    shape = len(layers), ranks[0].num_model_kv_heads, len(prompt.ids)
    kept = []
    for entry in wanted.policies:
        kept.append(Kept(entry.policy, wanted.budget, _mask(llm, prompt, wanted.fields(entry), shape)))
        wanted.tell(f"{entry.policy} keeps {kept[-1].entries.sum():,} of {kept[-1].mask.size:,} entries")
    evicted = len(prompt.ids) if wanted.prefix_len is None else wanted.prefix_len
    return Inspection(wanted.model, prompt, evicted, layers, ranks[0].page_size, ranks[0].page_bytes, kept)


@contextlib.contextmanager
def _engine(wanted: Wanted) -> Iterator[LLM]:
    """An engine that evicts with the first policy and lets requests name the others, however short they are."""
    own, *others = (entry.policy for entry in wanted.policies)
    config = {**wanted.options, "min_prompt": 0, "scope": "prompt", "policies": list(dict.fromkeys(others))}
    ours = {"kv_eviction": own, "kv_budget": wanted.budget, "kv_eviction_config": config}
    settings = {**QUIET, **wanted.arguments, **ours}
    try:
        llm = LLM(wanted.model, **settings, **_kv_memory(wanted, settings))
    except KVEvictionError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"vLLM does not start ({in_one_line(error)}): set VLLM_LOGGING_LEVEL=INFO to see more"
        ) from error
    try:
        llm.collective_rpc(recording.record)
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()  # engines refer to themselves, and another one may follow


def _kv_memory(wanted: Wanted, settings: Mapping[str, Any]) -> dict[str, int]:
    """On a CPU, the KV memory that one prompt of the longest length needs with any of the policies.

    By itself vLLM would take nearly all memory of the machine. Nothing where the user has chosen; where there is less
    than is needed, so that vLLM refuses in terms of its own flags; and on GPUs, where it measures first what is free.
    """
    if any(settings.get(name) is not None for name in MEMORY_ARGUMENTS) or not current_platform.is_cpu():
        return {}
    config = EngineArgs(model=wanted.model, **settings).create_engine_config(UsageContext.LLM_CLASS)
    if config.cache_config.kv_cache_memory_bytes is not None:  # by vLLM's environment variable
        return {}
    options, tokens = require_options(config), config.model_config.max_model_len
    whole = replace(wanted, prefix_len=None)
    asked = [whole.fields(entry) for entry in wanted.policies]
    if wanted.prefix_len is not None and wanted.prefix_len <= tokens:
        asked += [wanted.fields(entry) for entry in wanted.policies]
    # vLLM's check at start-up asks for the longest prompt with the engine's own policy.
    plans = [options.plan(tokens), *(options.plan(tokens, fields) for fields in asked)]
    needed = bytes_for(config, plans, tokens)
    return {"kv_cache_memory_bytes": needed} if needed and needed < psutil.virtual_memory().available else {}


def _mask(llm: LLM, prompt: Prompt, fields: dict[str, Any], shape: tuple[int, int, int]) -> np.ndarray:
    """Read the prompt as a request with these fields; what its evictions leave, bool [layers, KV heads, tokens]."""
    sampling = SamplingParams(max_tokens=ANSWER_LENGTH, ignore_eos=True, temperature=0, extra_args=fields)
    try:
        (output,) = llm.generate([{"prompt_token_ids": prompt.ids}], sampling, use_tqdm=False)
    except VLLMValidationError as error:
        raise ValueError(error.args[0]) from error
    joined = recording.evictions(llm.collective_rpc(recording.take_decisions))
    done = recording.of_request(joined, output.request_id)
    mask = np.ones(shape, bool)
    plan = require_options(llm.llm_engine.vllm_config).plan(len(prompt.ids), fields)
    if plan.prompt is None:  # all of it fits the budget, or the policy evicts nothing
        return mask
    if not done and len(output.outputs[0].token_ids) < ANSWER_LENGTH:
        raise ValueError("the prompt leaves no room for an answer: raise --max-model-len")
    if not done:
        raise ValueError(
            f"{fields['kv_eviction']} cannot evict this model, which it keeps whole: leave it out"
        )
    mask[:, :, : fields.get("kv_prefix_len", len(prompt.ids))] = False
    for layer, heads in done[-1].kept.items():
        for head, positions in enumerate(heads):
            mask[layer, head, positions.numpy()] = True
    return mask
