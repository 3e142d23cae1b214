"""Dockerfiles, Compose file and scripts against linters and against rules of our own."""

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.support.serving import ROOT
from vllm_kvevict import __version__
from vllm_kvevict.compatibility import series, supported

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
SCRIPTS = [*sorted(DOCKER.glob("*.sh")), ROOT / "tools/install.sh", ROOT / "tools/vllm-next.sh"]
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CONSTRAINTS = dict(re.findall(r"^(\S+)==(\S+)$", (DOCKER / "constraints-cpu.txt").read_text(), re.M))
INSTALLED = dict(re.findall(r'^(\w+)="(\S+)"', (DOCKER / "install-cpu.sh").read_text(), re.M))

PINNED = re.compile(r"^[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*$")
BY = Path(sys.executable).parent


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def run(*words: str | Path) -> None:
    process = subprocess.run(
        [str(word) for word in words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint(dockerfile):
    run(BY / "hadolint", "--failure-threshold", "info", dockerfile)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts(script):
    run("bash", "-n", script)
    run(BY / "shellcheck", "--external-sources", script)
    assert script.name == "pip.sh" or os.access(script, os.X_OK)
    assert script.name == "pip.sh" or "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_pinned_unprivileged_and_checked(dockerfile):
    steps = instructions(dockerfile)
    stages = set()
    for word, rest in steps:
        if word == "FROM":
            image, *name = rest.split(" AS ")
            assert image in stages or PINNED.match(image), image
            stages.update(name)
    last = steps[max(index for index, (word, _) in enumerate(steps) if word == "FROM") :]
    found = {word: rest for word, rest in last}
    assert found["USER"] == "10001:0"
    assert found["ENTRYPOINT"] == '["/usr/local/bin/entrypoint.sh"]'  # a list: no shell takes the signals
    assert found["HEALTHCHECK"].endswith('CMD ["python3", "/usr/local/bin/healthcheck.py"]')
    assert (
        f"docker build -f docker/{dockerfile.name} -t vllm-kvevict:{__version__}-" in dockerfile.read_text()
    )


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_reaches_the_builder(dockerfile):
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")]
    assert lines[0] == "*"
    let_in = [line[1:] for line in lines if line.startswith("!")]
    copied = [rest.split() for word, rest in instructions(dockerfile) if word == "COPY"]
    sources = [word for words in copied for word in words[:-1] if not word.startswith("--")]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == place or source.startswith(f"{place}/") for place in let_in), source
        assert not any(fnmatch.fnmatch(source, line) for line in lines[1:] if not line.startswith("!"))


def broken(name: str, service: dict[str, Any]) -> list[str]:
    """Rules that a service of the Compose file breaks."""
    rules = {
        "image is pinned": bool(PINNED.match(service.get("image", ""))),
        "health is checked": service.get("healthcheck", {}).get("test", [None])[0] == "CMD",
        "user is not root": str(service.get("user", "0")).split(":")[0].isdigit()
        and not str(service.get("user", "0")).startswith("0"),
        "root is read-only": service.get("read_only") is True,
        "capabilities are dropped": service.get("cap_drop") == ["ALL"],
        "gains no privileges": "no-new-privileges:true" in service.get("security_opt", []),
        "restarts": service.get("restart") == "unless-stopped",
        "is reached from this machine alone unless told otherwise": all(
            port.startswith(("127.0.0.1:", "${SERVER_ADDRESS:-127.0.0.1}:"))
            for port in service.get("ports", [])
        ),
        "volumes are declared or beside the file": all(
            source.startswith(("./", "${")) or source in COMPOSE["volumes"]
            for source in (volume.rsplit(":/", 1)[0] for volume in service.get("volumes", []))
        ),
    }
    return [f"{name}: {rule}" for rule, holds in rules.items() if not holds]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_services_keep_the_rules(name):
    assert broken(name, COMPOSE["services"][name]) == []


def test_compose_builds_these_dockerfiles_and_mounts_what_exists():
    for kind in ("cpu", "cuda"):
        service = COMPOSE["services"][f"server-{kind}"]
        assert service["image"] == f"vllm-kvevict:{__version__}-{kind}" and service["profiles"] == [kind]
        assert service["build"] == {"context": "..", "dockerfile": f"docker/Dockerfile.{kind}"}
        assert service["environment"]["KV_EVICTION"]
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (DOCKER / volume.split(":")[0]).is_dir()
    devices = COMPOSE["services"]["server-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]


def test_versions_agree_everywhere():
    assert EXTRAS["cpu"] == [INSTALLED["vllm"]]
    name, version = INSTALLED["vllm"].split("==")
    assert CONSTRAINTS[name] == version
    assert f"torch=={CONSTRAINTS['torch']}" == INSTALLED["torch"]
    assert f"FROM vllm/vllm-openai:v{version}" in (DOCKER / "Dockerfile.cuda").read_text()
    assert series(version) in supported()
    # On GPUs any supported one.
    first, last = supported()[0], supported()[-1]
    major, minor = last.split(".")
    assert EXTRAS["cuda"] == [f"vllm>={first},<{major}.{int(minor) + 1}"]


def test_development_installs_by_the_images_script():
    assert 'docker/install-cpu.sh "$python" "$log"' in (ROOT / "tools/install.sh").read_text()
    assert "docker/install-cpu.sh /opt/venv/bin/python" in (DOCKER / "Dockerfile.cpu").read_text()
    assert not set(CONSTRAINTS) & {"torchvision", "torchaudio", "torchcodec"}
