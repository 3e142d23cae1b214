"""Every public input with random values: valid ones are accepted, others refused in a line that names flag or field."""

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from vllm import AsyncEngineArgs, EngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

import vllm_kvevict.engine  # noqa: F401
from tests.engine.support.clients import words
from tests.engine.support.serving import ForkedServer
from vllm_kvevict.engine import versions
from vllm_kvevict.engine.config import (
    ENGINE_DEFAULTS,
    KVEvictionError,
    Options,
    needs_reserve,
    require_options,
)
from vllm_kvevict.engine.frontend import plugin
from vllm_kvevict.engine.request_options import OTHERS_FIELDS, REQUEST_FIELDS, RequestOptions
from vllm_kvevict.policies import available, decoding_policies, parameters
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules.registry import lookahead_policies

PROMPT = 300
FUZZ = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

# Values.

POLICIES = (*available(), "all", "unreserved")

INTEGERS = st.integers(-(2**63), 2**63)
"""vLLM itself refuses larger ones in requests."""
JUNK = st.one_of(
    st.none(),
    st.text(max_size=8).filter(lambda text: text not in available()),
    st.lists(INTEGERS, max_size=2),
    st.dictionaries(st.text(max_size=3), INTEGERS, max_size=2),
)
"""Neither a number nor a policy."""
FRACTIONS = st.floats().filter(lambda x: x != x or x % 1 != 0)
JSON = st.one_of(JUNK, st.booleans(), INTEGERS, st.floats())

RATIOS = st.floats(0, 1, exclude_min=True)
TOKENS = st.integers(301, 10**9)
"""More than the windows, sinks and probes below take."""
BUDGETS = st.one_of(RATIOS, TOKENS, TOKENS.map(float))
NO_BUDGETS = st.one_of(
    st.floats(max_value=0),
    st.floats(1, 1e9).filter(lambda x: x > 1 and x != int(x)),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.integers(-(2**63), 0),
)


Values = tuple[st.SearchStrategy, st.SearchStrategy]
"""Valid ones and others."""


def at_least(least: int, most: int = 100) -> Values:
    bad = st.one_of(
        st.integers(-(2**63), least - 1), st.floats().filter(lambda x: x != x or x % 1 != 0), JUNK
    )
    return st.integers(least, most), bad


def one_of(*names: str) -> Values:
    return st.sampled_from(names), st.one_of(JUNK.filter(lambda x: x not in names), INTEGERS)


def number(least: float, most: float, exclude_least: bool = False) -> Values:
    bad = st.one_of(
        st.floats(max_value=least, exclude_max=not exclude_least),
        st.floats(min_value=most, exclude_min=True) if most == 1 else st.just(float("inf")),
        st.booleans(),
        JUNK,
    )
    return st.floats(least, most, exclude_min=exclude_least), bad


PARAMETERS: dict[str, Values] = {
    **{name: at_least(1) for name in ("window", "beta", "take_probe", "leverage_chunk", "n_future")},
    "take_chunk": (st.integers(100, 10**4), at_least(1)[1]),  # no less than the probe
    "skip_layers": at_least(0),
    "sinks": (st.integers(1, 100), at_least(0)[1]),  # kvzip's must not be 0 where its window is
    "kvzip_chunk": at_least(64, 1000),
    "kvzip_sees": one_of("all", "chunk"),
    **{name: number(0, 1) for name in ("alpha", "first", "mass", "take_alpha")},
    **{name: number(0, 1e3, exclude_least=True) for name in ("tau1", "tau2")},
    **{name: number(0, 1e3) for name in ("gamma", "blend", "epsilon")},
    "kernel": (
        st.integers(0, 20).map(lambda k: 2 * k + 1),
        st.one_of(st.integers(-20, 20).map(lambda k: 2 * k), at_least(1)[1]),
    ),
    "pooling": one_of("max", "avg", "none", "decay"),
    "gqa": one_of("mean", "max"),
    "rows": one_of("mean", "max", "recent"),
    "ada_safeguard": one_of("interp", "guarantee"),
    "h2o_norm": one_of("sum", "mean"),
    "take_guide": one_of("prompt", "chunk"),
    "take_warmup_layers": (st.integers(0, 4) | st.just("auto"), at_least(0)[1]),
    "take_warmup_budget": (st.integers(1, 500) | st.just("auto"), at_least(1)[1]),
}
ENGINE: dict[str, Values] = {
    "min_prompt": at_least(0),
    "decode_reserve": at_least(1),
    "lookahead": (st.integers(0, 64), at_least(0)[1] | st.integers(65, 2**63)),
    "page_size": (st.integers(1, 8).map(lambda k: 32 * k), st.one_of(st.integers(33, 63), at_least(1)[1])),
    "scope": one_of("prompt", "prefix", "turns"),
    "defaults": one_of("measured", "paper"),
    **{name: (st.booleans(), st.one_of(INTEGERS, st.floats(), JUNK)) for name in ("kernels", "keep_first")},
    "policies": (
        st.sampled_from(POLICIES) | st.lists(st.sampled_from(POLICIES), max_size=3),
        st.one_of(
            INTEGERS,
            st.floats(),
            JUNK.filter(lambda value: value not in ([], *POLICIES)),
            st.lists(st.sampled_from(["nope", 1]), min_size=1),
        ),
    ),
    "policy_params": (
        st.sampled_from([{}, {"lava": {"kernel": 21}}, {"streaming-llm": {"sinks": 2}, "snapkv": {}}]),
        st.one_of(JUNK.filter(lambda value: value != {}), INTEGERS, st.just({"lava": {"kernel": 2}})),
    ),
    **{
        name: (st.integers(1, 100) | st.none(), at_least(1)[1].filter(lambda value: value is not None))
        for name in ("min_turn", "max_window", "decode_interval", "decode_window")
    },
    "decode_policy": (
        st.sampled_from(decoding_policies()) | st.none(),
        st.one_of(JUNK.filter(lambda value: value is not None), INTEGERS, st.just("lava")),
    ),
    "eviction_log": (
        st.sampled_from([None, "evictions.jsonl", "/no/such/folder/file"]),  # looked for at start-up only
        st.one_of(
            INTEGERS, st.floats(), JUNK.filter(lambda value: value is not None and not isinstance(value, str))
        ),
    ),
}


def test_every_parameter_is_tried():
    assert {name for policy in available() for name in parameters(policy)} == set(PARAMETERS)
    assert set(ENGINE_DEFAULTS) == set(ENGINE)


@st.composite
def configurations(draw: st.DrawFn) -> tuple[str, dict[str, Any], list[str]]:
    """A policy, its ``--kv-eviction-config``, and which entries are not valid."""
    policy = draw(st.sampled_from(available()))
    known = {name: PARAMETERS[name] for name in parameters(policy)} | ENGINE
    config, wrong = {}, []
    for name in draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=4)):
        good, bad = known[name]
        if draw(st.integers(0, 4)):
            config[name] = draw(good)
        else:
            config[name] = draw(bad)
            wrong.append(name)
    values = parameters(policy) | config
    for parameter in lookup(policy).parameters:
        # What is not used is refused: test_config.py.
        unused = any(values[name] == value for name, value in parameter.unless)
        assume(not unused or parameter.name not in config)
    if "policy_params" in config and "policy_params" not in wrong and (others := config["policy_params"]):
        # Neither the server's own policy nor one that requests may not choose: test_parameters.py.
        assume(policy not in others and "policies" not in config)
    if not draw(st.integers(0, 6)):
        name = draw(st.text("abkw_", min_size=1, max_size=8).filter(lambda name: name not in known))
        config[name] = draw(JSON)
        wrong.append(name)
    return policy, config, wrong


# Flags and keywords, in this process.


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return versions.load(versions.moves().make_arg_parser)(FlexibleArgumentParser(prog="vllm"))


@contextlib.contextmanager
def refused(*flags: str) -> Iterator[None]:
    """Expect the end of a command, with one line of stderr that names one of the flags."""
    errors = io.StringIO()
    with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(errors):
        yield
    *_, last = errors.getvalue().splitlines()
    assert end.value.code == 2
    assert "error: " in last and any(flag in last for flag in flags), last


def read_command(parser: FlexibleArgumentParser, model: str, *arguments: str) -> Options | None:
    """The options that a command line asks for."""
    args = parser.parse_args(["--model", model, *arguments])
    return plugin.requested_options(AsyncEngineArgs.from_cli_args(args))


@FUZZ
@given(configurations(), BUDGETS, st.booleans())
def test_configurations(parser, model, configuration, budget, dotted):
    policy, config, wrong = configuration
    arguments = ["--kv-eviction", policy, f"--kv-budget={budget!r}"]
    if dotted and all(isinstance(value, (int, float, str)) and value == value for value in config.values()):
        for name, value in config.items():
            arguments.append(
                f"--kv-eviction-config.{name}={json.dumps(value) if not isinstance(value, str) else value}"
            )
    else:
        arguments += ["--kv-eviction-config", json.dumps(config)]
    if config.get("scope") == "turns" and (budget > 1 or not lookup(policy).parts):
        wrong = [*wrong, "scope turns"]
    if config.get("keep_first") is True and config.get("scope") != "turns":
        wrong = [*wrong, "keep_first"]
    is_able = policy in lookahead_policies() and config.get("scope", "prompt") == "prompt"
    if not wrong and config.get("lookahead") and not is_able:
        wrong = ["lookahead"]
    if wrong:
        with refused(*wrong):
            read_command(parser, model, *arguments)
    else:
        options = read_command(parser, model, *arguments)
        assert (options.policy, options.budget) == (policy, budget)
        assert Options.parse(json.loads(json.dumps(options.to_dict()))) == options


@FUZZ
@given(st.one_of(NO_BUDGETS.map(repr), st.just("1" * 400), st.text(max_size=10)))
def test_budgets_of_the_command_line(parser, model, text):
    with contextlib.suppress(ValueError, OverflowError):
        value = float(text)
        if 0 < value <= 1 or (1 < value < float("inf") and value == int(value)):
            return
    with refused("--kv-budget"):
        read_command(parser, model, "--kv-eviction", "snapkv", f"--kv-budget={text}")


@FUZZ
@given(st.text(max_size=12))
def test_policies_and_json_of_the_command_line(parser, model, text):
    if text not in available():
        with refused("--kv-eviction"):
            read_command(parser, model, f"--kv-eviction={text}")
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        with refused("--kv-eviction-config"):
            read_command(parser, model, "--kv-eviction", "snapkv", f"--kv-eviction-config={text}")


@FUZZ
@given(
    st.dictionaries(
        st.sampled_from(["policy", "budget", "scope", "check", *ENGINE, *PARAMETERS]), JSON, max_size=4
    )
)
def test_additional_config(settings):
    """Also what no flag lets through: a policy or a budget of any type."""
    try:
        options = Options.parse(settings)
    except KVEvictionError as error:
        assert str(error).startswith("--kv-") and "\n" not in str(error)
    else:
        assert Options.parse(options.to_dict()) == options


# Fields of single requests, as the front-end checks them.

FIELDS: dict[str, Values] = {
    "kv_eviction": (
        st.sampled_from(available()).filter(lambda policy: not needs_reserve(policy)),
        st.one_of(JUNK, INTEGERS, st.sampled_from([p for p in available() if needs_reserve(p)])),
    ),
    "kv_budget": (
        BUDGETS | BUDGETS.map(repr),
        st.one_of(NO_BUDGETS, NO_BUDGETS.map(repr), st.booleans(), st.none(), st.text("xyz")),
    ),
    "kv_prefix_len": (
        st.integers(1, PROMPT) | st.integers(1, PROMPT).map(float) | st.none(),
        st.one_of(
            st.integers(-(2**63), 0), st.integers(PROMPT + 1, 2**63), FRACTIONS, st.booleans(), st.text()
        ),
    ),
    "kv_decode_budget": (
        st.just(0) | st.integers(301, 2**40) | TOKENS.map(float),
        st.one_of(
            st.integers(-(2**63), -1), st.integers(2**40 + 1, 2**64), FRACTIONS, st.booleans(), st.text()
        ),
    ),
    "kv_lookahead": (  # of a server without
        st.sampled_from([0, 0.0]),
        st.integers(1, 2**63) | st.integers(-(2**63), -1) | FRACTIONS | st.booleans() | st.text(),
    ),
}
KNOWN = (*REQUEST_FIELDS, *OTHERS_FIELDS)


@st.composite
def parameters_of(draw: st.DrawFn, policy: str) -> str:
    """Some of a policy's parameters that a request may set together, in any order; empty if there are none."""
    names = [parameter.name for parameter in lookup(policy).parameters if parameter.by_request]
    chosen = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    if "pooling" in chosen and parameters(policy)["pooling"] == "decay":
        chosen = [name for name in chosen if name != "kernel"]
    return ",".join(f"{name}={parameters(policy)[name]}" for name in chosen)


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """Fields of ``vllm_xargs``, and those of them that are not valid."""
    fields, wrong = {}, []
    for name, (good, bad) in FIELDS.items():
        choice = draw(st.integers(0, 7))
        if choice < 4:
            fields[name] = draw(good)
        elif choice == 4:
            fields[name] = draw(bad)
            wrong.append(name)
    policy = fields.get("kv_eviction", "ada-snapkv")
    choice = draw(st.integers(0, 7))
    if choice == 4:
        fields["kv_params"] = draw(
            JUNK | INTEGERS | st.sampled_from(["kernel", "kernel=4", "window=33", "="])
        )
        wrong.append("kv_params")
    elif choice < 4 and "kv_eviction" not in wrong and (given := draw(parameters_of(policy))):
        fields["kv_params"] = given
    if not draw(st.integers(0, 9)):
        name = draw(
            st.text("abelnv_", min_size=1, max_size=8).map("kv_{}".format).filter(lambda n: n not in KNOWN)
        )
        fields[name] = draw(JSON)
        wrong.append(name)
    return fields, wrong


@pytest.fixture(scope="module")
def processor(models) -> InputProcessor:
    config = {"min_prompt": 0}
    args = EngineArgs(
        str(models("llama")),
        kv_eviction="ada-snapkv",
        kv_decode_budget=64,
        kv_eviction_config=config,
        dtype="float32",
    )
    return InputProcessor(args.create_engine_config())


@FUZZ
@given(requests())
def test_fields_of_requests(processor, request_fields):
    fields, wrong = request_fields
    prompt = {"prompt_token_ids": [7] * PROMPT}

    def process():
        params = SamplingParams(max_tokens=4, extra_args=fields)
        return processor.process_inputs("request", prompt, params, ("generate",))

    if not wrong:
        server, found = require_options(processor.vllm_config), RequestOptions.of(process().sampling_params)
        assert found == RequestOptions.read(server, fields, PROMPT)
        assert found.config.policy == fields.get("kv_eviction", server.policy)
        return
    with pytest.raises(VLLMValidationError) as error:
        process()
    # vLLM itself refuses integers of more than 64 bits.
    is_huge = any(isinstance(value, int) and not -(2**63) <= value < 2**64 for value in fields.values())
    assert error.value.parameter in wrong or (is_huge and error.value.parameter == "extra_args")
    # vLLM appends the value as it is.
    sentence, _, _ = str(error.value).partition(" (parameter=")
    assert sentence.startswith(error.value.parameter) and "\n" not in sentence


# A real server and its own description of what it takes.

XARGS = {
    "type": "object",
    "properties": {
        "kv_eviction": {"anyOf": [{"enum": list(available())}, {"type": "string"}]},
        "kv_budget": {"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "integer", "minimum": 2}]},
        "kv_params": {
            "anyOf": [{"enum": ["kernel=3", "kernel=31,alpha=0.2", "window=16"]}, {"type": "string"}]
        },
        "kv_prefix_len": {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        "kv_decode_budget": {"anyOf": [{"enum": [0, 64, 2**40, 2**63, 1e19]}, {"type": "number"}]},
        "kv_answer_from": {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        "kv_lookahead": {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        "kv_turns": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}]},
    },
    "additionalProperties": {"type": "number"},
}
LIMITS = {"n": 4, "max_tokens": 64, "max_completion_tokens": 64}
"""What a request may ask for at most: vLLM itself would start as many answers as it is told."""


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    flags = ["--kv-eviction", "ada-snapkv", "--kv-eviction-config.min_prompt", "0", "--dtype", "float32"]
    flags += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--kv-decode-budget", "32"]
    log = tmp_path_factory.mktemp("server") / "log"
    with ForkedServer(models("llama"), log, *flags, env={"VLLM_KVEVICT_CHECK": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def operations(server) -> dict[str, Any]:
    """The server's own schema with our fields in it, by path."""
    raw = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        properties = raw["components"]["schemas"][name]["properties"]
        properties["model"] = {"const": server.model}
        properties["vllm_xargs"] = XARGS
        for limited in LIMITS.keys() & properties.keys():
            properties[limited] = {"type": "integer", "maximum": LIMITS[limited]}
    schema = schemathesis.openapi.from_dict(raw)
    return {path: schema[path]["POST"] for path in ("/v1/completions", "/v1/chat/completions")}


@pytest.mark.engine
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_requests_made_from_the_servers_schema(path, mode, server, operations):
    @settings(FUZZ, max_examples=25)
    @given(operations[path].as_strategy(generation_mode=mode))
    def ask(case):
        # vLLM looks into these before it checks that they are an object.
        structured = case.body.get("structured_outputs") if isinstance(case.body, dict) else None
        assume(structured is None or isinstance(structured, dict))
        answer = case.call(base_url=server.url, timeout=60)
        assert answer.status_code < 500, answer.text

    ask()
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    body = {"model": server.model, "prompt": words(100), "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 4
