"""Another version of vLLM is left as it is, and says one sentence where eviction is asked for."""

import os
import re
import subprocess
import sys

import httpx
import pytest
from vllm import SamplingParams

from tests.engine.support import other_vllm, running
from tests.engine.support.serving import Server, command
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
EVICTING = '{"kv_eviction": {"policy": "snapkv"}}'
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


def serve_help(version: str, *words: str) -> subprocess.CompletedProcess[str]:
    return command(sys.executable, "-c", COMMAND, version, "serve", "--help=KVEviction", *words)


def from_python(version: str, model: str, settings: str = "{}") -> subprocess.CompletedProcess[str]:
    return command(sys.executable, "-c", FROM_PYTHON, version, model, settings)


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
    other, tested = (
        from_python(UNKNOWN, model, '{"other": {}}'),
        from_python(versions_here(), model, EVICTING),
    )
    assert other.returncode == 0, other.stderr
    assert '"wrapped": false, "fields": []' in other.stdout and '"scheduler": "None"' in other.stdout
    loaded = re.findall(r'"(vllm_kvevict[^"]*)"', other.stdout)
    engine = [f"vllm_kvevict.engine{name}" for name in ("", ".errors", ".names", ".registration")]
    assert loaded == ["vllm_kvevict", "vllm_kvevict.compatibility", *engine]
    # The control: what is looked for is there in a version that the plugin was made for.
    assert '"wrapped": true' in tested.stdout and "vllm_kvevict.engine.frontend.plugin" in tested.stdout
    assert "EvictionScheduler" in tested.stdout


def versions_here() -> str:
    """The version that these tests run with."""
    (version,) = re.findall(
        r"^__version__ = .*'(.+)'", (other_vllm.installed() / "_version.py").read_text(), re.M
    )
    return version


def test_additional_config_is_refused_in_one_sentence(model):
    ended = from_python(UNKNOWN, model, EVICTING)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith(f"KVEvictionError: {SENTENCE}")


def test_the_command_line_is_vllms_own():
    ended = serve_help(UNKNOWN)
    assert ended.returncode == 0 and "--kv-budget" not in ended.stdout
    assert "--kv-budget" in serve_help(versions_here()).stdout


def test_a_server_with_the_flag_ends_with_one_line(model):
    ended = command(sys.executable, "-c", COMMAND, UNKNOWN, "serve", model, "--kv-eviction", "snapkv")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1] == f"vllm serve: error: {SENTENCE}"


# A whole server of a vLLM that nobody has tested.


PROMPT = [7 + 39 * i % 490 for i in range(300)]


@pytest.mark.engine
def test_a_plain_server_is_not_harmed(models, tmp_path):
    """Words that its processes find on the command line, and in a file, ask for nothing. It has not inspected the model
    before, which it does in one more process."""
    settings = tmp_path / "settings.yaml"
    settings.write_text("dtype: float32\n")
    flags = ["--config", str(settings), "--served-model-name=kv_eviction"]
    flags += ["--enforce-eager", "--max-model-len", "512"]
    env = other_vllm.of_version(tmp_path / "unknown", UNKNOWN) | {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    body = {
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with Server(models("llama"), tmp_path / "log", *flags, env=env) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert UNKNOWN in server.log and "vllm_kvevict" not in server.log
    with running.engine(models("llama"), max_model_len=1024) as llm:
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        (alone,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert answer["choices"][0]["token_ids"] == list(alone.outputs[0].token_ids)


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
