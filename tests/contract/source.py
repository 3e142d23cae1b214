"""vLLM's source, read without importing it: a version whose dependencies are missing can be judged all the same.

A place is written ``module:name`` or ``module:Class.member``. What is re-exported is followed to where it is defined,
members are also looked up in base classes. Everything that cannot be found fails the test in one line.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from vllm_kvevict import compatibility
from vllm_kvevict.engine import versions

ENGINE = Path(__file__).parents[2] / "vllm_kvevict" / "engine"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def broken(what: str, breaks: str = "") -> NoReturn:
    """Fail in one line: what was found, and what breaks for users."""
    pytest.fail(f"{what}: {breaks}" if breaks else what, pytrace=False)


@functools.cache
def root() -> Path:
    """The folder of the vLLM that Python would import."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        broken("there is no vLLM in this environment")
    return Path(spec.submodule_search_locations[0])


def version() -> str:
    """The version of vLLM whose source is read."""
    file = module_file("vllm._version")
    found = re.search(r"^__version__ = .*?['\"](.+?)['\"]", file.read_text(), re.MULTILINE) if file else None
    return found.group(1) if found else "of unknown version"


def is_supported() -> bool:
    """Whether the engine supports that version; then every check must hold."""
    return compatibility.refusal(version()) is None


def moves() -> versions.Moves:
    """The places of that version; of a version that is not supported, those of the newest that is."""
    return versions.of(version() if is_supported() else compatibility.supported()[-1])


def module_file(module: str) -> Path | None:
    """The file of ``vllm.x.y``, None when there is none."""
    path = root().joinpath(*module.split(".")[1:])
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


@functools.cache
def tree(module: str) -> ast.Module | None:
    """The module's syntax tree, None when there is no such module."""
    file = module_file(module)
    return None if file is None else ast.parse(file.read_text(encoding="utf-8"))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those under ``if``, ``try`` and ``with`` included."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                yield from statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def targets(node: ast.stmt) -> list[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.Assign):
        return [x for t in node.targets for x in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def lookup(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Where a module's name is defined, re-exports followed: (module, statement); None when it has no such name."""
    source = tree(module)
    if source is None:
        return None
    found: ast.stmt | None = None
    for node in statements(source.body):
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in (name, "*"):
                    origin = node.module or ""
                    if node.level:
                        base = module.split(".")
                        file = module_file(module)
                        drop = node.level - (file is not None and file.name == "__init__.py")
                        origin = ".".join([*base[: len(base) - drop], *filter(None, [node.module])])
                    if not origin.startswith("vllm"):
                        found = node if alias.name != "*" else found
                    elif (deeper := lookup(origin, name if alias.name == "*" else alias.name)) is not None:
                        return deeper
                    elif module_file(f"{origin}.{alias.name}") is not None:
                        return f"{origin}.{alias.name}", node
        elif any(isinstance(t, ast.Name) and t.id == name for t in targets(node)):
            found = node
    if found is None and module_file(f"{module}.{name}") is not None:
        return f"{module}.{name}", ast.Pass()
    # Lazy packages name what their __getattr__ finds.
    return None if found is None else (module, found)


def bases(module: str, node: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
    """The class and its base classes in vLLM, in method resolution order as far as they are simple."""
    result = [(module, node)]
    for base in node.bases:
        expression = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(expression, ast.Name):
            found = lookup(module, expression.id)
            if found and isinstance(found[1], ast.ClassDef):
                result += [pair for pair in bases(found[0], found[1]) if pair not in result]
    return result


def find(place: str, breaks: str = "") -> tuple[str, ast.stmt]:
    """The definition of a place, and the module it is in."""
    module, _, path = place.partition(":")
    name, _, member = path.partition(".")
    if tree(module) is None:
        broken(f"vLLM has no module {module}", breaks)
    found = lookup(module, name)
    if found is None:
        broken(f"{module} has no {name}", breaks)
    if not member:
        return found
    if not isinstance(found[1], ast.ClassDef):
        broken(f"{module}:{name} is no class", breaks)
    for where, node in bases(found[0], found[1]):
        for statement in statements(node.body):
            if isinstance(statement, (ast.ClassDef, *FUNCTIONS)) and statement.name == member:
                return where, statement
    broken(f"{place} is gone", breaks)


def parameters(place: str, breaks: str = "") -> list[str]:
    """Names a function takes, ``*args`` and ``**kwargs`` with their stars; of a class its constructor's."""
    node = find(place, breaks)[1]
    if isinstance(node, ast.ClassDef):
        own = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
        if not own:
            return fields(place, breaks)
        node = own[0]
    if not isinstance(node, FUNCTIONS):
        broken(f"{place} is no function", breaks)
    args = node.args
    names = [x.arg for x in (*args.posonlyargs, *args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [x.arg for x in args.kwonlyargs]
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return [name for name in names if name not in ("self", "cls")]


def fields(place: str, breaks: str = "") -> list[str]:
    """Annotated names in a class and its bases: a dataclass's fields."""
    module, node = find(place, breaks)
    if not isinstance(node, ast.ClassDef):
        broken(f"{place} is no class", breaks)
    return [
        statement.target.id
        for _, cls in reversed(bases(module, node))
        for statement in cls.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]


def members(place: str, breaks: str = "") -> set[str]:
    """Whatever instances of a class may have: methods, properties, class variables, what methods assign to ``self``."""
    module, node = find(place, breaks)
    if not isinstance(node, ast.ClassDef):
        broken(f"{place} is no class", breaks)
    names: set[str] = set()
    for _, cls in bases(module, node):
        for inner in ast.walk(cls):
            if isinstance(inner, FUNCTIONS):
                names.add(inner.name)
            elif isinstance(inner, ast.stmt):
                for target in targets(inner):
                    if isinstance(target, ast.Name):
                        names.add(target.id)
                    elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        names.add(target.attr)
    return names


def text(place: str, breaks: str = "") -> str:
    """The source of a place, in one normal form."""
    return ast.unparse(find(place, breaks)[1])


def calls(place: str, breaks: str = "") -> list[ast.Call]:
    """Calls in a function, in the order of the source."""
    found = [x for x in ast.walk(find(place, breaks)[1]) if isinstance(x, ast.Call)]
    return sorted(found, key=lambda x: (x.lineno, x.col_offset))


def called(place: str, breaks: str = "") -> list[str]:
    """Names of the functions and methods it calls, without what stands before the last dot, in order."""
    return [ast.unparse(x.func).rpartition(".")[2] for x in calls(place, breaks)]


def uses(module: str, owner: str) -> set[str]:
    """Attributes that a module reads of whatever is called ``owner``."""
    source = tree(module)
    if source is None:
        broken(f"vLLM has no module {module}")
    return {
        x.attr
        for x in ast.walk(source)
        if isinstance(x, ast.Attribute) and ast.unparse(x.value).rpartition(".")[2] == owner
    }
