"""Every combination that is refused, is refused before anything starts, in one sentence that says what to do."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from vllm import LLM, EngineArgs, SamplingParams, envs
from vllm.config import (
    AttentionConfig,
    ECTransferConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
)
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import embeds_input
from vllm.platforms import current_platform
from vllm.sampling_params import BeamSearchParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import KVCacheConfig

import vllm_kvevict.engine  # noqa: F401
from tests.engine.support.families import SMALL as LLAMA
from tests.engine.support.refused import FP8_KV, GEMMA3, MODELS, QUANTIZED, SMALL, WINDOWED, save_config
from vllm_kvevict.engine import devices, versions
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.connector import EvictionConnector
from vllm_kvevict.engine.errors import in_one_line
from vllm_kvevict.engine.frontend import checks, kv_dtype, plugin, requests
from vllm_kvevict.policies import EvictionConfig


def configured(model: str, **settings):
    """A server's configuration; it evicts unless it is told not to."""
    defaults = {"kv_eviction": "snapkv", "dtype": "bfloat16", "skip_tokenizer_init": True}
    return EngineArgs(model, **{**defaults, **settings}).create_engine_config()


def refusal(model: str, **settings) -> str:
    """The sentence that a configuration is refused with."""
    with pytest.raises(KVEvictionError) as error:
        configured(model, **settings)
    sentence = str(error.value)
    assert sentence.startswith("--kv-eviction")
    assert "\n" not in sentence and ". " not in sentence
    assert any(
        f"{advice} " in sentence
        for advice in ("remove", "leave", "unset", "install", "change", "choose", "set", "lower")
    )
    return sentence


def test_take_is_refused_where_its_warmup_layers_reach_beyond_the_first_stage(model):
    config = {"take_warmup_layers": 3}
    sentence = refusal(model, kv_eviction="take", kv_eviction_config=config, pipeline_parallel_size=2)
    assert "its 3 warm-up layers must lie in the first stage, which has 2" in sentence
    with pytest.raises(
        KVEvictionError, match="take_warmup_layers must be at most 4, the model's number of layers, not 5"
    ):
        configured(model, kv_eviction="take", kv_eviction_config={"take_warmup_layers": 5})


@pytest.fixture
def quantized(tmp_path):
    settings = LLAMA | {"quantization_config": QUANTIZED}
    return save_config(tmp_path, "llama", "LlamaForCausalLM", settings)


def test_a_policy_that_reads_projections_is_refused_for_one_request(quantized):
    """Which these are, and that a server with one does not start, `doctor` says."""
    served, prompt = configured(quantized, kv_eviction="full"), {"prompt_token_ids": [1] * 600}
    sentence = "^kv_eviction criticalkv needs unquantized output projections, .*: choose another policy"
    with pytest.raises(VLLMValidationError, match=sentence) as error:
        requests._check_generate(front_end(served), prompt, asking("criticalkv"))
    assert error.value.parameter == "kv_eviction"
    requests._check_generate(front_end(served), prompt, asking("snapkv"))


def front_end(vllm_config):
    """What checks requests, of an engine that was never started."""
    return SimpleNamespace(vllm_config=vllm_config, renderer=SimpleNamespace(mm_processor_cache=None))


def asking(policy: str) -> SamplingParams:
    return SamplingParams(extra_args={"kv_eviction": policy})


def test_a_plain_model_is_accepted(model):
    events = KVEventsConfig(enable_kv_cache_events=False)
    settings = {"kv_cache_dtype": "auto", "tensor_parallel_size": 2, "scheduling_policy": "priority"}
    vllm_config = configured(model, kv_events_config=events, **settings)
    assert vllm_config.cache_config.enable_prefix_caching
    assert (
        vllm_config.scheduler_config.scheduler_cls
        == "vllm_kvevict.engine.scheduler.scheduler.EvictionScheduler"
    )
    assert vllm_config.parallel_config.worker_cls == "vllm_kvevict.engine.worker.worker.EvictionCPUWorker"


# Flags.

FLAGS = {
    "--kv-transfer-config": {
        "kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    },
    "--kv-offloading-size": {"kv_offloading_size": 1.0},
    "--kv-events-config": {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True)},
    "--ec-transfer-config": {
        "ec_transfer_config": ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    },
    "--scheduler-cls": {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
    "--scheduler-cls (class)": {"scheduler_cls": Scheduler},
    "--worker-cls": {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
    "--attention-backend": {"attention_backend": "TRITON_ATTN"},
    "--attention-config.backend_per_kind": {
        "attention_config": AttentionConfig(backend_per_kind={"sliding_window": "TRITON_ATTN"})
    },
    "--attention-backend (nested)": {"attention_config": {"backend": "TRITON_ATTN"}},
    "--attention-config.use_non_causal": {"attention_config": {"use_non_causal": True}},
    "--enable-return-routed-experts": {"enable_return_routed_experts": True},
    "--enable-sleep-mode": {"enable_sleep_mode": True},
    "--enable-dbo": {"enable_dbo": True},
    "--enable-dbo (size)": {"ubatch_size": 2},
    "--enable-elastic-ep": {"enable_elastic_ep": True},
    "--decode-context-parallel-size": {"decode_context_parallel_size": 2},
    "--prefill-context-parallel-size": {"prefill_context_parallel_size": 2},
    "--disable-chunked-mm-input": {"disable_chunked_mm_input": True},
    "--kv-sharing-fast-prefill": {"kv_sharing_fast_prefill": True},
    "--watermark": {"watermark": 0.05},
    "--distributed-executor-backend external_launcher": {"distributed_executor_backend": "external_launcher"},
    "--kv-cache-dtype fp8": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("name, settings", FLAGS.items(), ids=FLAGS)
def test_flags(name, settings, model):
    flag = name.split(" (")[0]
    assert f"--kv-eviction cannot be combined with {flag}: " in refusal(model, **settings)


# Schedulers that another plugin sets, after the flags were read.

VLLMS = "vllm.v1.core.sched.scheduler.Scheduler"


class OtherScheduler(Scheduler):
    """Another plugin's."""


OTHERS = {VLLMS: VLLMS, f"{__name__}.OtherScheduler": OtherScheduler}
"""By their names, what plugins may set: names or classes."""


@pytest.mark.parametrize("name, scheduler", OTHERS.items(), ids=OTHERS)
def test_a_scheduler_that_is_set_while_the_configuration_is_made(name, scheduler, model, monkeypatch):
    def set_scheduler(platform, vllm_config):
        vllm_config.scheduler_config.scheduler_cls = scheduler

    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(set_scheduler))
    assert f"--kv-eviction cannot be combined with the scheduler {name}, which" in refusal(model)


@pytest.mark.parametrize("name, scheduler", OTHERS.items(), ids=OTHERS)
def test_a_scheduler_that_is_set_later_is_named_before_an_engine_starts(name, scheduler, model, monkeypatch):
    create_engine_config = EngineArgs.create_engine_config

    def create_and_set(*args, **kwargs):
        vllm_config = create_engine_config(*args, **kwargs)
        vllm_config.scheduler_config.scheduler_cls = scheduler
        return vllm_config

    monkeypatch.setattr(EngineArgs, "create_engine_config", create_and_set)
    with pytest.raises(
        KVEvictionError, match=f"^--kv-eviction cannot be .* {name}, which another plugin has"
    ):
        LLM(model, kv_eviction="snapkv", dtype="float32", skip_tokenizer_init=True)


def test_a_scheduler_that_is_set_in_the_engines_process_is_named(model, monkeypatch):
    """Nobody else hears of it."""
    vllm_config = configured(model)
    monkeypatch.setattr(SchedulerConfig, "get_scheduler_cls", lambda self: OtherScheduler)
    transport = EvictionConnector(vllm_config, KVConnectorRole.SCHEDULER, KVCacheConfig(8, [], []))
    transport.bind_kv_cache_manager(SimpleNamespace())
    with pytest.raises(KVEvictionError, match="OtherScheduler, which another plugin has set"):
        transport.set_xfer_handshake_metadata_pp_aware({})


def refusal_of_a_kv_dtype(model: str, **settings) -> str:
    """The sentence about ``--kv-cache-dtype``; newer versions of vLLM have one of their own, and are asked first."""
    with pytest.raises(ValueError) as error:
        configured(model, **settings)
    return in_one_line(error.value)


def test_a_kv_dtype_that_is_not_the_models(model):
    sentence = refusal_of_a_kv_dtype(model, kv_cache_dtype="float16")
    assert "kv-cache-dtype" in sentence and "float16" in sentence and "bfloat16" in sentence


SKIPS = {"kv_cache_dtype_skip_layers": ["0"]}
WITH_INT8 = {
    "--kv-cache-dtype-skip-layers": ("llama", SKIPS),
    "speculative decoding by draft_model": ("llama", {"speculative_config": "llama"}),
    "a model with layers of several kinds": ("gpt_oss", {}),
    "--kv-eviction-config.kernels false": ("llama", {"kv_eviction_config": {"kernels": False}}),
    "a model with heads of 32 numbers in float16": ("llama", {"dtype": "float16"}),
}


@pytest.mark.parametrize("words, given", WITH_INT8.items(), ids=WITH_INT8)
def test_what_entries_in_8_bits_are_not_combined_with(models, monkeypatch, words, given):
    architecture, settings = given
    if "speculative_config" in settings:
        drafter = str(models("llama", layers=1))
        settings = {
            "speculative_config": {"method": "draft_model", "model": drafter, "num_speculative_tokens": 2}
        }
    served = str(models(architecture))
    sentence = refusal(served, kv_cache_dtype="int8_per_token_head", **settings)
    assert f"--kv-cache-dtype int8_per_token_head and {words}: leave" in sentence
    if settings is SKIPS:
        configured(served, kv_cache_dtype="int8_per_token_head")
        monkeypatch.setattr(kv_dtype, "this_device", lambda: devices.CUDA)
        monkeypatch.setattr(kv_dtype, "find_compiler", lambda: ([], None))  # which a GPU's kernels need not
        configured(served, kv_cache_dtype="int8_per_token_head", dtype="bfloat16")
        assert "float16: leave" in refusal(served, kv_cache_dtype="int8_per_token_head", dtype="float16")


def test_entries_in_8_bits_without_a_compiler(model, monkeypatch):
    monkeypatch.setattr(kv_dtype, "find_compiler", lambda: ([], None))
    assert "finds no C++ compiler: install g++" in refusal(model, kv_cache_dtype="int8_per_token_head")
    configured(model)


@pytest.mark.parametrize("page_size, block_size", [(32, 16), (96, 128), (256, 128)])
def test_pages_must_divide_blocks(page_size, block_size, model):
    sentence = refusal(model, block_size=block_size, kv_eviction_config={"page_size": page_size})
    assert f"--kv-eviction-config.page_size {page_size} " in sentence
    assert f"block size {block_size}" in sentence and "--block-size" in sentence


def test_a_lookahead_that_no_answer_reaches(model):
    sentence = refusal(model, kv_eviction_config={"lookahead": 64}, max_model_len=64)
    assert "--kv-eviction-config.lookahead 64 must be less than --max-model-len 64" in sentence
    configured(model, kv_eviction_config={"lookahead": 63}, max_model_len=64)


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What the server warns of."""
    lines: list[str] = []
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *args: lines.append(text % args))
    return lines


@pytest.mark.parametrize(
    "policy, scope, is_said",
    [("snapkv", "turns", True), ("lava", "turns", True), ("snapkv", "prefix", False), ("knorm", "turns", False),
     ("kvzip", "turns", False), ("full", "turns", False)],
)  # fmt: skip
def test_a_policy_that_needs_the_question_is_named_once(policy, scope, is_said, model, warnings):
    configured(model, kv_eviction=policy, kv_budget=0.5, kv_eviction_config={"scope": scope}, dtype="float32")
    assert len(warnings) == is_said
    assert not is_said or ("scope turns" in warnings[0] and policy in warnings[0] and "kvzip" in warnings[0])


# Models.


@pytest.mark.parametrize("name, recipe", MODELS.items(), ids=MODELS)
def test_models(name, recipe, tmp_path):
    model = save_config(tmp_path / "a-model", *recipe)
    sentence = refusal(model)
    assert sentence.startswith("--kv-eviction does not support ") and name.split(" (")[0] in sentence
    assert "a-model" in sentence


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ({"pipeline_parallel_size": 2}, "a layer with full attention in each pipeline stage"),
    ],
)
def test_what_cannot_be_combined_with_layers_of_several_kinds(settings, sentence, tmp_path):
    windowed = save_config(tmp_path / "a-model", *WINDOWED)
    assert sentence in refusal(windowed, **settings)


@pytest.mark.parametrize("given", [None, True, False])
def test_prefix_caching_is_off_beside_both_windows_and_states(given, models, tmp_path, warnings):
    hybrid, windowed = str(models("granitemoehybrid")), save_config(tmp_path / "a-model", *WINDOWED)
    for model in (hybrid, windowed):
        is_on = configured(model, enable_prefix_caching=given).cache_config.enable_prefix_caching
        assert is_on is (given is not False)
    assert not any("prefix caching is off" in line for line in warnings)
    both = {"layer_types": ["mamba", "full_attention", "mamba", "sliding_attention"], "sliding_window": 64}
    server = configured(hybrid, enable_prefix_caching=given, hf_overrides=both)
    assert server.cache_config.enable_prefix_caching is False
    assert any("prefix caching is off" in line for line in warnings) is (given is not False)


def test_models_that_look_at_images_in_both_directions_are_served_as_text(tmp_path):
    model = save_config(tmp_path / "a-model", *GEMMA3)
    sentence = refusal(model)
    assert "attended to in both directions" in sentence and "a-model" in sentence
    assert sentence.endswith("add --language-model-only to serve text without images")
    configured(model, language_model_only=True)


@pytest.mark.engine
def test_layers_with_other_heads_than_the_configuration_says(tmp_path):
    """GPT-2 knows no num_key_value_heads; vLLM's configuration goes by it all the same."""
    settings = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "num_key_value_heads": 2}
    model = save_config(tmp_path / "a-model", "gpt2", "GPT2LMHeadModel", settings)
    with pytest.raises(KVEvictionError) as error:
        LLM(
            model,
            additional_config={"kv_eviction": {"policy": "snapkv"}},
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 24,
        )
    sentence = str(error.value)
    assert "a-model" in sentence and "each rank has 2 KV heads, but its layers have 4" in sentence
    # The next engine of this process gets no connector of this one.
    assert not has_kv_transfer_group()


def test_a_decoder_run_for_pooling(model):
    assert "pooling models" in refusal(model, runner="pooling", convert="embed")


ACCEPTED = {
    "layer types that are not told": ("llama", "LlamaForCausalLM", {"layer_types": None}),
    "layers with full attention": ("llama", "LlamaForCausalLM", {"layer_types": ["full_attention"] * 2}),
    "a window that is not used": (
        *("qwen2", "Qwen2ForCausalLM"),
        {"sliding_window": 128, "use_sliding_window": False},
    ),
}


@pytest.mark.parametrize("model_type, architecture, settings", ACCEPTED.values(), ids=ACCEPTED)
def test_models_that_are_accepted(model_type, architecture, settings, tmp_path):
    model = save_config(tmp_path, model_type, architecture, LLAMA | settings)
    configured(model)


@pytest.mark.parametrize("longest, is_reached", [(127, False), (128, False), (129, True)])
def test_a_sliding_window_that_no_request_reaches_is_accepted(longest, is_reached, tmp_path):
    settings = LLAMA | {"sliding_window": 128}
    model = save_config(tmp_path, "mistral", "MistralForCausalLM", settings)
    if is_reached:
        sentence = refusal(model, max_model_len=longest)
        assert "sliding-window" in sentence and "--max-model-len to at most the window of 128" in sentence
        return
    assert configured(model, max_model_len=longest).cache_config.sliding_window is None


@pytest.mark.parametrize("kind", FP8_KV)
def test_checkpoints_that_ask_for_fp8_kv(kind, tmp_path):
    settings = LLAMA | {"quantization_config": FP8_KV[kind]}
    model = save_config(tmp_path / "a-model", "llama", "LlamaForCausalLM", settings)
    for given in ({}, {"kv_cache_dtype": "auto"}):
        sentence = refusal(model, **given)
        assert "a-model" in sentence and "asks for a KV cache of type fp8" in sentence
        assert sentence.endswith("so set --kv-cache-dtype bfloat16")
    # With a flag that does not fit, "auto" would be no advice.
    sentence = refusal_of_a_kv_dtype(model, kv_cache_dtype="float16")
    assert sentence.endswith(("so set it to bfloat16", "set `--kv-cache-dtype` to `auto` or `bfloat16`."))
    assert configured(model, kv_cache_dtype="bfloat16").cache_config.cache_dtype == "bfloat16"


def test_diffusion_models(model, monkeypatch):
    """Of which vLLM cannot configure one here."""
    vllm_config = configured(model)
    vllm_config.model_config.__dict__.pop("is_diffusion", None)
    monkeypatch.setattr(ModelConfig, "is_diffusion", True)
    with pytest.raises(KVEvictionError, match="diffusion models"):
        checks.check_model(vllm_config)


DRAFTS = {"method": "ngram", "num_speculative_tokens": 5}
SPECULATION = {
    "stages": ({"pipeline_parallel_size": 2}, "so set --pipeline-parallel-size to 1"),
    # vLLM stops when a prompt of one token comes, which it pads with drafts.
    "too short steps": (
        {"long_prefill_token_threshold": 5},
        "5 draft tokens and --long-prefill-token-threshold 5: ",
    ),
    "steps": ({"long_prefill_token_threshold": 6}, None),
}


@pytest.mark.parametrize("given, sentence", SPECULATION.values(), ids=SPECULATION)
def test_speculative_decoding(given, sentence, model):
    settings = {"speculative_config": DRAFTS, **given}
    if sentence is None:
        configured(model, **settings)
    else:
        assert sentence in refusal(model, **settings)


def test_draft_tokens_beyond_the_first_eviction_of_an_answer(model):
    """Of the shortest one that a request may ask for, which has 4 entries."""
    settings = {"speculative_config": DRAFTS, "kv_decode_budget": 64}
    sentence = refusal(model, **settings, kv_eviction_config={"decode_interval": 1})
    assert "decode_interval 1 is too short for 5 draft tokens: " in sentence
    configured(model, kv_eviction_config={"decode_interval": 2}, **settings)


def test_models_and_methods_without_speculative_decoding(models, model):
    medusa = {"method": "medusa", "model": model, "num_speculative_tokens": 2}
    assert "speculative decoding by medusa: ngram, suffix, draft_model, eagle, eagle3 and mtp " in refusal(
        model, speculative_config=medusa
    )
    drafted = {"model": model, "method": "draft_model", "num_speculative_tokens": 2}
    hybrid = str(models("granitemoehybrid"))
    assert "on models with states" in refusal(hybrid, speculative_config=drafted)
    assert "on models with states" in refusal(hybrid, speculative_config=DRAFTS)


DRAFT_MODELS = {
    "of several kinds of layers": ("llama", "gpt_oss", {}, "layers of several kinds"),
    "in more groups than one": ("gpt_oss", "llama", {}, "several of vLLM's groups"),
    "in parallel": ("llama", "llama", {"parallel_drafting": True}, "combined with parallel_drafting or"),
    "other KV": ("llama", "llama", {"kv_cache_dtype": "fp8"}, "or kv_cache_dtype of --spec"),
    "of several modules": (2, None, {"method": "mtp"}, "with one module only, and this model has 2"),
    "one module": (1, None, {"method": "mtp"}, None),
}


@pytest.mark.parametrize("served, drafter, given, sentence", DRAFT_MODELS.values(), ids=DRAFT_MODELS)
def test_draft_models(models, tmp_path, monkeypatch, served, drafter, given, sentence):
    if isinstance(served, int):
        settings = {**SMALL, "num_nextn_predict_layers": served}
        target = save_config(tmp_path, "glm4_moe", "Glm4MoeForCausalLM", settings)
    else:
        target = str(models(served))
    drafts = {"method": "draft_model", "num_speculative_tokens": 2, **given}
    if drafter:
        drafts["model"] = str(models(drafter))
    if sentence is not None:
        assert sentence in refusal(target, speculative_config=drafts)
        return
    configured(target, speculative_config=drafts)
    monkeypatch.setattr(checks, "this_device", lambda: devices.CUDA)
    assert "was not tested on CUDA: choose ngram" in refusal(target, speculative_config=drafts)


def test_draft_models_have_room_for_a_token_more_of_each_request(models):
    """However vLLM is told of them: its proposer writes behind its buffers otherwise."""
    target, drafter = str(models("llama")), str(models("llama", layers=1))
    given = (
        {
            "spec_method": "draft_model",
            "spec_model": drafter,
            "spec_tokens": 2,
        },
        {"speculative_config": {"method": "draft_model", "model": drafter, "num_speculative_tokens": 2}},
    )
    plain, *found = (configured(target, **settings).scheduler_config for settings in ({}, *given))
    assert [one.max_num_batched_tokens - plain.max_num_batched_tokens for one in found] == [
        plain.max_num_seqs
    ] * 2


def test_a_policy_that_does_not_go_with_adapters_is_refused_for_one_request(model):
    server = configured(model, enable_lora=True)
    sentence = "^kv_eviction kvzip cannot be combined with --enable-lora: it repeats prompts"
    with pytest.raises(KVEvictionError, match=sentence):
        checks.check_policy(server, EvictionConfig("kvzip", keep_ratio=0.3), "kv_eviction")


# Surroundings.


def test_another_platform(model, monkeypatch):
    other = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="xpu")
    monkeypatch.setattr(checks, "current_platform", other)
    monkeypatch.setattr(devices, "current_platform", other)
    assert "not on xpu" in refusal(model)


@pytest.mark.parametrize("has_two", [True, False])
def test_the_older_ray_executor(has_two, model, monkeypatch):
    """It is refused where vLLM has it."""
    name = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    places = dataclasses.replace(versions.moves(), ray_executor_variable=name if has_two else None)
    monkeypatch.setattr(versions, "_chosen", places)
    monkeypatch.setenv(name, "0")
    if not hasattr(envs, name):
        monkeypatch.setattr(envs, name, False, raising=False)
    args = EngineArgs(model, kv_eviction="snapkv", distributed_executor_backend="ray")
    if not has_two:
        checks.check_arguments(args)
        return
    sentence = refusal(model, distributed_executor_backend="ray")
    assert f"{name}=0" in sentence and "unset" in sentence


def test_expandable_segments(model, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in refusal(model)
    configured(model, kv_eviction=None, enable_prefix_caching=True)  # no matter when off


# Single requests.


@pytest.fixture
def on(model):
    return configured(model, kv_eviction_config={"min_prompt": 0}, dtype="float32", skip_tokenizer_init=False)


@pytest.fixture
def off(model, on):
    return configured(model, kv_eviction=None, dtype="float32", skip_tokenizer_init=False)


def process(vllm_config, fields, length=100, prompt=None, **settings):
    processor = InputProcessor(vllm_config)
    params = SamplingParams(max_tokens=4, extra_args=fields)
    prompt = prompt or {"prompt_token_ids": [7] * length}
    return processor.process_inputs("request", prompt, params, ("generate",), **settings)


@pytest.mark.parametrize(
    "fields, named", [({"kv_budget": 2.5}, "kv_budget"), ({"kv_transfer_params": "x"}, "kv_transfer_params")]
)
def test_bad_fields_are_the_callers_fault(fields, named, on, off):
    with pytest.raises(VLLMValidationError) as error:
        process(on, fields)
    assert error.value.parameter == named and str(error.value).startswith(named)
    process(off, fields)  # without eviction nobody knows these fields


PLACEHOLDER = 1 << 20
"""In the place of embeddings vLLM puts the id of a token that it adds to the tokenizer; models have no such token."""

EMBEDDINGS = {
    "alone": embeds_input(torch.zeros(100, 128)),
    "mixed": embeds_input(
        torch.zeros(100, 128),
        prompt_token_ids=[7] * 60 + [PLACEHOLDER] * 40,
        is_token_ids=[True] * 60 + [False] * 40,
    ),
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_take_reads_no_embeddings(kind, on, off):
    prompt, fields = EMBEDDINGS[kind], {"kv_eviction": "take"}
    sentence = r"^kv_eviction take needs a text-only prompt, without embeddings"
    with pytest.raises(VLLMValidationError, match=sentence) as error:
        process(on, fields, prompt=prompt)
    assert error.value.parameter == "prompt"
    # At the call, not at the first token: after that it could not become an HTTP 400.
    with pytest.raises(VLLMValidationError, match=sentence):
        AsyncLLM.generate(front_end(on), prompt, asking("take"), "request")
    assert process(on, {"kv_eviction": "snapkv"}, prompt=prompt).prompt_embeds is not None
    assert process(off, fields, prompt=prompt).prompt_embeds is not None


def test_resumable_sessions(on, off):
    with pytest.raises(VLLMValidationError, match="resumable sessions") as error:
        process(on, None, resumable=True)
    assert error.value.parameter == "resumable"
    assert process(off, None, resumable=True).resumable


def test_beam_search_offline(on, off):
    # An engine without eviction in the same process gets as far as its own code.
    for config, error, says in (
        (on, VLLMValidationError, "beam search"),
        (off, AttributeError, "input_processor"),
    ):
        llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
        with pytest.raises(error, match=says):
            BeamSearchOfflineMixin.beam_search(llm, [], BeamSearchParams(2, 2))


def test_beam_search_online(on, off):
    """Over HTTP: test_routes_http.py."""

    def search(vllm_config):
        serving = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=vllm_config))
        return BeamSearchOnlineMixin.beam_search(serving, {}, "request", BeamSearchParams(2, 2))

    # At the call, not at the first token: after that it could not become an HTTP 400.
    with pytest.raises(VLLMValidationError, match="beam search"):
        search(on)
    assert hasattr(search(off), "__anext__")
