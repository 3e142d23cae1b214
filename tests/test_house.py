"""The house: who may import whom, who may know what, how long things may be. Each rule is tried on made-up lines."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.house import (
    MODULES,
    ROOT,
    circles,
    finds,
    folders_as_files,
    hold,
    imported_modules,
    imports,
    module_of,
    offenders,
    ours,
    tree_of,
)
from vllm_kvevict.policies import available, inputs
from vllm_kvevict.policies.registry import lookup

ALLOWED: dict[str, set[str]] = {
    "server": {"kernels"},
    "__main__": set(),
    "compatibility": set(),
    "machine": {"kernels"},
    "kernels": {"kernels"},
    "policies": {"policies", "kernels"},
    "cache": {"cache", "kernels"},
    "parallel": {"parallel", "policies", "kernels"},
    "schedules": {"schedules", "cache", "parallel", "policies", "kernels"},
    "policy_list": set(),
    "decode_interval": set(),
    "chats": set(),
    "quiet": set(),
    "quality": {"quality", "schedules", "machine", "policy_list", "decode_interval", "chats"},
    "inspect": {"inspect", "policies", "policy_list", "chats"},
}
"""Parts of the project that each part may import; `engine` and the commands of `RUN_ENGINES` may import all."""

RUN_ENGINES = {"sizing", "doctor", "inspect.__main__", "inspect.inspection", "inspect.conversations"}
"""Commands, and parts of them, that ask the engine's modules and vLLM."""

APART = {
    "scheduler": {"worker", "frontend"},
    "worker": {"scheduler", "frontend"},
    "frontend": {"scheduler", "worker"},
}
"""Folders of the engine, and those that they must not import."""

CLOSELY_LOOKED_AT = ("engine.scheduler.", "schedules.", "cache.")

LARGE_CLASSES = {"PagedKVCache": 24, "PageLedger": 23}
"""Classes with more than 20 public methods, and how many they have."""

SET_FROM_OUTSIDE = {
    "engine.scheduler.answers": "request.max_tokens",
    "engine.scheduler.ledger": "self.prefix_cache_stats.reset",
    "engine.scheduler.scheduler": "request.priority self.kv_cache_manager.ends",
    "engine.scheduler.shared.compressed": "entry.shared entry.storing",
    "engine.scheduler.shared.graph": "node.counted node.held node.is_invalid node.parent.children used.refs",
    "engine.scheduler.shared.segments": "segment.is_ready used.lasting_refs",
    "engine.scheduler.shared.store": "producer.priority",
    "schedules.registry": "resident.eviction",
}
"""Fields that a module sets in objects of others."""


def test_a_list_of_exceptions_may_only_shrink() -> None:
    hold(["a", "b"], ["b", "a"])
    with pytest.raises(AssertionError, match="breaks the rule: c\nbreaks the rule: d"):
        hold(["d", "a", "c"], ["a"])
    with pytest.raises(AssertionError, match="take it from the list: a"):
        hold([], ["a"])


def test_all_forms_of_imports_are_seen() -> None:
    source = (
        "import vllm.config\nfrom ..engine import config\nfrom . import take\nfrom .params import GQA\n"
        "if TYPE_CHECKING:\n    from .plan import Plan\ndef late():\n    import vllm_kvevict.cache"
    )
    package = "vllm_kvevict"
    assert finds(imports, "policies.x", source) == [
        "vllm.config",
        f"{package}.engine.config",
        f"{package}.policies.take",
        f"{package}.policies.params.GQA",
        f"{package}.policies.plan.Plan",
        f"{package}.cache",
    ]


def imports_against_the_grain(module: str, tree: ast.Module) -> Iterator[str]:
    part = module.split(".")[0]
    if part in ("engine", "__init__") or module in RUN_ENGINES:
        return
    for name in imports(module, tree):
        target = ours(name)
        if name.split(".")[0] == "vllm" or (target and target[0] not in ALLOWED[part] | {"__version__"}):
            yield name


def test_imports_go_one_way() -> None:
    assert finds(imports_against_the_grain, "policies.x", "import vllm.config, torch") == ["vllm.config"]
    assert finds(imports_against_the_grain, "cache.x", "from vllm_kvevict.policies import take")
    assert not finds(imports_against_the_grain, "schedules.x", "from vllm_kvevict.policies import take")
    hold(offenders(imports_against_the_grain))


def imports_of_other_processes(module: str, tree: ast.Module) -> Iterator[str]:
    for name in imports(module, tree):
        target = ours(name)
        if len(target) > 1 and target[0] == "engine" and target[1] in APART.get(module.split(".")[1], ()):
            yield name


def test_processes_do_not_know_each_other() -> None:
    line = "from vllm_kvevict.engine.worker import runtime"
    assert finds(imports_of_other_processes, "engine.scheduler.x", line)
    assert not finds(imports_of_other_processes, "engine.worker.x", line)
    hold(offenders(imports_of_other_processes, "engine."))


def test_there_is_no_circle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"d"}}) == ["b c", "d e"]
    graph = imported_modules()
    assert graph["engine.connector"] and "policies.__init__" in graph["schedules.base"]
    assert "engine.frontend.rendering" in graph["engine.frontend.plugin"]  # late
    assert circles(graph) == []
    made_up = {"a.x": {"a.sub.y"}, "a.sub.y": {"a.sub.z"}, "a.sub.z": {"a.w"}, "a.w": {"a.x"}, "b": {"a.x"}}
    assert dict(folders_as_files(made_up))["a"] == {"x": {"sub"}, "sub": {"w"}, "w": {"x"}}
    assert {folder: circles(beside) for folder, beside in folders_as_files(graph) if circles(beside)} == {}


VERSION = re.compile(r"vllm\.(__version__|_?version)\b|\.MOVES|\bversions\.of\(|\bversion\.__version__")
"""What tells versions of vLLM apart."""


def asks_for_the_version(module: str, tree: ast.Module) -> Iterator[str]:
    code = "\n".join([*imports(module, tree), ast.unparse(tree)])
    yield from (found[0] for found in VERSION.finditer(code))


def test_the_version_of_vllm_is_asked_once() -> None:
    """To choose a module of `engine/versions`; nothing else may do one thing in one version and another in the next."""
    assert finds(asks_for_the_version, "engine.x", "from vllm.version import __version__ as found")
    assert finds(asks_for_the_version, "engine.x", "import vllm\nif vllm.__version__ < '0.33': pass")
    asking = {found.split(":")[0] for found in offenders(asks_for_the_version)}
    names_a_file_by_it = ["engine.worker.timings"]
    hold(asking, ["engine.registration", "engine.versions.__init__", *names_a_file_by_it])


KINDS = ("heads_compete", "guarantees_heads")
"""What a configuration says of the kind of its policy, for policies and schedules."""

CONCRETE = {module_of(name) for name in imports("schedules.registry", tree_of(MODULES["schedules.registry"]))}
CONCRETE -= {f"schedules.{shared}" for shared in ("base", "eviction", "evictor", "inputs", "plan")}
CONCRETE -= {"policies.__init__", "policies.registry", None}
"""Modules of single schedules."""


def asks_what_kind_a_policy_is(module: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == "schedule" for side in sides):
                yield ast.unparse(node)
        elif isinstance(node, ast.Attribute) and node.attr in KINDS:
            yield ast.unparse(node)
    yield from (name for name in imports(module, tree) if module_of(name) in CONCRETE)


def test_nobody_else_asks_what_kind_a_policy_is() -> None:
    """Engine and cache ask the plan, or the schedule by the questions of its base class."""
    check = asks_what_kind_a_policy_is
    assert finds(check, "engine.x", 'if lookup(policy).schedule == "chunked": pass')
    assert finds(check, "engine.x", "if plan.config.heads_compete: pass")
    assert finds(check, "engine.x", "from vllm_kvevict.schedules.chunked import Chunked")
    assert not finds(check, "engine.x", "left = plan.next_eviction(tokens) or plan.schedule.repeats_prompt")
    assert "schedules.whole" in CONCRETE
    defined = {
        n.name for n in ast.walk(tree_of(MODULES["policies.config"])) if isinstance(n, ast.FunctionDef)
    }
    assert {*KINDS} <= defined and "schedule" in lookup("take").__dataclass_fields__
    hold(offenders(check, "engine.", "cache."))


OF_ONE = {*available(), *(lookup(policy).schedule for policy in available())} - {"full"}
"""Names of policies and schedules, without the one that keeps everything."""


def names_a_policy(module: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in OF_ONE:
            yield str(node.value)
    for name in imports(module, tree):
        part, _, found = (module_of(name) or "").partition(".")
        if part == "policies" and found.replace("_", "-") in OF_ONE:
            yield f"policies.{found}"


def test_policies_are_named_where_they_live() -> None:
    """In their file and the schedule made for them; elsewhere as an example, or in texts for users."""
    assert finds(names_a_policy, "engine.x", 'if config.policy == "take": pass') == ["take"]
    assert finds(names_a_policy, "cache.x", "from vllm_kvevict.policies.kvzip import MIN_CHUNK")
    assert not finds(names_a_policy, "engine.x", 'names = "full", "of take"')
    found = [line for line in offenders(names_a_policy) if not line.startswith(("policies.", "quality."))]
    registered = sorted({lookup(policy).schedule for policy in available()})
    hold(
        found,
        [
            *(f"schedules.registry: {name}" for name in registered),
            "schedules.chunked: policies.take",
            "schedules.repeat: policies.kvzip",
            *(f"{command}: ada-snapkv" for command in ("engine.worker.warmup", "inspect.__main__", "sizing")),
        ],
    )


INPUTS = {value.name for value in vars(inputs).values() if isinstance(value, inputs.Input)}
ALSO_OTHERS = {"values", "rotary"}
"""Attributes that other objects have as well: dictionaries, and a rank and its sources."""


def names_an_input(module: str, tree: ast.Module) -> Iterator[str]:
    """Inputs of policies that a module names as strings, as attributes, or as fields of LayerInputs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in INPUTS:
            yield str(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in INPUTS - ALSO_OTHERS:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("LayerInputs"):
            yield from (str(keyword.arg) for keyword in node.keywords if keyword.arg in INPUTS)


def test_inputs_are_named_in_two_files() -> None:
    """All others ask the descriptors, so that an input that a new policy reads changes no other file."""
    check = names_an_input
    assert len(INPUTS) == 12 and offenders(check, "policies.inputs")
    assert finds(check, "engine.x", 'if "w_o" in config.needs: pass') == ["w_o"]
    assert finds(check, "engine.x", "sums = inputs.col_sums") == ["col_sums"]
    assert finds(check, "engine.x", "LayerInputs(keys=keys, q_window=None)") == ["q_window"]
    assert not finds(check, "engine.x", "if W_O in config.inputs: found = {}.values()")
    found = offenders(check)
    hold(line for line in found if not line.startswith(("policies.inputs:", "schedules.inputs:")))


def replaces_a_function_of_vllm(module: str, tree: ast.Module) -> Iterator[str]:
    nodes = list(ast.walk(tree))
    functions = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    theirs = {name.rpartition(".")[2] for name in imports(module, tree) if name.startswith("vllm.")}
    for node in nodes:
        if isinstance(node, ast.Assign):
            is_function = isinstance(node.value, ast.Lambda) or ast.unparse(node.value) in functions
            owners = [
                ast.unparse(target.value) for target in node.targets if isinstance(target, ast.Attribute)
            ]
            if any(owner in theirs or (is_function and owner != "self") for owner in owners):
                yield ast.unparse(node)
        is_setattr = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
        if is_setattr and ast.unparse(node.args[-1]) in functions:
            yield ast.unparse(node)


def test_functions_of_vllm_are_replaced_in_one_place() -> None:
    """What ``hooks.wrap`` makes of them, of those that ``hooks.HOOKS`` lists."""
    check = replaces_a_function_of_vllm
    assert finds(check, "engine.x", "def f():\n    ...\nrunner.forward = f") == ["runner.forward = f"]
    assert finds(check, "engine.x", "from vllm.a import B\nB.run = wrap(B.run)") == ["B.run = wrap(B.run)"]
    assert finds(check, "engine.x", "def wrapped():\n    ...\nsetattr(cls, name, wrapped)")
    assert not finds(check, "engine.x", "request.max_tokens = tokens\nsetattr(self, name, None)")
    hold(offenders(check, "engine."))


FIELD = re.compile("kv_[a-z_]+")
FLAGS = ("eviction", "budget", "decode_budget", "eviction_config")


def names_a_field(module: str, tree: ast.Module) -> Iterator[str]:
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    yield from (text for text in strings if isinstance(text, str) and FIELD.fullmatch(text))


def test_fields_of_requests_are_named_in_one_file() -> None:
    """Others have flags, arguments and entries of configurations; `inspect` and `quality` are clients."""
    assert finds(names_a_field, "engine.x", 'fields.get("kv_turns")') == ["kv_turns"]
    assert not finds(names_a_field, "engine.x", 'f"kv_turns {problem}"; fields.get(TURNS); kv_len = 1')
    found = offenders(names_a_field, "engine.")
    known = ["names: kv_eviction", "sizing: kv_heads", "frontend.kv_dtype: kv_cache_scheme"]
    known += [f"frontend.plugin: kv_{name}" for name in (*FLAGS, "producer")]
    hold(
        (line for line in found if not line.startswith("engine.request_options:")),
        [f"engine.{line}" for line in known],
    )


MANY_MEANINGS = {"take", "forget", "give_back"}
"""What nothing is called; better are allocate, acquire or hold; invalidate or remove; free or release."""


def names_with_many_meanings(module: str, tree: ast.Module) -> Iterator[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    yield from (function.name for function in functions if function.name in MANY_MEANINGS)


def test_a_name_has_one_meaning() -> None:
    """Classes have names of their own, so that whoever searches for one finds one."""
    assert finds(names_with_many_meanings, "x", "class Pool:\n    def take(self): ...") == ["take"]
    hold(offenders(names_with_many_meanings))
    classes = [
        node.name
        for path in MODULES.values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    ]
    assert not {name: count for name, count in Counter(classes).items() if count > 1}


def looks_into_the_store(module: str, tree: ast.Module) -> Iterator[str]:
    parts = re.compile(r"\bshared\.(compressed|uncompressed|tails|_\w+)$")
    yield from (
        ast.unparse(x)
        for x in ast.walk(tree)
        if isinstance(x, ast.Attribute) and parts.search(ast.unparse(x))
    )


def test_the_ledger_sees_one_store() -> None:
    check = looks_into_the_store
    assert finds(check, "x", "self.shared.tails.adopt(account)") == ["self.shared.tails"]
    assert not finds(check, "x", "self.shared.publish(account)")
    hold(offenders(check, "engine.scheduler.ledger", "engine.scheduler.check"))


def makes_a_message(module: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (node.args or node.keywords):
            if ast.unparse(node.func).endswith("StepMessage"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Assign):
            targets = (target for target in node.targets if isinstance(target, ast.Attribute))
            yield from (ast.unparse(node) for target in targets if target.attr == "kv_connector_metadata")


def test_one_place_makes_the_message() -> None:
    """The outbox; an empty message tells nothing, and may be made anywhere."""
    check = makes_a_message
    assert finds(check, "engine.x", "messages.StepMessage(drops=[1])") and finds(check, "x", "StepMessage(a)")
    assert finds(check, "engine.x", "output.kv_connector_metadata = message")
    assert not finds(check, "engine.x", "message = StepMessage()\nread = output.kv_connector_metadata")
    hold(offenders(check))
    assert "replace(self._rest" in ast.unparse(tree_of(MODULES["engine.scheduler.outbox"]))


def factors(node: ast.expr) -> list[str]:
    """Of a product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return factors(node.left) + factors(node.right)
    return [ast.unparse(node)]


def computes_the_size_of_an_entry(module: str, tree: ast.Module) -> Iterator[str]:
    """Twice a page or a head, or what asks how many bytes a number has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and "2" in factors(node):
            if re.search(r"\b(page_size|head_dim|(get_)?head_size)\b", " ".join(factors(node))):
                yield ast.unparse(node)
        elif re.search(r"itemsize|element_size|dtype_size", getattr(node, "attr", getattr(node, "id", ""))):
            yield ast.unparse(node)


def test_the_layout_alone_says_how_large_an_entry_is() -> None:
    check = computes_the_size_of_an_entry
    wrong = "2 * x.page_size; n * get_head_size() * (a + 1) * 2; x.dtype.itemsize; get_dtype_size(x)"
    assert finds(check, "engine.x", wrong) == wrong.removesuffix("(x)").split("; ")
    assert not finds(check, "engine.x", "(2 * rows + 1) * page_size // 2, x.entry_bytes, 2 * n // page_size")
    found = [line for line in offenders(check) if not line.startswith(("kernels.", "cache.format: "))]
    # Half a page, on average, lies behind a row's entries.
    hold(found, ["engine.scheduler.admission: 2 * page_size"])


def is_own(node: ast.expr) -> bool:
    """Whether an expression is the object, or class, whose method it is in."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def fields_of_others(tree: ast.Module) -> Iterator[ast.Attribute]:
    yield from (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and not is_own(n.value))


def private_fields_of_others(module: str, tree: ast.Module) -> Iterator[str]:
    private = re.compile(r"_(?!_.*__$)")
    yield from (ast.unparse(node) for node in fields_of_others(tree) if private.match(node.attr))


def test_nobody_reads_private_fields_of_others() -> None:
    """What ruff's SLF001 would find, and more: it lets pass ``Pool._all`` in a class Pool, and ``pool._fields``."""
    by_ruff = "self.pool._free; other._x; _module._function; type(self)._all; self._x._y; pool.__x"
    assert len(finds(private_fields_of_others, "cache.x", by_ruff)) == 6
    assert finds(private_fields_of_others, "cache.x", "Pool._all; pool._fields") == [
        "Pool._all",
        "pool._fields",
    ]
    allowed = "self._free, cls._all, self.pool.free, super()._step(), x.__class__"
    assert not finds(private_fields_of_others, "cache.x", allowed)
    hold(offenders(private_fields_of_others, *CLOSELY_LOOKED_AT))


def fields_set_from_outside(module: str, tree: ast.Module) -> Iterator[str]:
    for node in fields_of_others(tree):
        if isinstance(node.ctx, (ast.Store, ast.Del)):
            yield ast.unparse(node)


def test_nobody_sets_fields_of_others() -> None:
    check = fields_set_from_outside
    assert finds(check, "cache.x", "self.pool.free = 1\naccount.held += 1\na.b, self.c = 1, 2") == [
        "self.pool.free",
        "account.held",
        "a.b",
    ]
    assert not finds(check, "cache.x", "self.free, free = account.held, 1\nself.free += 1")
    known = [f"{module}: {field}" for module, fields in SET_FROM_OUTSIDE.items() for field in fields.split()]
    hold(offenders(check, *CLOSELY_LOOKED_AT), known)


def lacks_a_docstring(module: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "begins without a docstring"


def test_files_begin_with_what_they_are() -> None:
    assert finds(lacks_a_docstring, "cache.x", "import ast\n'a text'")
    hold(offenders(lacks_a_docstring))


def does_not_say_what_it_owns(module: str, tree: ast.Module) -> Iterator[str]:
    _, _, after_the_first_sentence = " ".join((ast.get_docstring(tree) or "").split()).partition(". ")
    if not re.search(r"\bowns?\b", after_the_first_sentence, re.I) and not module.endswith("__init__"):
        yield "does not say what it owns"


def test_files_say_what_they_own() -> None:
    """Behind what they are, which is their first sentence; one that has no state owns nothing, and says that."""
    check = does_not_say_what_it_owns
    assert finds(check, "cache.x", "'What we own.'") and finds(check, "cache.x", "'Pages. They are known.'")
    assert not finds(check, "cache.x", "'Pages.\\n\\nOwns the free ones.'")
    hold(offenders(check, *CLOSELY_LOOKED_AT))


def lengths_of_functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def test_functions_are_short() -> None:
    """None above 60 lines, and 95 % below 30."""
    assert list(lengths_of_functions(ast.parse("def f():\n    1\n    2"))) == [("f", 3)]
    lengths = [
        (f"{module}.{name}", lines)
        for module, path in MODULES.items()
        for name, lines in lengths_of_functions(tree_of(path))
    ]
    hold(name for name, lines in lengths if lines > 60)
    longer = [name for name, lines in lengths if lines >= 30]
    assert len(longer) <= 0.05 * len(lengths), f"{len(longer)} of {len(lengths)}: {', '.join(longer)}"


def test_files_are_short() -> None:
    """At most 600 lines, docstrings among them."""
    folders = ("vllm_kvevict", "kernels", "benchmarks")
    suffixes = (".py", ".cpp", ".h")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert lengths["vllm_kvevict/engine/request_options.py"] > 300
    hold(name for name, lines in lengths.items() if lines > 600)


def public_methods(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [x.name for x in node.body if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef))]
            yield node.name, sum(not name.startswith("_") for name in methods)


def test_classes_are_small() -> None:
    made_up = ast.parse("class A:\n    def __init__(self): ...\n    def b(self): ...\n    def _c(self): ...")
    assert list(public_methods(made_up)) == [("A", 1)]
    found = (pair for path in MODULES.values() for pair in public_methods(tree_of(path)))
    assert {name: count for name, count in found if count > 20} == LARGE_CLASSES
