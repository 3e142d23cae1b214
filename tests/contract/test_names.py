"""Names that the engine imports from vLLM, and variables that it reads: each exists."""

import ast
import dataclasses
import functools

import pytest

from tests.contract import source
from vllm_kvevict.engine import hooks, versions

ARCHITECTURE = source.ENGINE.parents[1] / "docs" / "ARCHITECTURE.md"

ENVIRONMENT = {
    "VLLM_USE_RUST_FRONTEND": "a front-end that checks no request is not refused",
    "VLLM_CPU_ATTN_SPLIT_KV": "CPU attention fails at the first step",
    "VLLM_CPU_KVCACHE_SPACE": "the README's way to size the KV memory of CPUs does nothing",
    "VLLM_CPU_OMP_THREADS_BIND": "two ranks on one NUMA node cannot be started as the README says",
    "VLLM_USE_V2_MODEL_RUNNER": "the model runner cannot be chosen as docs/GPU.md says",
}


RAY_VARIABLE = "the Ray executor that bypasses the worker is not refused"


@functools.cache
def imported() -> dict[str, set[str]]:
    """What the engine's modules import from vLLM, and which of them do."""
    found: dict[str, set[str]] = {}
    for file in source.ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    importers = found.setdefault(f"{node.module}:{alias.name}", set())
                    importers.add(file.relative_to(source.ENGINE).as_posix())
    return found


@pytest.mark.parametrize("place", sorted(imported()))
def test_name_exists(place: str) -> None:
    source.find(place, f"{', '.join(sorted(imported()[place]))} cannot be imported")


@pytest.mark.parametrize("by", hooks.HOOKS)
def test_what_is_wrapped_exists_and_is_told(by: str) -> None:
    rows = [line for line in ARCHITECTURE.read_text().splitlines() if f"`{by}`" in line]
    for target in hooks.HOOKS[by]:
        # What a dataclass generates is in no source.
        source.find(target.removesuffix(".__init__"), f"not there to be wrapped by {by}")
        owner = target.rpartition(":")[2].split(".")[0]
        # What is wrapped object by object has a row for its kind.
        assert rows and (not by.startswith("frontend") or any(owner in row for row in rows)), target


def test_nothing_else_is_wrapped() -> None:
    with pytest.raises(KeyError, match="not in HOOKS"):
        hooks.wrap("vllm.v1.engine.async_llm:AsyncLLM.abort", lambda abort: abort)


@pytest.mark.parametrize(
    "field",
    [field.name for field in dataclasses.fields(versions.Moves) if field.name != "ray_executor_variable"],
)
def test_moved_name_exists(field: str) -> None:
    source.find(getattr(source.moves(), field), f"{field} is looked for there")


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_environment_variable_is_known(name: str) -> None:
    if not is_variable(name):
        source.broken(f"vllm.envs does not know {name}", ENVIRONMENT[name])


def is_variable(name: str) -> bool:
    """Whether vLLM knows an environment variable of this name."""
    module = source.module_file("vllm.envs")
    return module is not None and f'"{name}"' in module.read_text(encoding="utf-8")


def test_ray_executors_are_told_apart() -> None:
    """Where vLLM has two Ray executors, the variable between them is known; where it has one, there is none."""
    name = source.moves().ray_executor_variable
    two = source.module_file("vllm.v1.executor.ray_executor") is not None
    if two != (name is not None) or (name is not None and not is_variable(name)):
        source.broken(f"vLLM has {1 + two} Ray executors, and the variable is {name}", RAY_VARIABLE)
