"""`vllm-kvevict doctor` says of a model what a server would say, and names every kind that is refused."""

import json
import re
from importlib.metadata import EntryPoint

import pytest
from vllm import EngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils

from tests.documents import ROOT
from tests.engine.frontend import test_refusals
from tests.engine.support.families import SMALL as LLAMA
from tests.engine.support.refused import FP8_KV, GEMMA3, MODELS, QUANTIZED, WINDOWED, save_config
from vllm_kvevict import compatibility, doctor, machine
from vllm_kvevict.engine import inspection
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.frontend import command_line
from vllm_kvevict.kernels import build
from vllm_kvevict.policies import available

FLAGS = ["--skip-tokenizer-init", "--dtype", "bfloat16"]


@pytest.fixture(autouse=True)
def _inspect_models_here(monkeypatch):
    """vLLM looks at a model's class in a new process, to keep CUDA out of this one; that takes long."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())


@pytest.fixture(autouse=True)
def _python_caller(monkeypatch):
    """The command ends its process when arguments are wrong, so nobody calls from Python after it."""
    monkeypatch.setattr(command_line, "_on_command_line", False)


@pytest.fixture
def examine(capsys):
    """What the command says of `vllm serve` with these words, and its exit code."""

    def run(*words: str) -> tuple[int, str]:
        code = doctor.main([*words, *(FLAGS if words else [])], "doctor")
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def model(models) -> str:
    return str(models("llama"))


def refusal_at_start(model: str, **settings) -> str:
    args = EngineArgs(model, skip_tokenizer_init=True, dtype="bfloat16", kv_eviction="snapkv", **settings)
    with pytest.raises(KVEvictionError) as error:
        args.create_engine_config()
    return str(error.value)


def test_a_model_that_runs(model, examine):
    code, text = examine(model, "--kv-eviction", "ada-snapkv", "--kv-budget", "0.3")
    assert code == 0
    assert f"{model} with --kv-eviction ada-snapkv: can be served\n" in text
    assert text.endswith("Every policy can serve this model.\n") and "problem" not in text


def test_a_policy_is_not_needed(model, examine):
    code, text = examine(model)
    assert code == 0 and "--kv-eviction full: can be served" in text


KINDS = {
    **MODELS,
    "models whose images are attended to in both directions": GEMMA3,
    "asks for a KV cache of type fp8": (
        "llama",
        "LlamaForCausalLM",
        LLAMA | {"quantization_config": FP8_KV["modelopt"]},
    ),
}


@pytest.mark.parametrize("name, recipe", KINDS.items(), ids=KINDS)
def test_every_kind_that_is_refused(name, recipe, examine, tmp_path):
    model = save_config(tmp_path / "a-model", *recipe)
    code, text = examine(model, "--kv-eviction", "snapkv")
    assert code == 1 and name.split(" (")[0] in text
    assert f"cannot be served\n  {refusal_at_start(model)}\n" in text
    assert "This holds for every policy" in text


def test_diffusion_models_are_refused_by_vllm_on_a_cpu(examine, tmp_path):
    model = save_config(tmp_path / "a-model", "llama", "LlamaForCausalLM", LLAMA | {"canvas_length": 64})
    code, text = examine(model, "--kv-eviction", "snapkv")
    assert code == 1 and re.search(r"cannot be served\n  .* diffusion models", text)


def rows_of_refused_models():
    """Model type and sentence, as docs/MODELS.md has them."""
    section = (
        (ROOT / "docs/MODELS.md").read_text().split("\n## What is refused\n")[1].split("\nWhat it would")[0]
    )
    return re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", section, re.M)


@pytest.mark.parametrize("model_type, sentence", rows_of_refused_models())
def test_what_the_documents_refuse(model_type, sentence, examine, tmp_path):
    (recipe,) = [recipe for recipe in KINDS.values() if recipe[0] == model_type]
    code, text = examine(save_config(tmp_path / "a-model", *recipe), "--kv-eviction", "snapkv")
    assert code == 1 and f"\n  {sentence}\n" in re.sub(r" \(\S*/a-model\)", "", text)


CONFLICTS = {
    "--kv-transfer-config": ['{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'],
    "--kv-offloading-size": ["1"],
    "--kv-events-config": ['{"enable_kv_cache_events": true}'],
    "--ec-transfer-config": ['{"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}'],
    "--scheduler-cls": ["vllm.v1.core.sched.scheduler.Scheduler"],
    "--worker-cls": ["vllm.v1.worker.cpu_worker.CPUWorker"],
    "--attention-backend": ["TRITON_ATTN"],
    "--attention-config.backend_per_kind": ['{"sliding_window": "TRITON_ATTN"}'],
    "--attention-config.use_non_causal": ["true"],
    "--enable-return-routed-experts": [],
    "--enable-sleep-mode": [],
    "--enable-dbo": [],
    "--enable-elastic-ep": [],
    "--decode-context-parallel-size": ["2"],
    "--prefill-context-parallel-size": ["2"],
    "--disable-chunked-mm-input": [],
    "--kv-sharing-fast-prefill": [],
    "--watermark": ["0.05"],
    "--distributed-executor-backend": ["external_launcher"],
    "--kv-cache-dtype": ["fp8"],
}


def test_no_flag_that_is_refused_is_left_out():
    assert {name.split()[0] for name in test_refusals.FLAGS} == set(CONFLICTS)


@pytest.mark.parametrize("flag", CONFLICTS)
def test_flags_that_conflict(flag, model, examine):
    code, text = examine(model, "--kv-eviction", "snapkv", flag, *CONFLICTS[flag])
    assert code == 1 and f"cannot be served\n  --kv-eviction cannot be combined with {flag}" in text


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    "architecture, settings, flags, sentence",
    [
        ("llama", {"model": "DRAFT", "num_speculative_tokens": 2}, [], "speculative decoding by draft_model"),
        (
            "llama",
            NGRAM,
            ["--pipeline-parallel-size", "2"],
            "speculative decoding on several pipeline stages",
        ),
        ("granitemoehybrid", NGRAM, [], "speculative decoding on models with states"),
    ],
)
def test_speculation_that_is_refused(architecture, settings, flags, sentence, models, model, examine):
    config = json.dumps(settings).replace("DRAFT", model)
    words = ["--kv-eviction", "snapkv", "--speculative-config", config, *flags]
    code, text = examine(str(models(architecture)), *words)
    assert code == 1
    assert f"cannot be served\n  --kv-eviction cannot be combined with {sentence}" in text


def test_speculation_that_runs(model, examine):
    code, text = examine(model, "--kv-eviction", "snapkv", "--speculative-config", json.dumps(NGRAM))
    assert code == 0, text


@pytest.mark.parametrize(
    "variable, value",
    [("VLLM_USE_RUST_FRONTEND", "1"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")],
)
def test_variables_that_are_refused(variable, value, model, examine, monkeypatch):
    monkeypatch.setenv(variable, value)
    code, text = examine(model, "--kv-eviction", "snapkv")
    refusal = f"--kv-eviction cannot be combined with {variable}={value}"
    assert code == 1 and f"problem: {refusal}" in text and f"cannot be served\n  {refusal}" in text


@pytest.mark.parametrize(
    "flags, settings",
    [
        (["--enable-sleep-mode"], {"enable_sleep_mode": True}),
        (["--kv-cache-dtype", "fp8"], {"kv_cache_dtype": "fp8"}),
        (["--decode-context-parallel-size", "2"], {"decode_context_parallel_size": 2}),
        (["--runner", "pooling", "--convert", "embed"], {"runner": "pooling", "convert": "embed"}),
        (
            ["--kv-eviction-config.page_size", "96", "--block-size", "128"],
            {"kv_eviction_config": {"page_size": 96}, "block_size": 128},
        ),
    ],
)
def test_flags_that_are_refused(flags, settings, model, examine):
    code, text = examine(model, "--kv-eviction", "snapkv", *flags)
    assert code == 1 and refusal_at_start(model, **settings) in text


QWEN2_VL = {
    "text_config": LLAMA
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2},
}
POLICIES = {
    "layers of several kinds": ([], WINDOWED, {"take", "kvzip"}, "computes some tokens twice"),
    "quantized": (
        [],
        {"model_type": "llama", "architecture": "LlamaForCausalLM",
         "settings": LLAMA | {"quantization_config": QUANTIZED}},
        {"criticalkv", "ada-criticalkv", "defensivekv", "layer-defensivekv"},
        "output projection",
    ),
    "adapters": (
        ["--enable-lora"],
        {"model_type": "llama", "architecture": "LlamaForCausalLM", "settings": LLAMA},
        {"criticalkv", "ada-criticalkv", "defensivekv", "layer-defensivekv", "kvzip"},
        "cannot be combined with --enable-lora",
    ),
    "positions of three dimensions": (
        [],
        {"model_type": "qwen2_vl", "architecture": "Qwen2VLForConditionalGeneration", "settings": QWEN2_VL},
        {"compactor", "expected-attention"},
        "needs a rotary embedding",
    ),
    "pipeline stages": (
        ["--pipeline-parallel-size", "2"],
        {"model_type": "llama", "architecture": "LlamaForCausalLM", "settings": LLAMA},
        set(),
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("flags, recipe, refused, sentence", POLICIES.values(), ids=POLICIES)
def test_policies_that_a_model_cannot_be_served_with(flags, recipe, refused, sentence, examine, tmp_path):
    model = save_config(tmp_path / "a-model", **recipe)
    code, text = examine(model, "--kv-eviction", "snapkv", *flags)
    assert code == 0 and "can be served" in text
    listed = {policy for policy in available() if f"\n  --kv-eviction {policy} " in text}
    assert listed == refused and sentence in text
    for policy in sorted(refused)[:1]:
        code, text = examine(model, "--kv-eviction", policy, *flags)
        assert code == 1 and f"cannot be served\n  --kv-eviction {policy} " in text
        assert all(f"\n  --kv-eviction {other} " in text for other in refused)


@pytest.mark.parametrize("missing", [True, False])
def test_what_vllm_itself_refuses(missing, tmp_path, examine):
    """In one line, and without what its checks of configurations say of themselves."""
    model = tmp_path / "a-model"
    if not missing:
        model.mkdir()
    code, text = examine(str(model), "--kv-eviction", "snapkv")
    assert code == 1
    (sentence,) = re.findall(r"cannot be served\n  vLLM itself refuses: (.*)\nThis holds for every", text)
    assert "a-model" in sentence and "pydantic" not in sentence and "validation error" not in sentence


def test_ray_on_a_cpu(model, examine, monkeypatch):
    """vLLM says so when the engine starts; by then its configuration is made."""
    code, text = examine(model, "--kv-eviction", "snapkv", "--distributed-executor-backend", "ray")
    assert code == 1
    sentence = "vLLM itself refuses: current platform cpu does not support ray."
    assert f"cannot be served\n  {sentence}\n" in text
    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU")
    assert examine(model, "--kv-eviction", "snapkv", "--distributed-executor-backend", "ray")[0] == 0


@pytest.mark.parametrize(("bind", "code"), [("auto", 1), ("0", 1), ("0|0", 0), ("nobind", 0)])
def test_ranks_without_a_numa_node(bind, code, model, examine, monkeypatch):
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0])
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bind)
    found, text = examine(model, "--kv-eviction", "snapkv", "-tp", "2")
    assert found == code
    said = {"auto": "Not enough allowed NUMA nodes", "0": "doesn't match local world size 2"}.get(
        bind, "can be served"
    )
    assert said in text and ("VLLM_CPU_OMP_THREADS_BIND says how" in text) == bool(code)


def test_wrong_arguments_end_in_one_line(model, examine, capsys):
    with pytest.raises(SystemExit) as end:
        examine(model, "--kv-eviction", "snapkv", "--kv-eviction-config.sinks", "3")
    assert end.value.code == 2
    assert "--kv-eviction-config.sinks does not apply" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit) as end:
        examine(model, "--kv-eviction", "nothing")
    assert end.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: doctor") and "invalid choice: 'nothing'" in line


FILES = {
    "no file": (None, "No such file or directory"),
    "no YAML": (b"model: [", "while parsing a flow node"),
    "no text": (b"\xff\xfe\x00", "can't decode"),
    "a list": (b"[model, small]", "must map flags to their values"),
    "nothing": (b"", "must map flags to their values"),
    "a number for a flag": (b"1: 2", "must map flags to their values"),
}


@pytest.mark.parametrize("content, said", FILES.values(), ids=FILES)
def test_a_file_of_arguments_that_cannot_be_read(content, said, examine, tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as end:
        examine("--config", str(path))
    assert end.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("doctor: error: --config: ") and said in line


@pytest.mark.parametrize(
    "words, said",
    [
        (["--config"], "No config file"),
        (["--config", "FOLDER"], "yaml/yml"),
        (["--config", "F.yaml"], "directory"),
    ],
)
def test_what_is_no_file_of_arguments(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("FOLDER", "F.yaml"):
        (tmp_path / name).mkdir()
    for ask in (doctor.main, inspect_engine):
        with pytest.raises(SystemExit) as end:
            ask(words)
        assert end.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def inspect_engine(words):
    inspection.parse_server_arguments("inspect", words)


# The installation.


def test_what_is_installed(examine):
    code, text = examine()
    assert code == 0
    found = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert {"python", "torch", "vllm", "vllm-kvevict", "platform", "processor", "compiler"} <= set(found)
    assert found["plugin"] == "registered once" and "fast" in found["level"]


@pytest.mark.parametrize("times, said", [(0, "does not find the plugin"), (2, "registered 2 times")])
def test_the_plugin_must_be_registered_once(times, said, examine, monkeypatch):
    entry = EntryPoint(doctor.NAME, doctor.ENTRY, doctor.GROUP)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [entry] * times)
    code, text = examine()
    assert code == 1 and f"problem: {doctor.plugin_problem()}\n" in text and said in text


@pytest.mark.parametrize("value, code", [("", 1), ("other", 1), ("other,kvevict", 0)])
def test_plugins_that_are_switched_off(value, code, examine, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", value)
    found, text = examine()
    assert found == code and ("leaves the plugin out" in text) == bool(code)


@pytest.mark.parametrize(
    "version, said", [("0.99.1", compatibility.refusal("0.99.1")), (None, "is not installed")]
)
def test_another_vllm_or_none(version, said, model, examine, monkeypatch):
    versions = {"python": "3.11"} | ({"vllm": version} if version else {})
    monkeypatch.setattr(machine, "versions", lambda: versions)
    code, text = examine(model, "--kv-eviction", "snapkv")
    assert code == 1 and f"{said}" in text and "can be served" not in text


def test_no_compiler(model, examine, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, text = examine(model)
    assert code == 1 and "finds no C++ compiler" in text
    assert re.search(r"^compiler +/\S+; CXX=no-such-compiler names no program", text, re.M)
    assert examine(model, "--enforce-eager")[0] == 0
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert "the C++ kernel cannot be built" in examine()[1]
