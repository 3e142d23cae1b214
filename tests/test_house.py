"""The house: who may import whom, who may know what kind a policy is, and how long a function may be."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_kvevict"
ALLOWED: dict[str, set[str]] = {
    "server": set(),
    "__main__": set(),
    "compatibility": set(),
    "machine": {"kernels"},
    "kernels": {"kernels"},
    "policies": {"policies", "kernels"},
    "cache": {"cache", "kernels"},
    "parallel": {"parallel", "policies", "kernels"},
    "schedules": {"schedules", "cache", "parallel", "policies", "kernels"},
    "policy_list": set(),
    "quality": {"quality", "schedules", "machine", "policy_list"},
    "inspect": {"inspect", "policies", "policy_list"},
}
"""Parts of the project that each part may import; `engine` and the commands of `RUN_ENGINES` may import all."""

RUN_ENGINES = {"sizing", "doctor", "inspect.__main__"}
"""Commands that ask the engine's modules."""

APART = {
    "scheduler": {"worker", "frontend"},
    "worker": {"scheduler", "frontend"},
    "frontend": {"scheduler", "worker"},
}
"""Folders of the engine, and those that they must not import."""


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the project, by its dotted name below the package."""
    for folder, prefix in ((PACKAGE, ""), (ROOT / "kernels", "kernels.")):
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if folder == ROOT / "kernels" or relative.parts[0] != "kernels":
                yield prefix + ".".join(relative.with_suffix("").parts), path


def imports(module: str, tree: ast.Module | None = None) -> Iterator[str]:
    """What a module imports, by dotted names; relative ones resolved."""
    package = ["vllm_kvevict", *module.split(".")[:-1]]
    for node in ast.walk(tree or ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def ours(name: str) -> list[str]:
    """The parts of a name below the package, nothing for others' modules."""
    parts = name.split(".")
    return parts[1:] if parts[0] == "vllm_kvevict" else []


MODULES = dict(sources())


def test_relative_imports_are_seen_too() -> None:
    tree = ast.parse(
        "import vllm.config\nfrom ..engine import config\nfrom . import take\nfrom .params import GQA"
    )
    package = "vllm_kvevict"
    assert list(imports("policies.x", tree)) == [
        "vllm.config",
        f"{package}.engine.config",
        f"{package}.policies.take",
        f"{package}.policies.params.GQA",
    ]


ASK_FOR_THE_VERSION = {"vllm.version.__version__", "vllm.version", "vllm.__version__", "vllm._version"}


def test_the_version_of_vllm_is_asked_once() -> None:
    """To choose a module of `engine/versions`; nothing else may do one thing in one version and another in the next."""
    asking = {module for module in MODULES if any(name in ASK_FOR_THE_VERSION for name in imports(module))}
    assert asking == {"engine.registration"}
    read = re.compile(r"vllm\.__version__|vllm\.version|\.MOVES|versions\.of\(")
    reading = {module for module, path in MODULES.items() if read.search(path.read_text())}
    assert reading == {"engine.registration", "engine.versions.__init__"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    part = module.split(".")[0]
    for name in imports(module):
        if part not in ("engine", "__init__") and module not in RUN_ENGINES:
            assert name.split(".")[0] != "vllm", f"{module} imports {name}"
            if target := ours(name):
                assert target[0] in ALLOWED[part] | {"__version__"}, f"{module} imports {name}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("engine.")])
def test_processes_do_not_know_each_other(module: str) -> None:
    folder = module.split(".")[1]
    for name in imports(module):
        target = ours(name)
        if len(target) > 1 and target[0] == "engine":
            assert target[1] not in APART.get(folder, ()), f"{module} imports {name}"


def at_start(tree: ast.Module) -> ast.Module:
    """What runs when a module is imported: not its functions, nor what only type checkers see."""
    kept = [
        node
        for node in tree.body
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    return ast.Module(kept, [])


def module_of(name: str) -> str | None:
    """The module that a name is in, or is."""
    parts = ours(name)
    for end in range(len(parts), 0, -1):
        for module in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if module in MODULES:
                return module
    return None


def test_there_is_no_circle() -> None:
    graph = {
        module: {
            found
            for name in imports(module, at_start(ast.parse(path.read_text())))
            if (found := module_of(name))
        }
        for module, path in MODULES.items()
    }
    assert graph["engine.connector"] and "policies.__init__" in graph["schedules.base"]
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle


KINDS = re.compile(
    r"schedule (==|!=|in) "
    r"|\.(layer_local|weighted|one_stage|chunked|recycles|cuts)\b(?!\.| import)"
    r"|\b(plan|config|policy)\.probe\b"
)
"""Questions about the kind of a policy: they belong to schedules and to the registry of policies."""


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ('if lookup(policy).schedule == "chunked":', True),
        ("if account.plan.recycles:", True),
        ("if position in plan.cuts:", True),
        ("rows = request.plan.probe", True),
        ("left = plan.next_eviction(tokens)", False),
        ("from vllm_kvevict.schedules.chunked import most_probe_rows", False),
        ("layout = PageLayout.probe(write)", False),
    ],
)
def test_a_question_about_the_kind_is_seen(line: str, asks: bool) -> None:
    assert bool(KINDS.search(line)) == asks


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] in ("engine", "cache")])
def test_nobody_else_asks_what_kind_a_policy_is(module: str) -> None:
    lines = MODULES[module].read_text().splitlines()
    asking = [line for line in lines if KINDS.search(line) and "import" not in line]
    assert not asking


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] != "policies"])
def test_take_is_named_where_it_lives(module: str) -> None:
    """In its policy and its schedule; elsewhere only in texts for users."""
    if module == "schedules.chunked":
        return
    tree = ast.parse(MODULES[module].read_text())
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert "take" not in names and "take" not in constants
    assert not any(name.endswith("policies.take") for name in imports(module))


COMMANDS = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_benchmark_imports_another(command: str) -> None:
    """What several of them need is in `benchmarks/harness`, or in a package of its own."""
    tree = ast.parse((ROOT / "benchmarks" / f"{command}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "benchmarks":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            assert not {name.split(".")[1] for name in names} & set(COMMANDS), f"{command} imports {names}"


def test_functions_are_short() -> None:
    lengths = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{module}.{node.name}")
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert not [name for lines, name in lengths if lines > 60]
    assert sum(lines < 30 for lines, _ in lengths) >= 0.95 * len(lengths)


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest takes two files of one name for one module, unless their folders are packages."""
    found: dict[str, Path] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        in_package = (path.parent / "__init__.py").exists()
        name = f"{path.parent.name}.{path.name}" if in_package else path.name
        assert name not in found, f"{path} and {found[name]}: pytest takes them for one module"
        found[name] = path
