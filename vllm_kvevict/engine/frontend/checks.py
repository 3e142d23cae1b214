"""What cannot be combined with eviction, refused at start-up in one sentence that names the flag."""

import os
from collections.abc import Sequence
from typing import Any

from vllm import envs
from vllm.platforms import current_platform

from vllm_kvevict.engine import versions
from vllm_kvevict.engine.config import KEY, KVEvictionError, Options, require_options
from vllm_kvevict.engine.decoding import LEAST_BUDGET
from vllm_kvevict.engine.devices import CPU, Device, this_device
from vllm_kvevict.engine.errors import other_scheduler
from vllm_kvevict.engine.frontend.kv_dtype import check_kv_dtype
from vllm_kvevict.engine.layers import (
    BOTH,
    DRAFTERS,
    FULL_ATTENTION,
    LAYER_TYPES,
    WINDOW,
    LayerMap,
    layer_types,
)
from vllm_kvevict.engine.memory import FLOATS, evicted_layers_of_stages
from vllm_kvevict.kernels import processor
from vllm_kvevict.kernels.layout import INT8
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.registry import schedule_for

WINDOWED = "models with sliding-window attention in every layer"
BIDIRECTIONAL = "models whose images are attended to in both directions"

METHODS = "ngram", "suffix", *DRAFTERS
"""Methods of speculative decoding that can be served."""

SCHEDULERS = "vllm_kvevict.engine.scheduler.scheduler"
"""The module of our schedulers, which the front-end does not import."""


def check_environment() -> Device:
    """Refuse a platform or environment that the engine side was not built for.

    Returns:
        The kind of device the workers will use.

    Raises:
        KVEvictionError: one sentence naming what was found and what to do.
    """
    device = this_device()
    if device is None:
        raise KVEvictionError(
            "--kv-eviction runs on vLLM's CPU and CUDA platforms so far, not on "
            f"{current_platform.device_name}: leave the flag out on this machine"
        )
    if device is CPU:
        try:
            processor.level()
        except ValueError as error:
            raise KVEvictionError(f"--kv-eviction: {error}, so unset it or set it to one of these") from None
    if envs.VLLM_USE_RUST_FRONTEND:
        raise KVEvictionError(
            "--kv-eviction cannot be combined with VLLM_USE_RUST_FRONTEND=1: requests are checked in the Python "
            "front-end, so unset the variable"
        )
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise KVEvictionError(
            "--kv-eviction cannot be combined with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: vLLM refuses it "
            "together with KV connectors, and eviction uses one, so unset it"
        )
    return device


def check_arguments(args: Any) -> None:
    """Refuse engine arguments that eviction cannot be combined with.

    Args:
        args: vLLM's EngineArgs, as given by the user.

    Raises:
        KVEvictionError: one sentence naming the first such flag and what to do.
    """
    variable = versions.moves().ray_executor_variable
    if args.distributed_executor_backend == "ray" and variable is not None and not getattr(envs, variable):
        raise KVEvictionError(
            f"--kv-eviction cannot be combined with {variable}=0: that Ray executor calls the model runner directly, "
            "so the worker never learns of an eviction; unset the variable"
        )
    for reason, flags in _conflicts(args).items():
        for flag, given in flags.items():
            if given:
                raise KVEvictionError(
                    f"--kv-eviction cannot be combined with {flag}: {reason}, so remove one of the two"
                )


def _conflicts(args: Any) -> dict[str, dict[str, Any]]:
    """By the reason why eviction cannot be combined with them, flags and whether they are given."""
    attention, events = args.attention_config, args.kv_events_config
    publishes = events and getattr(events, "enable_kv_cache_events", True)
    launched = args.distributed_executor_backend == "external_launcher"
    return {
        "eviction uses vLLM's only KV-connector slot": {
            "--kv-transfer-config": args.kv_transfer_config,
            "--kv-offloading-size": args.kv_offloading_size,
        },
        "there are no shared blocks to publish": {"--kv-events-config": publishes},
        "images must be encoded by the server that reads them": {
            "--ec-transfer-config": args.ec_transfer_config
        },
        "a prompt may have to be split within an image": {
            "--disable-chunked-mm-input": args.disable_chunked_mm_input
        },
        "eviction uses its own": {
            "--scheduler-cls": args.scheduler_cls,
            "--worker-cls": args.worker_cls != "auto",
            "--attention-backend": args.attention_backend or attention.backend,
            "--attention-config.backend_per_kind": attention.backend_per_kind,
        },
        "the KV of a token must not change later": {
            "--attention-config.use_non_causal": attention.use_non_causal
        },
        "vLLM stores routed experts with its own KV blocks": {
            "--enable-return-routed-experts": args.aux_output_config.enabled
        },
        "sleeping discards the KV pages in use": {"--enable-sleep-mode": args.enable_sleep_mode},
        "each micro-batch would need page tables of its own": {
            "--enable-dbo": args.enable_dbo or args.ubatch_size > 1
        },
        "the number of workers must stay fixed": {"--enable-elastic-ep": args.enable_elastic_ep},
        "all KV of a head must be on one rank": {
            "--decode-context-parallel-size": args.decode_context_parallel_size > 1,
            "--prefill-context-parallel-size": args.prefill_context_parallel_size > 1,
        },
        f"KV pages have the model's own dtype, or {INT8}": {
            f"--kv-cache-dtype {args.kv_cache_dtype}": args.kv_cache_dtype not in (*FLOATS, INT8)
        },
        "every layer needs KV of its own": {"--kv-sharing-fast-prefill": args.kv_sharing_fast_prefill},
        "what is kept free for answers is --kv-eviction-config.decode_reserve": {
            "--watermark": args.watermark
        },
        "the scheduler needs a report from every rank": {
            "--distributed-executor-backend external_launcher": launched
        },
    }


def check_scheduler(vllm_config: Any) -> None:
    """Refuse a scheduler that another plugin has put in the place of ours, once the configuration was made.

    Raises:
        KVEvictionError: one sentence naming the scheduler.
    """
    found = vllm_config.scheduler_config.scheduler_cls
    if isinstance(found, str) and found.startswith(f"{SCHEDULERS}."):
        return
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if not any(base.__module__ == SCHEDULERS for base in scheduler.__mro__):
        raise other_scheduler(scheduler)


def check_model(vllm_config: Any) -> None:
    """Refuse models that are not decoders with full attention in every layer, and pages that do not fit them.

    Args:
        vllm_config: vLLM's resolved VllmConfig.

    Raises:
        KVEvictionError: one sentence naming the kind of model or the flag.
    """
    model = vllm_config.model_config
    for kind, found in _unsupported_kinds(vllm_config).items():
        if found:
            raise KVEvictionError(
                f"--kv-eviction does not support {kind} ({model.model}): it needs decoder layers with full attention "
                f"and KV of their own, so {_way_out(kind, model)}"
            )
    if vllm_config.speculative_config is not None:
        _check_speculation(vllm_config)
    if not LayerMap.predicted(vllm_config).all_evicted:
        _check_mixed_layers(vllm_config)
    check_kv_dtype(vllm_config)
    _check_page_size(vllm_config)
    lookahead = require_options(vllm_config).lookahead
    if lookahead >= model.max_model_len:
        raise KVEvictionError(
            f"--kv-eviction-config.lookahead {lookahead} must be less than --max-model-len {model.max_model_len}: "
            "lower it"
        )


def _check_page_size(vllm_config: Any) -> None:
    """Refuse pages that vLLM's blocks cannot be divided into.

    Where neither the user nor vLLM's platform has set the size of blocks yet, workers choose one that our attention
    backend supports.
    """
    cache, page_size = vllm_config.cache_config, vllm_config.additional_config[KEY]["page_size"]
    is_known = cache.user_specified_block_size or cache.block_size != cache.DEFAULT_BLOCK_SIZE
    if is_known and cache.block_size % page_size:
        raise KVEvictionError(
            f"--kv-eviction-config.page_size {page_size} must divide the block size {cache.block_size}: change it "
            "or --block-size"
        )


def _check_mixed_layers(vllm_config: Any) -> None:
    """Refuse what cannot be combined with a model of which only some layers are evicted."""
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise KVEvictionError(
            "--kv-eviction cannot be combined with --disable-hybrid-kv-cache-manager on models with layers of several "
            "kinds, or with a draft model: each kind needs its own blocks, so remove one of the two"
        )
    if not all(evicted_layers_of_stages(vllm_config)):
        raise KVEvictionError(
            "--kv-eviction needs a layer with full attention in each pipeline stage: lower --pipeline-parallel-size"
        )


def _check_speculation(vllm_config: Any) -> None:
    """Refuse draft tokens of other origin than earlier tokens, and stages, models and steps that cannot deal with
    them."""
    speculation = vllm_config.speculative_config
    if speculation.method not in METHODS:
        raise KVEvictionError(
            f"--kv-eviction cannot be combined with speculative decoding by {speculation.method}: "
            f"{', '.join(METHODS[:-1])} and {METHODS[-1]} are supported, so choose one of them, or leave --kv-eviction "
            "out"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise KVEvictionError(
            "--kv-eviction cannot be combined with speculative decoding on several pipeline stages: in vLLM the "
            "workers of all stages but the last fail at start-up, so set --pipeline-parallel-size to 1"
        )
    if LayerMap.predicted(vllm_config).has_states:
        raise KVEvictionError(
            "--kv-eviction cannot be combined with speculative decoding on models with states (Mamba, linear "
            "attention): rejected draft tokens cannot be removed from a state, so remove one of the two"
        )
    if speculation.method in DRAFTERS:
        _check_draft_model(vllm_config)
    drafts = speculation.num_speculative_tokens
    threshold = vllm_config.scheduler_config.long_prefill_token_threshold
    if 0 < threshold <= drafts:
        raise KVEvictionError(
            f"--kv-eviction cannot be combined with {drafts} draft tokens and --long-prefill-token-threshold "
            f"{threshold}: vLLM reads the last token of a prompt together with its drafts, and stops if that is more "
            "than the threshold, so set a higher threshold, or fewer draft tokens"
        )
    _check_drafts_of_answers(drafts, require_options(vllm_config))


def _check_draft_model(vllm_config: Any) -> None:
    """Refuse draft models that were not tested, or whose layers vLLM cannot serve beside others."""
    speculation = vllm_config.speculative_config
    if this_device() is not CPU:
        raise KVEvictionError(
            f"--kv-eviction with speculative decoding by {speculation.method} was not tested on CUDA: choose ngram"
        )
    drafter = speculation.draft_model_config
    modules = getattr(drafter.hf_config, "num_nextn_predict_layers", 1) if speculation.method == "mtp" else 1
    if modules > 1:
        raise KVEvictionError(
            f"--kv-eviction supports speculative decoding by mtp with one module only, and this model has {modules}: "
            "choose another method, or leave --kv-eviction out"
        )
    if speculation.parallel_drafting or speculation.kv_cache_dtype:
        raise KVEvictionError(
            "--kv-eviction cannot be combined with parallel_drafting or kv_cache_dtype of --speculative-config: remove "
            "one of the two"
        )
    types = set(layer_types(drafter.hf_text_config)) if speculation.method != "mtp" else set()
    groups = [group for group in LayerMap.predicted(vllm_config).others if min(group) < 0]
    if drafter.use_mla or drafter.is_hybrid or len(types) > 1 or len(groups) > 1:
        raise KVEvictionError(
            "--kv-eviction does not support a draft model with layers of several kinds, or in several of vLLM's "
            f"groups ({drafter.model}): in vLLM one table of blocks serves all of them, so choose another one"
        )


def _check_drafts_of_answers(drafts: int, options: Options) -> None:
    """Refuse more draft tokens than the shortest answer has before its first eviction.

    A prompt of one token is read together with its drafts, which must not cross a position.
    """
    answers = options.decoding
    interval = answers.interval_for(LEAST_BUDGET)
    if answers.budget and drafts >= LEAST_BUDGET + interval:
        raise KVEvictionError(
            f"--kv-eviction-config.decode_interval {interval} is too short for {drafts} draft tokens: vLLM reads a "
            "prompt of one token together with them, beyond the first eviction of a short answer, so set it to at "
            f"least {drafts - LEAST_BUDGET + 1}, or fewer draft tokens"
        )


def _way_out(kind: str, model: Any) -> str:
    """What to do with a model of a kind that eviction cannot serve."""
    if kind == BIDIRECTIONAL:
        return "leave the flag out, or add --language-model-only to serve text without images"
    if kind != WINDOWED:
        return "leave the flag out"
    window = model.get_sliding_window()
    return f"leave the flag out, or set --max-model-len to at most the window of {window} tokens"


def _unsupported_kinds(vllm_config: Any) -> dict[str, bool]:
    """Kinds of models that eviction cannot serve, and whether this is one."""
    model = vllm_config.model_config
    text = model.hf_text_config
    types = set(layer_types(text))
    return {
        "pooling models": model.runner_type == "pooling",
        "encoder-decoder models": model.is_encoder_decoder,
        "diffusion models": model.is_diffusion,
        "MLA models": model.use_mla,
        BIDIRECTIONAL: model.is_mm_prefix_lm,
        "models with ALiBi": model.uses_alibi,
        # Qwen2 carries sliding_window without using it; vLLM resolves that for us.
        WINDOWED: WINDOW not in types and model.get_sliding_window() is not None,
        "models with chunked attention": bool(model.attention_chunk_size)
        or getattr(text, "dual_chunk_attention_config", None) is not None,
        "models without full attention": model.is_attention_free
        or (types and not types & {*FULL_ATTENTION, BOTH}),
        "models with attention other than full, sliding-window or linear": not types <= LAYER_TYPES,
        "models whose layers share KV": bool(getattr(text, "num_kv_shared_layers", 0)),
        "models that skip attention in some layers": model.has_noops,
        "models whose layers have different heads": model.model_arch_config.per_layer_overrides is not None,
    }


def check_policy(vllm_config: Any, config: EvictionConfig, name: str = "--kv-eviction") -> None:
    """Refuse a policy that the engine's workers cannot carry out.

    Args:
        vllm_config: vLLM's resolved VllmConfig.
        config: the policy, of the server or of one request.
        name: the flag or field that chose it.

    Raises:
        KVEvictionError: one sentence naming the flags.
    """
    check_stages(config, list(map(len, evicted_layers_of_stages(vllm_config))), name)
    layers, schedule = LayerMap.predicted(vllm_config), schedule_for(config.policy)
    is_undone = layers.undoes_rows or (schedule.repeats_prompt and layers.repeats_prompts)
    if schedule.most_extra_rows(config.params) and not is_undone:
        raise KVEvictionError(
            f"{name} {config.policy} cannot serve this model: it computes some tokens twice, which layers without "
            "full attention cannot undo, so choose another policy",
            name,
        )
    # Which layers a quantization leaves out is known to workers only, too late for the check of a request.
    weights = [part for part in config.needs_of_model if part.weights]
    if weights and vllm_config.quant_config is not None:
        raise KVEvictionError(
            f"{name} {config.policy} needs {weights[0].words}, and this model is quantized (in which layers is not "
            "checked): choose another policy",
            name,
        )
    if vllm_config.lora_config is not None:
        _check_policy_with_lora(config, name)


def _check_policy_with_lora(config: EvictionConfig, name: str) -> None:
    """Refuse a policy that cannot be carried out where requests bring adapters."""
    reason = None
    for part in config.needs_of_model:
        if part.weights:
            reason = f"reads {part.weights}, which adapters change"
    if schedule_for(config.policy).repeats_prompt:
        # vLLM counts the adapters of a step before the repeat is added to it.
        reason = "repeats prompts in steps that may already use --max-loras other adapters"
    if reason is not None:
        raise KVEvictionError(
            f"{name} {config.policy} cannot be combined with --enable-lora: it {reason}, so remove one of the two",
            name,
        )


def check_stages(config: EvictionConfig, stages: Sequence[int], name: str) -> None:
    """Refuse a policy that pipeline stages of so many layers cannot serve.

    Args:
        name: the flag or field that chose it.

    Raises:
        KVEvictionError: one sentence naming the flags.
    """
    try:
        conflict = schedule_for(config.policy).conflict_with_stages(config, stages)
    except ValueError as error:
        raise KVEvictionError(f"{name} {config.policy}: {error}", name) from None
    if conflict is not None:
        raise KVEvictionError(f"{name} {config.policy} {conflict}", name)


def check_eviction_log(path: str | None) -> None:
    """Refuse an ``eviction_log`` that the scheduler, which runs on this machine, could not append to.

    Raises:
        KVEvictionError: one sentence naming the flag.
    """
    if path is None:
        return
    try:
        # Opening a pipe would block until somebody reads it.
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("not a regular file")
        with open(path, "a"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise KVEvictionError(
            f"--kv-eviction-config.eviction_log: cannot append to {path!r} ({reason}), so name a file in a folder that "
            "exists"
        ) from None
