"""What a new user does in an environment that has vLLM: four commands from the page that shows them, no more."""

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest

from benchmarks.harness.models import make_model
from benchmarks.harness.server import end
from tests.documents import ROOT, first_commands
from tests.engine.support.clients import eventually

pytestmark = pytest.mark.engine

DOCUMENT = ROOT / "README.md"
WORDS = 600
"""Of the text that is sent, which are as many tokens: more than are kept whole."""

MORE = """
import contextlib, sys
from vllm.entrypoints.cli.main import main as vllm
from vllm_kvevict.__main__ import main

sys.argv = ["vllm", "serve", "--help=KVEviction"]
with contextlib.suppress(SystemExit):
    vllm()
sys.exit(main(["doctor", "MODEL", "--kv-eviction", "lava"]))
"""
"""Two commands in one process, since each would import vLLM anew."""


class Environment:
    """A new environment beside the one of the tests, with all of its packages but this project."""

    def __init__(self, folder: Path):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.bin = folder / "bin"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        borrowed = folder / "borrowed"
        borrowed.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "kvevict" not in path.name:
                (borrowed / path.name).symlink_to(path)
        (self.packages / "borrowed.pth").write_text(f"{borrowed}\n")
        self._add_script("vllm", "vllm.entrypoints.cli.main")
        self._add_script("pip", "pip._internal.cli.main")
        left_out = ("PYTHONPATH", "VLLM_KVEVICT_CHECK", "VLLM_PLUGINS")
        self.variables = {name: value for name, value in os.environ.items() if name not in left_out} | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",  # whatever pip wanted to download would be an error
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }

    def _add_script(self, name: str, module: str) -> None:
        """A command of a package that is borrowed: the `main` of a module."""
        script = self.bin / name
        # Processes that it spawns import it again.
        start = f"import sys\nfrom {module} import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        script.write_text(f"#!{self.bin / 'python'}\n{start}")
        script.chmod(0o755)

    def run(self, command: str, folder: Path) -> str:
        """Run a command as a shell does; what it printed."""
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        return ended.stdout

    def serve(self, command: str, folder: Path) -> subprocess.Popen:
        """Start a command that does not end by itself, in a process group of its own."""
        with (folder / "server.log").open("w") as log:
            return subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=folder, env=self.variables, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment") / "new")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, built) -> Path:
    """Where the user is: with the wheel, a model, and a long text."""
    here = tmp_path_factory.mktemp("user")
    shutil.copy(built.wheel, here)
    make_model(here / "MODEL", max_len=1024)
    (here / "LONG_TEXT").write_text(" ".join(f"w{6 + 7 * index % 500}" for index in range(WORDS)))
    return here


def versions(environment: Environment, folder: Path) -> set[str]:
    return set(environment.run("pip list --format freeze --disable-pip-version-check", folder).splitlines())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def counted_evictions(port: int) -> float:
    """Evictions that the server's metrics count, of all policies."""
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    counts = re.findall(r"^vllm:kv_eviction_evictions_total\{.*\} (.*)$", metrics, re.M)
    return sum(map(float, counts))


def test_four_commands(environment, folder):
    install, serve, wait, ask = first_commands(DOCUMENT)
    assert "vllm-kvevict" not in str(before := versions(environment, folder))
    environment.run(install, folder)

    where = "import vllm_kvevict; print(vllm_kvevict.__file__)"
    assert environment.run(f"python -c '{where}'", folder).startswith(str(environment.packages))
    # Nothing of vLLM's environment was replaced, nothing else came.
    assert {line.split("==")[0] for line in versions(environment, folder) ^ before} == {"vllm-kvevict"}
    assert {path.name for path in environment.packages.glob("vllm*")} >= {"vllm_kvevict"}
    assert not (environment.packages / "vllm").exists()

    port = free_port()
    assert re.fullmatch(r"vllm serve MODEL --kv-eviction \S+ --kv-budget \S+ &", serve)
    server = environment.serve(f"{serve.removesuffix(' &')} --port {port}", folder)
    try:
        environment.run(wait.replace("http://localhost:8000", f"http://127.0.0.1:{port}"), folder)
        environment.run(f"{ask} --url http://127.0.0.1:{port}/v1", folder)
        assert eventually(lambda: counted_evictions(port) == 1)
    finally:
        end(server)

    (folder / "more.py").write_text(MORE)
    shown = environment.run("vllm-kvevict --version && python more.py", folder)
    assert "--kv-eviction-config" in shown and "can be served" in shown
