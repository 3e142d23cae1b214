"""A reader's environment: new, beside that of the tests, with none of their variables."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

SETTINGS = ("PIP_", "SSL_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Beginnings of variables that a machine may need to reach others."""


class Environment:
    """It has all packages of the tests' environment but this project, and its programs only as packages bring them.

    The home folder is new, but for the caches: what was compiled once is not compiled again.
    """

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
        self.variables = {name: text for name, text in os.environ.items() if name.startswith(SETTINGS)} | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(self._make_home(folder / "home")),
            "LANG": "C.UTF-8",
            "PIP_NO_INDEX": "1",  # whatever pip wanted to download would be an error
        }

    def _make_home(self, home: Path) -> Path:
        """A home folder whose user sends vLLM no statistics of its use."""
        vllm = home / ".config/vllm"
        vllm.mkdir(parents=True)
        (vllm / "do_not_track").touch()
        caches = Path.home() / ".cache"
        caches.mkdir(exist_ok=True)
        (home / ".cache").symlink_to(caches)
        return home

    def _add_script(self, name: str, module: str) -> None:
        """A command of a package that is borrowed: the `main` of a module."""
        script = self.bin / name
        # Processes that it spawns import it again.
        start = f"import sys\nfrom {module} import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        script.write_text(f"#!{self.bin / 'python'}\n{start}")
        script.chmod(0o755)

    def run(self, command: str, folder: Path, stdin: str = "") -> str:
        """Run a command as a shell does; what it printed."""
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=self.variables,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout[-5000:]}"
        return ended.stdout

    def serve(self, command: str, log: Path) -> subprocess.Popen:
        """Start a command that does not end by itself, in a process group of its own, in the folder of its log."""
        with log.open("w") as output:
            return subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=log.parent, env=self.variables, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
