"""Each family of models is served with and without eviction, or refused.

    python -m tests.engine.support.examine_families [NAME ...]

examines those, or all, and writes docs/MODELS.md. All take some minutes.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from vllm import EngineArgs
from vllm.version import __version__ as vllm_version

import tests.conftest
import tests.engine.conftest  # noqa: F401  # both say how engines run here, before vLLM is imported
from benchmarks.harness.models import make_model
from tests.engine.support.families import FAMILIES, Family
from tests.engine.support.masked import evicted_layers, expected_logits, masked_logits
from tests.engine.support.multimodal import AskWithImages, make_multimodal_model
from tests.engine.support.refused import save_config
from tests.engine.support.running import Answer, Ask, engine, evicting_engine, run
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.kernels.processor import level

ROOT = Path(__file__).resolve().parents[3]
RECORD = Path(__file__).with_name("models.json")
PAGE = ROOT / "docs/MODELS.md"
TEMPLATE = Path(__file__).with_name("models.md.in")
WHOLE = [(300, "full", None), (65, "full", None), (520, "full", None)]
EVICTED = [(300, "ada-snapkv", 0.3), (400, "pyramidkv", 0.3)]
SIZES = ((56, 56), (112, 84))
"""Of the images in a prompt, in pixels."""


@dataclass(frozen=True)
class Finding:
    """What became of a family.

    Attributes:
        evicted, layers: how many of its layers are evicted, of how many, in the small model.
        difference: the largest one between our logits and the masked model's; None if they were not compared.
        refusal: the sentence, if it is refused.
    """

    model_type: str
    known_as: str
    dtype: str = ""
    evicted: int = 0
    layers: int = 0
    difference: float | None = None
    refusal: str | None = None


def examine(family: Family, folder: Path) -> Finding:
    """Serve a small model of a family, or have it refused.

    Raises:
        AssertionError: it answers otherwise than vLLM without the flag, or than the masked model.
    """
    if family.architecture is not None:
        return Finding(family.model_type, family.known_as, refusal=_refusal(family, folder))
    model = _make_model(family, folder)
    settings: dict[str, Any] = {"dtype": family.dtype, "max_model_len": 1024}
    if family.reads_images:
        settings["limit_mm_per_prompt"] = {"image": len(SIZES), "video": 0}
    with engine(model, enable_prefix_caching=False, **settings) as llm:
        stock = [answer.tokens for answer in run(llm, _asks(family, WHOLE, 24), recorded=False)]
    with evicting_engine(model, **settings) as llm:
        for policy, budget in (("full", None), ("ada-snapkv", 1.0)):
            asks = _asks(family, [(length, policy, budget) for length, *_ in WHOLE], 24)
            assert [answer.tokens for answer in run(llm, asks)] == stock, f"{policy} at {budget}"
        evicted = _asks(family, EVICTED)
        answers = run(llm, evicted, logits=True)
    assert all(answer.kept for answer in answers), "nothing was evicted"
    difference = _difference(model, evicted, answers) if family.dtype == "float32" else None
    assert difference is None or difference <= family.tolerance, difference
    layers = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    evicted = len(evicted_layers(model))
    return Finding(family.model_type, family.known_as, family.dtype, evicted, layers, difference)


def _make_model(family: Family, folder: Path) -> Path:
    if family.reads_images:
        return make_multimodal_model(folder, family.model_type)
    return make_model(folder / family.model_type, family.model_type, **family.settings)


def _asks(
    family: Family, requests: Sequence[tuple[int, str, float | None]], max_tokens: int = 16
) -> list[Ask]:
    """Requests of so many tokens with a policy and a budget, and with images if the model reads them."""
    if not family.reads_images:
        return [Ask(*request, max_tokens=max_tokens) for request in requests]
    return [
        AskWithImages(*request, max_tokens=max_tokens, sizes=SIZES, kind=family.model_type)
        for request in requests
    ]


def _difference(model: Path, asks: Sequence[Ask], answers: Sequence[Answer]) -> float:
    """The largest difference to the masked model; one that sees everything must differ more."""
    largest = 0.0
    for ask, answer in zip(asks, answers, strict=True):
        with_images = isinstance(ask, AskWithImages)
        images = ask.inputs(model, answer.prompt + answer.tokens) if with_images else None
        masked = expected_logits(model, ask, answer, [len(answer.prompt)], images=images)
        seeing = masked_logits(model, answer.prompt, answer.tokens, images=images)
        difference = float((answer.logits - masked).abs().max())
        assert float((answer.logits - seeing).abs().max()) > 10 * difference, (
            "it is all the same to the model"
        )
        largest = max(largest, difference)
    return largest


def _refusal(family: Family, folder: Path) -> str:
    model = save_config(folder / family.model_type, family.model_type, family.architecture, family.settings)
    args = EngineArgs(model, kv_eviction="snapkv", skip_tokenizer_init=True, dtype="bfloat16")
    try:
        args.create_engine_config()
    except KVEvictionError as error:
        return str(error).replace(f" ({model})", "")
    raise AssertionError("it is not refused")


def render(findings: Sequence[Finding], versions: dict[str, str]) -> str:
    """The page, as Markdown."""
    runs, refused = [], []
    for x in findings:
        if x.refusal is not None:
            refused.append(f"| `{x.model_type}` | {x.known_as} | {x.refusal} |")
            continue
        share = "all" if x.evicted == x.layers else f"{x.evicted} of {x.layers}"
        difference = f"not compared ({x.dtype})" if x.difference is None else f"{x.difference:.1e}"
        runs.append(f"| `{x.model_type}` | {x.known_as} | {share} | {difference} |")
    parts = {
        "{runs}": "\n".join(runs),
        "{refused}": "\n".join(refused),
        "{versions}": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    page = TEMPLATE.read_text()
    for mark, text in parts.items():
        page = page.replace(mark, text)
    return page


def read_record() -> tuple[list[Finding], dict[str, str]]:
    """What was found last, and with which versions."""
    record = json.loads(RECORD.read_text())
    return [Finding(**finding) for finding in record["findings"]], record["versions"]


def main() -> None:
    """Examine families and write the record and the page."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.engine.support.examine_families", description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="families by model type; without any, all")
    chosen = set(parser.parse_args().names)
    known = {finding.model_type: finding for finding in (read_record()[0] if RECORD.exists() else [])}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            if chosen and family.model_type not in chosen:
                continue
            try:
                known[family.model_type] = examine(family, Path(folder))
                print(f"{family.model_type}: {known[family.model_type]}", flush=True)
            except Exception as error:
                failed.append(family.model_type)
                print(f"{family.model_type}: FAILED, {type(error).__name__}: {str(error)[:500]}", flush=True)
    findings = [known[family.model_type] for family in FAMILIES if family.model_type in known]
    versions = {"vLLM": vllm_version, "PyTorch": torch.__version__, "a processor with": level()}
    RECORD.write_text(
        json.dumps({"versions": versions, "findings": list(map(asdict, findings))}, indent=1) + "\n"
    )
    PAGE.write_text(render(findings, versions))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
