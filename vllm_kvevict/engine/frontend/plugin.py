"""Flags of ``vllm serve``, keywords of ``LLM(...)``, and the wiring into vLLM's configuration."""

import argparse
import copy
import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv

from vllm_kvevict.engine import hooks, read
from vllm_kvevict.engine.config import (
    DEFAULT_BUDGET,
    KEY,
    KVEvictionError,
    Options,
)
from vllm_kvevict.engine.devices import CPU, Device
from vllm_kvevict.engine.errors import other_scheduler
from vllm_kvevict.engine.frontend import command_line
from vllm_kvevict.engine.frontend.command_line import errors_in_one_line
from vllm_kvevict.engine.memory import draft_memory, overruled_memory
from vllm_kvevict.kernels.processor import fast_dtype
from vllm_kvevict.policies import available
from vllm_kvevict.policies.inputs import Q_WINDOW
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules.registry import most_extra_rows

logger = init_logger("vllm.kv_eviction")

ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"

FIELDS = ("kv_eviction", "kv_budget", "kv_decode_budget", "kv_eviction_config")


@functools.cache
def register() -> None:
    """Teach vLLM's engine arguments about eviction.

    Nothing else happens until a command line, keyword or ``additional_config`` asks for eviction.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    for cls in (EngineArgs, AsyncEngineArgs):
        _add_fields(cls)
    hooks.wrap(f"{ARGUMENTS}.add_cli_args", _with_our_flags)
    hooks.wrap(f"{ARGUMENTS}.from_cli_args", _with_our_options)
    hooks.wrap(f"{ARGUMENTS}.create_engine_config", _with_eviction)


def _with_our_flags(add_cli_args: Callable[..., Any]) -> Callable[..., Any]:
    def with_our_flags(parser: Any) -> Any:
        parser = add_cli_args(parser)
        _add_flags(parser)
        return parser

    return with_our_flags


def _with_our_options(from_cli_args: Callable[..., Any]) -> Callable[..., Any]:
    def with_our_options(cls: Any, args: argparse.Namespace) -> Any:
        command_line.note()
        engine_args = from_cli_args(cls, args)
        with errors_in_one_line():
            options = requested_options(engine_args)
        if options is not None:
            # Further API servers get these arguments in a process that reads them before it loads plugins.
            known = engine_args.additional_config or {}
            args.additional_config = engine_args.additional_config = {**known, KEY: options.to_dict()}
            _check_bodies(args)
            _follow_in_render_server(args)
        return engine_args

    return with_our_options


def _with_eviction(create_engine_config: Callable[..., Any]) -> Callable[..., Any]:
    def with_eviction(self: Any, *args: Any, **kwargs: Any) -> Any:
        with errors_in_one_line():
            options = requested_options(self)
            if options is None:
                return create_engine_config(self, *args, **kwargs)
            return _create(self, options, create_engine_config, *args, **kwargs)

    return with_eviction


def _check_bodies(args: argparse.Namespace) -> None:
    """Let the HTTP server of these arguments, if there is one, look at requests before vLLM drops fields."""
    from vllm_kvevict.engine.frontend.bodies import BodyCheck

    others = getattr(args, "middleware", None)
    if others is not None and BodyCheck.PATH not in others:
        # A new list: vLLM's parser gives all servers of a process the same empty one.
        args.middleware = [BodyCheck.PATH, *others]


def _follow_in_render_server(args: argparse.Namespace) -> None:
    """Let a server that only renders (``vllm launch render``) find questions: it makes its own configuration."""
    if getattr(args, "launch_component", None) == "render":
        from vllm_kvevict.engine.frontend import rendering

        rendering.install_in_render_server()


def requested_options(args: Any) -> Options | None:
    """Read the options from engine arguments; None when eviction was not asked for.

    Flags and keywords win over ``additional_config["kv_eviction"]``.

    Raises:
        KVEvictionError: one sentence naming the flag.
    """
    raw: dict[str, Any] = {}
    if isinstance(args.additional_config, dict):
        settings = args.additional_config.get(KEY, {})
        if not isinstance(settings, dict):
            raise KVEvictionError(
                f"additional_config.{KEY} must be an object with a policy, got {settings!r}"
            )
        raw.update(settings)
    if args.kv_eviction_config is not None:
        _check_config(args.kv_eviction_config)
        raw.update(args.kv_eviction_config)
    flags = {"policy": args.kv_eviction, "budget": args.kv_budget, "decode_budget": args.kv_decode_budget}
    raw.update({name: value for name, value in flags.items() if value is not None})
    return Options.parse(raw) if raw else None


def _check_config(config: Any) -> None:
    """Refuse a ``--kv-eviction-config`` that is no object, or holds what has a flag of its own."""
    if not isinstance(config, dict):
        raise KVEvictionError(f"--kv-eviction-config must be a JSON object, got {config!r}")
    flags = {"policy": "--kv-eviction", "budget": "--kv-budget", "decode_budget": "--kv-decode-budget"}
    for name, flag in flags.items():
        if name in config:
            raise KVEvictionError(f"--kv-eviction-config.{name} is not valid: use {flag}")


def _create(args: Any, options: Options, create_engine_config: Any, *rest: Any, **kwargs: Any) -> Any:
    """Make the engine's configuration with our scheduler, worker and transport in it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_kvevict.engine.frontend import checks, cores, requests
    from vllm_kvevict.engine.layers import LayerMap

    device = checks.check_environment()
    checks.check_arguments(args)
    vllm_config = create_engine_config(_our_arguments(args, options, device), *rest, **kwargs)
    _drop_unreached_window(vllm_config)
    checks.check_model(vllm_config)
    is_cached = vllm_config.cache_config.enable_prefix_caching
    if is_cached and not LayerMap.predicted(vllm_config).caches_prefixes:
        # vLLM makes more than one setting depend on it.
        without = copy.copy(args)
        without.enable_prefix_caching = False
        vllm_config = create_engine_config(_our_arguments(without, options, device), *rest, **kwargs)
    checks.check_policy(vllm_config, options.config)
    checks.check_eviction_log(options.eviction_log)
    scheduling = vllm_config.scheduler_config
    if scheduling.scheduler_cls is not None:
        raise other_scheduler(scheduling.scheduler_cls)
    kind = "AsyncEvictionScheduler" if scheduling.async_scheduling else "EvictionScheduler"
    scheduling.scheduler_cls = f"{checks.SCHEDULERS}.{kind}"
    requests.install()
    if device is CPU:
        cores.compute_on_as_many_as_stock(vllm_config.parallel_config.local_world_size)
    if isinstance(args, AsyncEngineArgs):
        _install_in_server()
    _warn(args, options, vllm_config, device)
    return vllm_config


def _install_in_server() -> None:
    """Wrap what only servers have. Some chats have their own renderer there."""
    from vllm_kvevict.engine.frontend import harmony, rendering, requests, stopping

    harmony.install()
    rendering.install()
    requests.install_in_server()
    stopping.install()


def _our_arguments(args: Any, options: Options, device: Device) -> Any:
    """A copy of the arguments: vLLM may configure the same ones again, and must then find what the user gave."""
    from vllm.config import KVTransferConfig

    from vllm_kvevict.engine.layers import BACKEND_KIND

    ours = copy.copy(args)
    ours.additional_config = {**(args.additional_config or {}), KEY: options.to_dict()}
    ours.worker_cls = device.worker
    # Layers of other kinds keep the backend that vLLM chooses for them.
    ours.attention_config = dataclasses.replace(
        args.attention_config, backend_per_kind={BACKEND_KIND: device.register_backend()}
    )
    # "Producer" because the other roles make vLLM hold freed requests back for transfers that never come.
    ours.kv_transfer_config = KVTransferConfig(
        kv_connector="EvictionConnector",
        kv_role="kv_producer",
        kv_connector_module_path="vllm_kvevict.engine.connector",
    )
    _make_room_for_extra_rows(ours, options)
    return ours


def _drop_unreached_window(vllm_config: Any) -> None:
    """Serve a model without its sliding window, if no request is longer: that is full attention then.

    Models of which only some layers have a window keep it, since it may say more than how far they see.
    """
    model = vllm_config.model_config
    window = model.get_sliding_window()
    layer_types = getattr(model.hf_text_config, "layer_types", None) or ()
    if window is None or window < model.max_model_len or "sliding_attention" in layer_types:
        return
    # As --disable-sliding-window does, which would also shorten longer requests.
    model.hf_text_config.sliding_window = None
    vllm_config.cache_config.sliding_window = None


def _warn(args: Any, options: Options, vllm_config: Any, device: Device) -> None:
    """Say what has no effect, is slow or unproven."""
    from vllm_kvevict.engine.layers import LayerMap

    if device is not CPU:
        logger.warning(
            "KV eviction on CUDA is experimental: it was tested on one H200, and never on other or several GPUs"
        )
    # Several API servers repeat what the process that starts them has said.
    if args._api_process_count > 1 and args._api_process_rank >= 0:
        return
    if args.enable_prefix_caching is not False and not LayerMap.predicted(vllm_config).caches_prefixes:
        logger.warning(
            "KV eviction: prefix caching is off, since vLLM copies blocks of models with both windows and states only "
            "in part"
        )
    if reason := overruled_memory(args.kv_cache_memory_bytes, vllm_config):
        logger.warning("KV eviction: %s", reason)
    if device is CPU:
        _warn_of_slow_dtype(vllm_config.model_config.dtype)
    _say_what_drafts_take(options, vllm_config)
    if options.scope == "turns" and Q_WINDOW in lookup(options.policy).needs:
        logger.warning(
            "KV eviction: with --kv-eviction-config.scope turns each turn is compressed before the next question is "
            "known, and %s chooses by the last tokens of a turn: kvzip is recommended",
            options.policy,
        )


def _say_what_drafts_take(options: Options, vllm_config: Any) -> None:
    """Say how much KV a draft model keeps, and warn if that is more than eviction leaves of the model's own."""
    drafts, kept = draft_memory(vllm_config, options)
    if drafts:
        logger.log(
            logging.WARNING if drafts > kept else logging.INFO,
            "KV eviction: of a prompt of %d tokens the draft model keeps all of its KV, %d MiB, and the model %d MiB",
            vllm_config.model_config.max_model_len,
            cdiv(drafts, 2**20),
            cdiv(kept, 2**20),
        )


def _warn_of_slow_dtype(dtype: Any) -> None:
    """Say so if this processor computes the model's dtype slowly; eviction cannot make up for that."""
    name, fast = str(dtype).removeprefix("torch."), fast_dtype()
    if name != "float32" and fast == "float32":
        logger.warning(
            "KV eviction: %s is slow on this processor, which has no instructions for it: matrix products take several "
            "times as long as in float32, so use --dtype float32 if there is memory for a model of twice the size",
            name,
        )


def _make_room_for_extra_rows(args: Any, options: Options) -> None:
    """Give workers buffers for one request more than the scheduler may fill: a probe of a prompt that is evicted in
    chunks, or the repeat of one. No request has more rows than ``--max-model-len``, whatever its chunk is."""
    allowed = [policy for policy in available() if options.allows(policy)]
    extra = 0
    for name in allowed:
        extra = max(extra, most_extra_rows(name, options.params_of(name), options.defaults))
    is_drafted = bool(args.spec_model or (args.speculative_config or {}).get("model"))

    def make(set_defaults: Callable[..., None]) -> Callable[..., None]:
        def set_ours(usage_context: Any, model_config: Any, *rest: Any) -> None:
            set_defaults(usage_context, model_config, *rest)
            if args.max_num_active_seqs is None:
                args.max_num_active_seqs = args.max_num_seqs
            if args.max_num_scheduled_tokens is None:
                args.max_num_scheduled_tokens = args.max_num_batched_tokens
            args.max_num_seqs += 1
            args.max_num_batched_tokens += min(extra, model_config.max_model_len)
            # A draft model on its own reads a token more of each request, for which vLLM would take tokens of a step.
            if is_drafted:
                args.max_num_batched_tokens += args.max_num_seqs

        return set_ours

    hooks.wrap(f"{ARGUMENTS}._set_default_max_num_seqs_and_batched_tokens_args", make, of=args)


def _add_fields(cls: Any) -> None:
    """Give a dataclass our fields: vLLM reads its fields from the command line, and LLM(...) passes keywords."""
    for name in FIELDS:
        field: Any = dataclasses.field(default=None)
        field.name, field.type = name, object
        field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        cls.__dataclass_fields__[name] = field
        setattr(cls, name, None)

    def make(plain_init: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in FIELDS:
                setattr(self, name, kwargs.pop(name, None))
            plain_init(self, *args, **kwargs)

        return init

    hooks.wrap(f"{cls.__module__}:{cls.__name__}.__init__", make)


def _add_flags(parser: Any) -> None:
    group = parser.add_argument_group(
        "KVEviction",
        "Keep only the part of each prompt's KV cache that matters, per layer and KV head, and give the freed pages "
        "to other requests. Off by default.",
    )
    group.add_argument(
        "--kv-eviction", choices=available(), default=None, metavar="POLICY", help=_policy_help()
    )
    group.add_argument(
        "--kv-budget",
        type=_budget,
        default=None,
        metavar="X",
        help="How much of each prompt's KV to keep: a share in (0, 1], or a whole number of tokens above 1 per KV "
        "head, on average over heads and layers. The window counts as part of it. "
        f"Default: {DEFAULT_BUDGET}.",
    )
    group.add_argument(
        "--kv-decode-budget",
        type=_decode_budget,
        default=None,
        metavar="N",
        help="How much of each answer's KV to keep while it is written: tokens per KV head, on average over heads and "
        "layers, beside what is kept of the prompt. An answer of any length then fits in that memory and an interval "
        "(--kv-eviction-config.decode_interval). Default: 0, all of it.",
    )
    group.add_argument(
        "--kv-eviction-config",
        type=_json_object,
        action=_Merge,
        default=None,
        metavar="JSON",
        help="Engine options and policy parameters, as one JSON object or one by one "
        f"(--kv-eviction-config.min_prompt 0). {_config_help()}",
    )


class _Merge(argparse.Action):
    """Joins what comes in several pieces: vLLM hands dotted options over as one more JSON object."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **values})


def _policy_help() -> str:
    return (
        "The policy, which decides what to keep of each prompt. One of: "
        f"{', '.join(available())}. With full, only requests that ask for it (vllm_xargs.kv_eviction) are evicted. "
        "Default: no eviction."
    )


def _config_help() -> str:
    engine = "; ".join(
        f"{name}={x.default if isinstance(x.default, str) else json.dumps(x.default)} ({x.meaning})"
        for name, x in read.ENGINE_OPTIONS.items()
    )
    policies = []
    for policy in available():
        known = lookup(policy).parameters
        if known:
            policies.append(f"{policy}: {', '.join(parameter.setting for parameter in known)}")
    return f"Engine options and their defaults: {engine}. Policy parameters and their defaults: {'; '.join(policies)}."


def _budget(text: str) -> float:
    try:
        return read.budget(text)
    except KVEvictionError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--kv-budget ")) from None


def _decode_budget(text: str) -> int:
    try:
        return read.whole("--kv-decode-budget", float(text), least=0)
    except (KVEvictionError, ValueError):
        raise argparse.ArgumentTypeError(f"must be a whole number of tokens, or 0, got {text!r}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value
