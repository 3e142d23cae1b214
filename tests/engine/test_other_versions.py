"""Another version of vLLM is left as it is, and says one sentence where eviction is asked for."""

import re
import subprocess
import sys

import pytest

from tests.engine.serving import command
from vllm_kvevict.compatibility import TESTED_VLLM, refusal
from vllm_kvevict.engine.registration import asked_on_command_line

SENTENCE = "--kv-eviction supports vLLM 0.32.*, found 0.33.1: install that one"
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
    "wrapped": any("kvevict" in value.__code__.co_filename for value in methods),
    "fields": [name for name in EngineArgs.__dataclass_fields__ if name.startswith("kv_eviction")],
    "ours": sorted(name for name in sys.modules if name.startswith("vllm_kvevict")),
    "scheduler": str(config.scheduler_config.scheduler_cls),
}))
"""


@pytest.fixture
def model(models) -> str:
    return str(models("llama"))


def serve_help(version: str, *words: str) -> subprocess.CompletedProcess[str]:
    return command(sys.executable, "-c", COMMAND, version, "serve", "--help=KVEviction", *words)


def from_python(version: str, model: str, settings: str = "{}") -> subprocess.CompletedProcess[str]:
    return command(sys.executable, "-c", FROM_PYTHON, version, model, settings)


@pytest.mark.parametrize(
    ("found", "runs"), [("0.32.0", True), ("0.32.3+cpu", True), ("0.33.1", False), ("0.3", False)]
)
def test_versions(found, runs):
    assert (refusal(found) is None) == runs
    assert refusal("0.33.1") == SENTENCE and TESTED_VLLM == "0.32."


def test_nothing_is_wrapped_or_imported(model):
    other, tested = from_python("0.33.1", model), from_python("0.32.0", model)
    assert other.returncode == 0, other.stderr
    assert '"wrapped": false, "fields": []' in other.stdout and '"scheduler": "None"' in other.stdout
    loaded = re.findall(r'"(vllm_kvevict[^"]*)"', other.stdout)
    engine = [f"vllm_kvevict.engine{name}" for name in ("", ".errors", ".registration")]
    assert loaded == ["vllm_kvevict", "vllm_kvevict.compatibility", *engine]
    # The control: what is looked for is there in the version that the plugin was made for.
    assert '"wrapped": true' in tested.stdout and "vllm_kvevict.engine.frontend.plugin" in tested.stdout


def test_additional_config_is_refused_in_one_sentence(model):
    ended = from_python("0.33.1", model, '{"kv_eviction": {"policy": "snapkv"}}')
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith(f"KVEvictionError: {SENTENCE}")
    assert from_python("0.33.1", model, '{"other": {}}').returncode == 0


def test_the_command_line_is_vllms_own():
    ended = serve_help("0.33.1")
    assert ended.returncode == 0 and "--kv-budget" not in ended.stdout
    assert "--kv-budget" in serve_help("0.32.0").stdout


def test_the_flag_is_refused_in_one_line():
    ended = serve_help("0.33.1", "--kv-eviction", "snapkv")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1] == f"vllm serve: error: {SENTENCE}"


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
        ("port: 8000\nadditional-config: {other: kv}", False),
        ("served-model-name: kv_eviction", False),
        ("- kv-eviction", False),
        ("kv-eviction: [", False),
        ("\0", False),
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


def test_a_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("model: MODEL\nadditional-config: {kv_eviction: {policy: lava}}")
    ended = serve_help("0.33.1", "--config", str(path))
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1] == f"vllm serve: error: {SENTENCE}"
    path.write_text("model: MODEL\nadditional-config: {other: {policy: lava}}")
    assert serve_help("0.33.1", "--config", str(path)).returncode == 0


INSPECT = """
import sys
import vllm.version
vllm.version.__version__ = "0.33.1"
from vllm_kvevict.inspect.__main__ import main
main(sys.argv[1:])
"""


def test_inspect_says_the_same(model, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("some text")
    ended = command(sys.executable, "-c", INSPECT, model, "--prompt", str(prompt))
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith(f"error: {SENTENCE}")
