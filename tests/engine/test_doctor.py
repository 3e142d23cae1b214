"""`vllm-kvevict doctor` says of a model what a server would say, and names every kind that is refused."""

from importlib.metadata import EntryPoint

import pytest
from vllm import EngineArgs
from vllm.model_executor.models import registry

from tests.engine.families import SMALL as LLAMA
from tests.engine.refused import FP8_KV, GEMMA3, MODELS, QUANTIZED, WINDOWED, save_config
from vllm_kvevict import compatibility, doctor, machine
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.frontend import plugin
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
    monkeypatch.setattr(plugin, "_on_command_line", False)


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


@pytest.mark.parametrize(
    "flags, settings",
    [
        (["--enable-sleep-mode"], {"enable_sleep_mode": True}),
        (["--kv-cache-dtype", "fp8"], {"kv_cache_dtype": "fp8"}),
        (["--decode-context-parallel-size", "2"], {"decode_context_parallel_size": 2}),
        (["--runner", "pooling", "--convert", "embed"], {"runner": "pooling", "convert": "embed"}),
        (["--kv-eviction-config.page_size", "96"], {"kv_eviction_config": {"page_size": 96}}),
    ],
)
def test_flags_that_are_refused(flags, settings, model, examine):
    code, text = examine(model, "--kv-eviction", "snapkv", *flags)
    assert code == 1 and refusal_at_start(model, **settings) in text


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


def test_what_vllm_itself_refuses(tmp_path, examine):
    code, text = examine(str(tmp_path / "nothing"), "--kv-eviction", "snapkv")
    assert code == 1 and "cannot be served\n  vLLM itself refuses: " in text


def test_wrong_arguments_end_in_one_line(model, examine, capsys):
    with pytest.raises(SystemExit) as end:
        examine(model, "--kv-eviction", "snapkv", "--kv-eviction-config.sinks", "3")
    assert end.value.code == 2
    assert "--kv-eviction-config.sinks does not apply" in capsys.readouterr().err.splitlines()[-1]


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
    "version, said", [("0.33.1", compatibility.refusal("0.33.1")), (None, "is not installed")]
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
    assert examine(model, "--enforce-eager")[0] == 0
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert "the C++ kernel cannot be built" in examine()[1]
