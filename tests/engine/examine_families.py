"""Each family of models is served with and without eviction, or refused.

    python -m tests.engine.examine_families [NAME ...]

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

from benchmarks.harness.models import make_model
from tests.engine.families import FAMILIES, Family
from tests.engine.masked import evicted_layers, masked_logits
from tests.engine.running import Ask, engine, evicting_engine, run
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.kernels.processor import level

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("models.json")
PAGE = ROOT / "docs/MODELS.md"
TEMPLATE = Path(__file__).with_name("models.md.in")
WHOLE = [Ask(300, max_tokens=24), Ask(65, max_tokens=24), Ask(520, max_tokens=24)]
EVICTED = [Ask(300, "ada-snapkv", 0.3), Ask(400, "pyramidkv", 0.3)]


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
    model = make_model(folder / family.model_type, family.model_type, **family.settings)
    settings = {"dtype": family.dtype, "max_model_len": 1024}
    with engine(model, enable_prefix_caching=False, **settings) as llm:
        stock = [answer.tokens for answer in run(llm, WHOLE, recorded=False)]
    with evicting_engine(model, **settings) as llm:
        for policy, budget in (("full", None), ("ada-snapkv", 1.0)):
            asks = [Ask(ask.length, policy, budget, max_tokens=24) for ask in WHOLE]
            assert [answer.tokens for answer in run(llm, asks)] == stock, f"{policy} at {budget}"
        answers = run(llm, EVICTED, logits=True)
    assert all(answer.kept for answer in answers), "nothing was evicted"
    difference = _difference(model, answers) if family.dtype == "float32" else None
    assert difference is None or difference <= family.tolerance, difference
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    evicted = len(evicted_layers(model))
    return Finding(family.model_type, family.known_as, family.dtype, evicted, layers, difference)


def _difference(model: Path, answers: Sequence[Any]) -> float:
    """The largest difference to the masked model; one that sees everything must differ more."""
    largest = 0.0
    for ask, answer in zip(EVICTED, answers, strict=True):
        kept = answer.kept[0]
        masked = masked_logits(model, ask.prompt, answer.tokens, kept, ask.length)
        everything = {layer: [range(ask.length)] * len(heads) for layer, heads in kept.items()}
        seeing = masked_logits(model, ask.prompt, answer.tokens, everything, ask.length)
        difference = float((answer.logits - masked).abs().max())
        assert float((answer.logits - seeing).abs().max()) > 10 * difference, (
            "it is all the same to the model"
        )
        largest = max(largest, difference)
    return largest


def _refusal(family: Family, folder: Path) -> str:
    config = AutoConfig.for_model(family.model_type, **family.settings)
    config.architectures = [family.architecture]
    config.save_pretrained(folder / family.model_type)
    try:
        EngineArgs(
            str(folder / family.model_type), kv_eviction="snapkv", skip_tokenizer_init=True, dtype="bfloat16"
        ).create_engine_config()
    except KVEvictionError as error:
        return str(error).replace(f" ({folder / family.model_type})", "")
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
    parser = argparse.ArgumentParser(prog="python -m tests.engine.examine_families", description=__doc__)
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
