"""Another version of vLLM is left as it is, and says one sentence where eviction is asked for."""

import json
import os
import re
import subprocess
import sys

import httpx
import pytest
from vllm import LLM, SamplingParams

from tests.engine.support import other_vllm, running
from tests.engine.support.serving import ROOT, Server, bare_command
from vllm_kvevict import compatibility
from vllm_kvevict.compatibility import refusal
from vllm_kvevict.engine.registration import asked_on_command_line

UNKNOWN = other_vllm.UNKNOWN
SENTENCE = f"--kv-eviction supports vLLM 0.32 and 0.33, found {UNKNOWN}: install one of these"
COMMAND = """
import sys
import vllm.version
vllm.version.__version__ = sys.argv.pop(1)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""
FROM_PYTHON = """
import json, sys
import vllm.version
vllm.version.__version__, settings = sys.argv[1], json.loads(sys.argv[3])
from vllm import EngineArgs
config = EngineArgs(sys.argv[2], additional_config=settings, dtype="float32").create_engine_config()
methods = [EngineArgs.__init__, EngineArgs.create_engine_config, EngineArgs.add_cli_args]
print(json.dumps({
    "wrapped": any("vllm_kvevict" in value.__code__.co_filename for value in methods),
    "fields": [name for name in EngineArgs.__dataclass_fields__ if name.startswith("kv_eviction")],
    "ours": sorted(name for name in sys.modules if name.startswith("vllm_kvevict")),
    "scheduler": str(config.scheduler_config.scheduler_cls),
}))
"""


@pytest.fixture
def model(models) -> str:
    return str(models("llama"))


def serve_help(version: str, *words: str) -> subprocess.CompletedProcess[str]:
    return bare_command("-c", COMMAND, version, "serve", "--help=KVEviction", *words)


def from_python(version: str, model: str, settings: str = "{}") -> subprocess.CompletedProcess[str]:
    return bare_command("-c", FROM_PYTHON, version, model, settings)


@pytest.mark.parametrize(
    ("found", "runs"),
    [
        ("0.32.0", True),
        ("0.32.3+cpu", True),
        ("0.33.1", True),
        ("0.34.0", False),
        ("0.3", False),
        ("dev", False),
    ],
)
def test_versions(found, runs):
    assert (refusal(found) is None) == runs
    assert refusal(UNKNOWN) == SENTENCE and compatibility.supported() == ["0.32", "0.33"]


def test_nothing_is_wrapped_or_imported(model):
    """Also where somebody else's settings are there."""
    other, tested = from_python(UNKNOWN, model, '{"other": {}}'), from_python(versions_here(), model)
    assert other.returncode == 0, other.stderr
    assert '"wrapped": false, "fields": []' in other.stdout and '"scheduler": "None"' in other.stdout
    loaded = re.findall(r'"(vllm_kvevict[^"]*)"', other.stdout)
    engine = [f"vllm_kvevict.engine{name}" for name in ("", ".errors", ".names", ".registration")]
    assert loaded == ["vllm_kvevict", "vllm_kvevict.compatibility", *engine]
    # The control: what is looked for is there in a version that the plugin was made for.
    assert '"wrapped": true' in tested.stdout and "vllm_kvevict.engine.frontend.plugin" in tested.stdout


def versions_here() -> str:
    """The version that these tests run with."""
    (version,) = re.findall(
        r"^__version__ = .*'(.+)'", (other_vllm.installed() / "_version.py").read_text(), re.M
    )
    return version


def test_additional_config_is_refused_in_one_sentence(model):
    ended = from_python(UNKNOWN, model, '{"kv_eviction": {"policy": "snapkv"}}')
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith(f"KVEvictionError: {SENTENCE}")


def test_the_command_line_is_vllms_own():
    ended = serve_help(UNKNOWN)
    assert ended.returncode == 0 and "--kv-budget" not in ended.stdout
    assert "--kv-budget" in serve_help(versions_here()).stdout


def test_a_server_with_the_flag_ends_with_one_line(model):
    ended = bare_command("-c", COMMAND, UNKNOWN, "serve", model, "--kv-eviction", "snapkv")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1] == f"vllm serve: error: {SENTENCE}"


# Whole processes of a vLLM that nobody has tested.


PROMPTS = [[7 + 13 * i * k % 490 for i in range(n)] for k, n in ((1, 300), (3, 40))]
PLAIN = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM("MODEL", dtype="float32", enforce_eager=True, max_model_len=1024)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), use_tqdm=False)
    import vllm
    print("REPORT " + json.dumps([vllm.__version__, [list(output.outputs[0].token_ids) for output in outputs]]))
    llm.llm_engine.engine_core.shutdown()
"""


@pytest.fixture(scope="module")
def unknown_vllm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a vLLM of another version."""
    return other_vllm.of_version(tmp_path_factory.mktemp("unknown"), UNKNOWN)


def plain(model: str, env: dict[str, str]) -> list:
    """Version and tokens of a vLLM that is not asked to evict anything; its program comes from standard input."""
    ended = subprocess.run(
        [sys.executable],
        input=PLAIN.replace("MODEL", model).replace("PROMPTS", str(PROMPTS)),
        cwd=ROOT,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert "vllm_kvevict" not in ended.stdout + ended.stderr
    (line,) = re.findall(r"^REPORT (.*)$", ended.stdout, re.M)
    return json.loads(line)


@pytest.fixture(scope="module")
def without_the_package(models) -> list[list[int]]:
    """The tokens of vLLM alone."""
    with running.engine(models("llama"), max_model_len=1024) as llm:
        return tokens_of(llm)


def tokens_of(llm: LLM) -> list[list[int]]:
    """What an engine of this process answers to the prompts."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.engine
def test_plain_vllm_is_not_harmed(model, unknown_vllm, without_the_package, tmp_path):
    """Without a word on the command line. It has not inspected the model before, which it does in a process that has
    none either."""
    env = {**unknown_vllm, "VLLM_CACHE_ROOT": str(tmp_path)}
    assert plain(model, env) == [UNKNOWN, without_the_package]


@pytest.mark.engine
def test_a_plain_server_is_not_harmed(models, unknown_vllm, without_the_package, tmp_path):
    """Words that its processes find on the command line, and in a file, ask for nothing."""
    settings = tmp_path / "settings.yaml"
    settings.write_text("dtype: float32\n")
    flags = ["--config", str(settings), "--served-model-name=kv_eviction"]
    flags += ["--enforce-eager", "--max-model-len", "512"]
    with Server(models("llama"), tmp_path / "log", *flags, env=unknown_vllm) as server:
        body = {
            "prompt": PROMPTS[1],
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["token_ids"] == without_the_package[1]
        assert UNKNOWN in server.log and "vllm_kvevict" not in server.log


# What counts as asking.


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["--kv-eviction", "lava"], True),
        (["--kv_budget=0.5"], True),
        (["--kv-eviction-config.window", "8"], True),
        (["--additional-config", '{"kv_eviction": {"policy": "lava"}}'], True),
        (["--additional_config.kv_eviction.policy", "lava"], True),
        (["--additional-config", '{"other": 1}'], False),
        (["--kv-cache-dtype", "auto", "kv_eviction"], False),
        ([], False),
    ],
)
def test_what_counts_as_asking(words, asks):
    assert asked_on_command_line(["MODEL", *words]) == asks


@pytest.mark.parametrize(
    ("content", "asks"),
    [
        ("additional-config: {kv_eviction: {policy: lava}}", True),
        ('additional_config: \'{"kv_eviction": {"policy": "lava"}}\'', True),
        ("kv-eviction: lava", True),
        ("served-model-name: kv_eviction", False),
        ("kv-eviction: [", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("joined", [True, False])
def test_files_may_ask(content, asks, joined, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    words = [f"--config={path}"] if joined else ["--config", str(path)]
    assert asked_on_command_line(["serve", "MODEL", *words]) == asks
    assert not asked_on_command_line(["serve", "MODEL", str(path)])
    assert not asked_on_command_line(["serve", "MODEL", "--config"])


def test_a_pipe_is_left_to_vllm():
    """What it holds can be read once."""
    reader, writer = os.pipe()
    os.write(writer, b"port: 8000\n")
    os.close(writer)
    assert not asked_on_command_line(["serve", "MODEL", "--config", f"/dev/fd/{reader}"])
    assert os.read(reader, 100) == b"port: 8000\n"
    os.close(reader)


def test_a_look_that_fails_harms_nobody(monkeypatch):
    from vllm_kvevict.engine import registration

    monkeypatch.setattr(registration, "install", lambda: SENTENCE)
    monkeypatch.setattr(registration, "_words_of_files", lambda words: 1 / 0)
    registration.register()
