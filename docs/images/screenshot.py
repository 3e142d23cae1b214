"""Make the picture of the page of ``inspect``: ``python docs/images/screenshot.py [FOLDER]`` (needs chromium).

The small model of this repository is asked for the one record in a text. FOLDER, which is this one if none is
given, gets inspect.png; beside it prompt.txt and inspect.html, unless it is this one.
"""

import random
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_kvevict.quality.tasks import make

ROOT = Path(__file__).resolve().parents[2]
MODEL = "benchmarks/quality/needle"
POLICIES = ["--policy", "ada-snapkv", "--budget", "0.1", "--compare", "streaming-llm"]
ENGINE = ["--dtype", "float32", "--max-model-len", "2048"]
SIZE, SCALE = "1280,800", "1.25"


def prompt() -> str:
    """A chat with the model: the text, and a question about a record near its beginning."""
    sample = make("single", 900, random.Random(3), depth=0.05)
    return f"<system> {sample.context} <user> {sample.question} <assistant>"  # as its chat template has it


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if target == Path(__file__).parent else target
        text, page = folder / "prompt.txt", folder / "inspect.html"
        text.write_text(prompt())
        command = [sys.executable, "-m", "vllm_kvevict.inspect", MODEL, "--prompt", text, "--output", page]
        subprocess.run([*command, *POLICIES, *ENGINE], cwd=ROOT, check=True)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [
            f"--window-size={SIZE}",
            f"--force-device-scale-factor={SCALE}",
            "--virtual-time-budget=5000",
        ]
        flags.append(f"--screenshot={target / 'inspect.png'}")
        subprocess.run(["chromium", *flags, page.as_uri()], check=True)


if __name__ == "__main__":
    main()
