"""What vLLM does with the seams: who calls whom, in what order, read from its source."""

import ast
import importlib
import re

import pytest

from tests.contract import source
from vllm_kvevict.engine.frontend import media

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"

CALLS: dict[str, tuple[str, str, str]] = {
    # (function, what it calls, in this order; others may come between): what breaks.
    "plugins-before-flags": (
        "vllm.engine.arg_utils:AsyncEngineArgs.add_cli_args",
        "load_general_plugins add_cli_args",
        "vllm serve does not know --kv-eviction",
    ),
    "probe-room": (
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "create_model_config _set_default_max_num_seqs_and_batched_tokens_args SchedulerConfig",
        "workers have no buffers for take's probe",
    ),
    "manager-then-connector": (
        f"{SCHEDULER}.__init__",
        "create_connector KVCacheManager bind_kv_cache_manager",
        "the connector is bound to vLLM's block manager after ours",
    ),
    "plans-with-the-step": (
        f"{SCHEDULER}.schedule",
        "_reserve_prefill_lookahead allocate_slots _reserve_prefill_lookahead allocate_slots SchedulerOutput "
        "_build_kv_connector_meta _update_after_schedule",
        "chunks are not cut for running and waiting requests alike, or plans miss their step",
    ),
    "prefixes-are-looked-up": (
        f"{SCHEDULER}.schedule",
        "_get_local_prefix_cache_hit get_num_new_matched_tokens skip_request _reserve_prefill_lookahead "
        "allocate_slots record_prefix_cache_stats",
        "no request begins with a cached prefix, or waits for one",
    ),
    "who-waits-is-passed-over": (
        f"{SCHEDULER}.schedule",
        "_handle_blocked_waiting_request skip_request _get_local_prefix_cache_hit",
        "nobody begins behind a request with prompt_logprobs that waits for the reserve",
    ),
    "step-starts": (
        f"{SCHEDULER}.schedule",
        "new_step_starts allocate_slots allocate_slots",
        "the reserve of prompts that were evicted is never given to others",
    ),
    "start-up-check": (
        source.moves().max_memory_usage_bytes,
        "max_memory_usage_bytes",
        "vLLM refuses prompts that eviction makes fit",
    ),
    "memory-is-measured-once": (
        "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
        "determine_available_memory get_kv_cache_configs initialize_from_config",
        "the KV cache takes the reserve's memory",
    ),
    "waits-for-frees": (
        f"{SCHEDULER}.schedule",
        "has_pending_block_frees _preempt_request",
        "decodes are preempted although pages come back by themselves",
    ),
    "frees": (
        f"{SCHEDULER}._preempt_request",
        "_free_request_blocks",
        "pages of preempted requests are kept",
    ),
    "reports": (
        f"{SCHEDULER}._update_from_kv_xfer_finished",
        "update_connector_output",
        "the ledger hears no report",
    ),
    "statistics": (
        f"{SCHEDULER}.update_from_output",
        "get_kv_connector_stats is_empty aggregate",
        "/metrics stays at zero",
    ),
    "report-after-forward-v1": (
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output",
        "bind_connector_metadata wait_for_save get_kv_connector_stats build_connector_worker_meta",
        "a step's reports come with the next one, or never",
    ),
    "report-after-forward-v2": (
        "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.post_forward",
        "wait_for_save get_kv_connector_stats build_connector_worker_meta",
        "a step's reports come with the next one, or never",
    ),
    "resets": (
        f"{SCHEDULER}.reset_prefix_cache",
        "_preempt_request reset_prefix_cache",
        "what requests read before a reset reaches later ones",
    ),
    "pauses": (
        "vllm.v1.engine.core:EngineCore._finish_pause",
        "_reset_caches",
        "what requests read before a pause reaches those after it",
    ),
    "pauses-preempt": (
        "vllm.v1.engine.core:EngineCore._reset_caches",
        "reset_prefix_cache",
        "what requests read before a pause reaches those after it",
    ),
}

HANDSHAKE = "get_kv_connector_handshake_metadata set_xfer_handshake_metadata_pp_aware"
"""What the engine calls at its start, itself or in a step of its own, to tell the ledger the pools' sizes."""

OURS = """
    new_step_starts allocate_slots free pop_blocks_for_free get_blocks estimate_cached_tokens
    cache_blocks remove_skipped_blocks usage empty_kv_cache_blocks get_computed_blocks
    reset_prefix_cache
"""
"""What vLLM's scheduler asks of the block manager and our ledger answers."""

HARMLESS = """
    block_pool coordinator evict_blocks finalize_partial_tail_offloads
    get_block_ids get_block_ids_for_computed_tokens get_computed_blocks_for_connector make_prefix_cache_stats
    mamba_shared_prefix_checkpoint record_blocks_for_zeroing record_prefix_cache_stats
    take_boundary_state_offloads take_new_block_ids take_events take_kv_cache_block_copies truncate_computed_blocks
"""
"""What vLLM's own, idle manager may answer: it has no blocks, and only counts what our ledger finds cached."""


@pytest.mark.parametrize("seam", CALLS)
def test_calls(seam: str) -> None:
    place, expected, breaks = CALLS[seam]
    names = iter(source.called(place, breaks))
    for name in expected.split():
        if name not in names:
            source.broken(f"{place} does not call {', '.join(expected.split())} in this order", breaks)


def test_pools_are_announced() -> None:
    """In the engine's constructor, or in a method that it calls. Again after a sleep: the same sizes change nothing."""
    engine = "vllm.v1.engine.core:EngineCore"
    called = source.called(f"{engine}.__init__")
    inner = "_set_kv_connector_handshake_metadata"
    if inner in called:
        called = source.called(f"{engine}.{inner}")
    if [name for name in called if name in HANDSHAKE.split()] != HANDSHAKE.split():
        source.broken(
            f"{engine}.__init__ does not call {HANDSHAKE}", "the ledger never learns the pools' sizes"
        )


@pytest.mark.parametrize("module", ["scheduler", "async_scheduler"])
def test_scheduler_asks_the_manager_nothing_new(module: str) -> None:
    """A method that the ledger does not know would be answered by vLLM's idle block manager, which holds nothing."""
    new = source.uses(f"vllm.v1.core.sched.{module}", "kv_cache_manager") - {*OURS.split(), *HARMLESS.split()}
    if new:
        source.broken(
            f"the {module} asks the block manager for {', '.join(sorted(new))}", "the ledger is bypassed"
        )


CONTAINS: dict[str, tuple[str, list[str], str]] = {
    "finished-ids-go-with-the-next-step": (
        f"{SCHEDULER}._update_after_schedule",
        ["self.finished_req_ids = set()", "num_computed_tokens +="],
        "take's probes stay in the workers' batches",
    ),
    "preempted-ids-are-sent": (
        f"{SCHEDULER}.schedule",
        ["preempted_req_ids=self.reset_preempted_req_ids", "finished_req_ids=self.finished_req_ids"],
        "workers keep the pages of preempted requests",
    ),
    "epochs": (
        f"{SCHEDULER}._preempt_request",
        ["request.num_preemptions += 1", "self.reset_preempted_req_ids.add(request.request_id)"],
        "reports of an older admission are taken for the new one's",
    ),
    "active-requests": (
        f"{SCHEDULER}.__init__",
        ["self.scheduler_config.max_num_active_seqs", "self.scheduler_config.max_num_scheduled_tokens"],
        "the scheduler fills the buffers that are kept for take's probe",
    ),
    "producers-do-not-wait": (
        f"{SCHEDULER}.__init__",
        ["kv_transfer_config.is_kv_consumer", "self.connector.requires_kv_delivery"],
        "freed requests may be held back for transfers that never come",
    ),
    "a-backend-for-each-kind": (
        "vllm.v1.attention.selector:get_attn_backend",
        ["backend = attention_config.backend_per_kind.get(kind.value, backend)"],
        "workers use vLLM's attention, so nothing is evicted",
    ),
    "memory-asked-for": (
        "vllm.v1.worker.cpu_worker:CPUWorker.__init__",
        ["memory_fraction = vllm_config.cache_config.gpu_memory_utilization"],
        "servers on CPUs do not start beside other programs",
    ),
    "memory-in-use-cpu": (
        "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory",
        ["memory_info().rss", "self.requested_cpu_memory - consumed_memory"],
        "vLLM gives the reserve's memory to the KV cache",
    ),
    "memory-in-use-gpu": (
        "vllm.utils.mem_utils:memory_profiling",
        ["result.before_create.free_memory - result.after_profile.free_memory"],
        "vLLM gives the reserve's memory to the KV cache",
    ),
    "packed-projections": (
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        ["layer.weight = torch.nn.Parameter(torch.empty(0,"],
        "packed projections are taken for plain ones",
    ),
    "one-allocation": (
        "vllm.v1.worker.utils:allocate_kv_cache",
        ["assert len(sizes) == 1", "torch.zeros(buf_size, dtype=torch.int8, device=device)"],
        "the pool is no longer one piece of memory: pages of other layers are overwritten",
    ),
    "we-write-keys-and-values": (
        "vllm.model_executor.layers.attention.attention:Attention.forward",
        ["not self.attn_backend.forward_includes_kv_cache_update"],
        "vLLM writes keys and values into pages of other requests",
    ),
    "uniform-decodes-v2": (
        f"{V2}.execute_model",
        ["batch_req_state, uniform_tok_count = self.gather_batch_req_state(scheduler_output, dummy_run)"],
        "GPU prompts whose last chunk has one token are not evicted",
    ),
    "uniform-decodes-v1": (
        f"{V1}._determine_batch_execution_and_padding",
        ["uniform_decode = self._is_uniform_decode("],
        "GPU prompts whose last chunk has one token are not evicted",
    ),
    "rows-v2": (
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
        ["req_idx=input_batch.idx_mapping_np"],
        "the V2 runner's batch rows belong to other requests",
    ),
    "row-indices-v2": (
        "vllm.v1.worker.gpu.states:RequestState.add_request",
        ["self.index_to_req_id[req_idx] = req_id"],
        "the V2 runner's batch rows belong to other requests",
    ),
    "rendered-prompts": (
        "vllm.renderers.base:BaseRenderer.render_chat",
        ["return (out_conversations, eng_prompts)", "self.default_chat_tok_params"],
        "scope=prefix does not find rendered prompts",
    ),
    "checked-in-threads": (
        "vllm.v1.engine.input_processor:InputProcessor.__init__",
        ["self.process_inputs_async = make_async(self.process_inputs"],
        "prompts given as text over AsyncLLM are not checked",
    ),
    "answers-end-at-the-request's-own-limit": (
        "vllm.v1.core.sched.utils:check_stop",
        ["request.num_output_tokens >= request.max_tokens"],
        "an answer that fills the memory is preempted for ever",
    ),
    "preempted-requests-are-freed-while-they-run": (
        f"{SCHEDULER}._preempt_request",
        ["self._free_request_blocks(request)", "request.status = RequestStatus.PREEMPTED"],
        "the ledger forgets what a preempted request kept",
    ),
    "finished-requests-are-freed-as-finished": (
        f"{SCHEDULER}._free_blocks",
        ["assert request.is_finished()", "self._free_request_blocks(request)"],
        "the ledger remembers requests for ever",
    ),
    "rejected-drafts-are-taken-back": (
        f"{SCHEDULER}.update_from_output",
        ["num_rejected = num_draft_tokens - num_accepted", "request.num_computed_tokens -= num_rejected"],
        "drafts that were rejected stay in the cache",
    ),
    "one-token-is-padded-as-drafts": (
        f"{SCHEDULER}.schedule",
        ["num_new_tokens == 1", "assert num_new_tokens == 1 + self.num_spec_tokens"],
        "waiting requests need no second token",
    ),
    # Once it drops that for each kind of layers, too, nothing need be done while a draft model is loaded.
    "draft-models-keep-a-backend-for-each-kind": (
        f"{PROPOSER}._create_draft_vllm_config",
        ["replace(base.attention_config, backend=spec_cfg.attention_backend)"],
        "draft models get our attention",
    ),
    "a-draft-model-has-the-first-table": (
        f"{V1}._build_attention_metadata",
        [
            "if self.speculative_config and spec_decode_common_attn_metadata is None",
            "spec_decode_common_attn_metadata = cm",
        ],
        "a draft model that runs on its own reads another group's blocks and drafts nonsense",
    ),
    "layers-that-share-are-left-out": (
        f"{V1}.get_kv_cache_spec",
        ["kv_tgt_layer := attn_module.kv_sharing_target_layer_name", "continue"],
        "vLLM makes a group of each evicted layer beside a draft model of one layer",
    ),
    # Our worker makes one where a skipped dummy run does not.
    "eager-stages-lack-a-buffer": (
        f"{V1}.sync_and_gather_intermediate_tensors",
        ["assert self.intermediate_tensors is not None"],
        "the workaround for eager pipeline stages may be dropped",
    ),
    "connectors-get-a-core": (
        "vllm.utils.ompmultiprocessing:OMPProcessManager.__init__",
        ["if config.kv_transfer_config:", "self.reserve_cpu_num = envs.VLLM_CPU_NUM_OF_RESERVED_CPU"],
        "a core is asked back that nobody has taken",
    ),
}


@pytest.mark.parametrize("seam", CONTAINS)
def test_source_says(seam: str) -> None:
    place, parts, breaks = CONTAINS[seam]
    text = source.text(place, breaks)
    for part in parts:
        if part not in text:
            source.broken(f"{place} has no longer `{part}`", breaks)


PUT_OFF = (["break"], ["skip_request(request_queue)", "continue"])
"""What vLLM does after a waiting request that gets no tokens: it looks at no other, or at the next one. Ours then gives
the next ones none."""


def test_what_follows_a_waiting_request_that_gets_no_tokens() -> None:
    schedule = source.find(f"{SCHEDULER}.schedule")[1]
    follows = [
        [ast.unparse(statement) for statement in node.body]
        for node in ast.walk(schedule)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "num_new_tokens == 0"
    ]
    running = ["req_index += 1", "continue"]
    if running not in follows or not any(body in PUT_OFF for body in follows):
        source.broken(
            f"Scheduler.schedule goes on with {follows}",
            "prompts that wait for a step of their own are overtaken",
        )


def test_media_may_be_named_instead_of_given() -> None:
    """Chats are rendered once more without loading their images again."""
    kinds = set(media.MEDIA_PARTS.values())
    moves = source.moves()
    parse = source.text(moves.parse_media_part)
    loaders = {"image_url": "parse_image", "audio_url": "parse_audio", "video_url": "parse_video"}
    assert kinds == set(loaders)
    breaks = "scope=prefix loads images once more, or finds no question in chats with images"
    for kind, loader in loaders.items():
        body = source.text(f"{moves.media_parser}.{loader}")
        if f'"{kind}" in part' not in parse.replace("'", '"') or f"if {kind} else None" not in body:
            source.broken(f"{kind} cannot be None beside a uuid", breaks)


def test_kinds_of_media_are_known() -> None:
    """All parts of messages that hold media, but embeddings of whole prompts."""
    messages = importlib.import_module(source.moves().parse_media_part.partition(":")[0])
    unknown = messages._MEDIA_CONTENT_PART_KEYS - set(media.MEDIA_PARTS) - {"prompt_embeds"}
    if unknown:
        source.broken(f"messages may have {unknown}", "scope=prefix counts their tokens as text")


def test_no_renderer_renders_chats_by_itself() -> None:
    """Our wrapper sits on ``BaseRenderer``; a renderer with a ``render_chat`` of its own would pass it by."""
    for file in sorted((source.root() / "renderers").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("Renderer" in ast.unparse(b) for b in node.bases):
                own = {x.name for x in node.body if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef))}
                if own & {"render_chat", "render_chat_async"}:
                    source.broken(
                        f"{node.name} renders chats by itself", "scope=prefix finds no question there"
                    )


ONLY_WHERE_IT_IS_USED = {
    "AfmoeAttention", "CohereCompassAttention", "DomynEdgeAttention", "FalconAttention", "GraniteAttention",
    "GraniteMoeAttention", "GraniteMoeHybridAttention", "Llama4Attention", "MuseGlimmerAttention",
    "OlmoHybridAttention", "Zamba2Attention",
}  # fmt: skip
"""Classes that make their rotary embedding in no other layers."""
USED_EITHER_WAY = {"Gemma3nAttention", "Gemma4Attention", "HYV3Attention", "LoopCoderAttention"}
"""Classes that turn queries and keys under another condition, and under its contrary."""


def turned_if(node: ast.ClassDef) -> set[str]:
    """The attributes by which a class turns some layers' queries and keys and not others'."""
    return {
        name.attr
        for choice in ast.walk(node)
        if isinstance(choice, ast.If) and any("self.rotary_emb(" in ast.unparse(x) for x in choice.body)
        for name in ast.walk(choice.test)
        if isinstance(name, ast.Attribute) and ast.unparse(name.value) == "self"
    }


def test_layers_that_hold_a_rotary_embedding_and_do_not_use_it_are_known() -> None:
    from vllm_kvevict.engine.worker.rotary import TURNS_IF

    for path in sorted((source.root() / "model_executor" / "models").glob("*.py")):
        file = source.module_file(f"vllm.model_executor.models.{path.stem}")
        text = file.read_text(encoding="utf-8") if file else ""
        for node in ast.parse(text).body if re.search(r"^ {9,}.*self\.rotary_emb\(", text, re.M) else ():
            if not isinstance(node, ast.ClassDef) or node.name in ONLY_WHERE_IT_IS_USED | USED_EITHER_WAY:
                continue
            found = turned_if(node)
            if found != set(TURNS_IF.get(node.name, ())) and (found or node.name in TURNS_IF):
                source.broken(
                    f"{node.name} turns queries and keys by {sorted(found)}",
                    "compactor and expected-attention undo what was not done",
                )
