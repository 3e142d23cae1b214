"""`vllm-kvevict doctor` says of a model what a server would say, and names every kind that is refused."""

import re
from importlib.metadata import EntryPoint

import pytest
from vllm.utils import cpu_resource_utils

from tests.documents import ROOT
from tests.engine.support.families import SMALL as LLAMA
from tests.engine.support.refused import GEMMA3, MODELS, QUANTIZED, WINDOWED, save_config
from vllm_kvevict import compatibility, doctor, machine
from vllm_kvevict.kernels import build
from vllm_kvevict.policies import available

FLAGS = ["--skip-tokenizer-init", "--dtype", "bfloat16"]


@pytest.fixture
def examine(capsys):
    """What the command says of `vllm serve` with these words, and its exit code."""

    def run(*words: str) -> tuple[int, str]:
        code = doctor.main([*words, *(FLAGS if words else [])], "doctor")
        return code, capsys.readouterr().out

    return run


def test_a_model_that_runs(model, examine):
    code, text = examine(model, "--kv-eviction", "ada-snapkv", "--kv-budget", "0.3")
    assert code == 0
    assert f"{model} with --kv-eviction ada-snapkv: can be served\n" in text
    assert text.endswith("Every policy can serve this model.\n") and "problem" not in text


def test_a_lookahead(model, examine):
    """Queries of 4 heads of 32 numbers in bf16, of 4 layers; parts for the requests, one of extra tokens, and none."""
    flags = [
        "--kv-eviction-config.lookahead",
        "48",
        "--max-num-seqs",
        "256",
        "--kv-cache-memory-bytes",
        str(2**30),
    ]
    code, text = examine(model, "--kv-eviction", "snapkv", *flags)
    size = 258 * 4 * 48 * 4 * 32 * 2 / 2**20
    assert f"reserves {size:.1f} MiB for the last queries of 257 requests at once." in text and code == 0
    code, text = examine(model, "--kv-eviction", "criticalkv", "--enable-lora", *flags)
    assert code == 1 and "This holds for every policy" not in text and "queries" not in text


def rows_of_refused_models():
    """Model type and sentence, as docs/MODELS.md has them."""
    section = (
        (ROOT / "docs/MODELS.md").read_text().split("\n## What is refused\n")[1].split("\nWhat it would")[0]
    )
    return re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", section, re.M)


@pytest.mark.parametrize("model_type, sentence", rows_of_refused_models())
def test_what_the_documents_refuse(model_type, sentence, examine, tmp_path):
    (recipe,) = [recipe for recipe in (*MODELS.values(), GEMMA3) if recipe[0] == model_type]
    code, text = examine(save_config(tmp_path / "a-model", *recipe), "--kv-eviction", "snapkv")
    assert code == 1 and "This holds for every policy" in text
    assert f"\n  {sentence}\n" in re.sub(r" \(\S*/a-model\)", "", text)


def test_what_is_set_that_does_not_go_with_it(model, examine, monkeypatch):
    code, text = examine(model, "--kv-eviction", "snapkv", "--enable-sleep-mode")
    refusal = "--kv-eviction cannot be combined with --enable-sleep-mode"
    assert code == 1 and f"cannot be served\n  {refusal}" in text
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    code, text = examine(model, "--kv-eviction", "snapkv")
    refusal = "--kv-eviction cannot be combined with VLLM_USE_RUST_FRONTEND=1"
    assert code == 1 and f"problem: {refusal}" in text and f"cannot be served\n  {refusal}" in text


QWEN2_VL = {
    "text_config": LLAMA
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2},
}
READ_PROJECTIONS = {"criticalkv", "ada-criticalkv", "defensivekv", "layer-defensivekv"}
POLICIES = {
    "layers of several kinds": ([], WINDOWED, {"take"}, "computes some tokens twice"),
    "quantized": (
        [],
        ("llama", "LlamaForCausalLM", LLAMA | {"quantization_config": QUANTIZED}),
        READ_PROJECTIONS,
        "output projection",
    ),
    "adapters": (
        ["--enable-lora"],
        ("llama", "LlamaForCausalLM", LLAMA),
        READ_PROJECTIONS | {"kvzip"},
        "cannot be combined with --enable-lora",
    ),
    "positions of three dimensions": (
        [],
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", QWEN2_VL),
        {"compactor", "expected-attention"},
        "needs a rotary embedding",
    ),
}


@pytest.mark.parametrize("flags, recipe, refused, sentence", POLICIES.values(), ids=POLICIES)
def test_policies_that_a_model_cannot_be_served_with(flags, recipe, refused, sentence, examine, tmp_path):
    model = save_config(tmp_path / "a-model", *recipe)
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
