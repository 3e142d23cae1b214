"""The project's modules as syntax trees, and how a rule about them is held; the rules are in `test_house.py`."""

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_kvevict"

Check = Callable[[str, ast.Module], Iterator[str]]
"""Of a module's name and its tree: what breaks a rule there."""


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the project, by its dotted name below the package."""
    for folder, prefix in ((PACKAGE, ""), (ROOT / "kernels", "kernels.")):
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if folder == ROOT / "kernels" or relative.parts[0] != "kernels":
                yield prefix + ".".join(relative.with_suffix("").parts), path


MODULES = dict(sources())


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def offenders(check: Check, *below: str) -> list[str]:
    """What a check finds in all modules, or in those whose names begin with one of these."""
    modules = [module for module in MODULES if not below or module.startswith(below)]
    return sorted(
        {f"{module}: {found}" for module in modules for found in check(module, tree_of(MODULES[module]))}
    )


def finds(check: Check, module: str, source: str) -> list[str]:
    """The same in a module that is made up, for controls."""
    return list(check(module, ast.parse(source)))


def hold(found: Iterable[str], known: Iterable[str] = ()) -> None:
    """Fail with all that breaks a rule and is not known to, and with all that is known to and no longer does."""
    found, known = set(found), set(known)
    wrong = [f"breaks the rule: {each}" for each in sorted(found - known)]
    wrong += [f"no longer breaks it, so take it from the list: {each}" for each in sorted(known - found)]
    assert not wrong, "\n" + "\n".join(wrong)


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """What a module imports anywhere, also late or for types only, by dotted names; relative ones resolved."""
    package = ["vllm_kvevict", *module.split(".")[:-1]]
    for node in ast.walk(tree):
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


def module_of(name: str) -> str | None:
    """The module that a name is in, or is."""
    parts = ours(name)
    for end in range(len(parts), 0, -1):
        for module in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if module in MODULES:
                return module
    return None


def imported_modules() -> dict[str, set[str]]:
    """The project's modules that each of them imports."""
    return {
        module: {found for name in imports(module, tree_of(path)) if (found := module_of(name))} - {module}
        for module, path in MODULES.items()
    }


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other, over however many others: a line for each circle."""
    reached = {start: _reachable(graph, start) for start in graph}
    found = {frozenset(other for other in reached[start] if start in reached[other]) for start in graph}
    return sorted(" ".join(sorted(circle)) for circle in found if circle)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def folders_as_files(graph: Mapping[str, set[str]]) -> Iterator[tuple[str, dict[str, set[str]]]]:
    """Of every folder with other folders in it: its name, and the graph of its files and folders, each as one."""
    names = {name.rpartition(".")[0] for name in graph if "." in name}
    for folder in sorted({"", *(name.rpartition(".")[0] for name in names)}):
        below = f"{folder}." if folder else ""
        beside: dict[str, set[str]] = {}
        for module, imported in graph.items():
            if module.startswith(below):
                own = module.removeprefix(below).split(".")[0]
                others = {
                    name.removeprefix(below).split(".")[0] for name in imported if name.startswith(below)
                }
                beside.setdefault(own, set()).update(others - {own, "__init__"})
        yield folder, beside
