"""Flags, keywords and files: every way to switch eviction on, and what malformed ones are answered with."""

import argparse
import copy
import dataclasses
import json

import pytest
import yaml
from vllm import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_kvevict.engine  # noqa: F401
from tests.engine.support.serving import ROOT, forked_command
from vllm_kvevict.engine import versions
from vllm_kvevict.engine.config import ENGINE_DEFAULTS, KEY, KVEvictionError, Options
from vllm_kvevict.engine.frontend import plugin
from vllm_kvevict.engine.request_options import RequestOptions


def serve_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="vllm")
    return versions.load(versions.moves().make_arg_parser)(parser)


def parse(*words: str) -> argparse.Namespace:
    return serve_parser().parse_args(list(words))


def options_of(vllm_config) -> Options:
    return Options.parse(vllm_config.additional_config[KEY])


# Help.


def test_every_engine_option_is_documented():
    document = (ROOT / "docs/CONFIGURATION.md").read_text()
    for name, value in ENGINE_DEFAULTS.items():
        shown = value if isinstance(value, str) else json.dumps(value)
        assert f"\n| `{name}` | `{shown}` | " in document


# The command line.


def test_dotted_options_and_json_add_up(model):
    words = ["--model", model, "--kv-eviction", "snapkv", "--kv-budget", "0.3"]
    json_options = ["--kv-eviction-config", '{"min_prompt": 0, "window": 8}']
    dotted = ["--kv-eviction-config.window", "16", "--kv-eviction-config.gqa=max"]
    for extra in (json_options + dotted, dotted + json_options):
        args = parse(*words, *extra)
        # vLLM puts dotted options last, wherever they stand.
        assert args.kv_eviction_config == {"min_prompt": 0, "window": 16, "gqa": "max"}
        options = options_of(AsyncEngineArgs.from_cli_args(args).create_engine_config())
        assert (options.policy, options.budget, options.min_prompt) == ("snapkv", 0.3, 0)
        assert options.params == {"window": 16, "gqa": "max"}


def test_parameters_of_other_policies(model):
    flag = "--kv-eviction-config.policy_params"
    expected = {"lava": {"kernel": 21, "alpha": 0.2}}
    ways = {
        "JSON": ["--kv-eviction-config", json.dumps({"policy_params": expected})],
        "dotted": [flag, json.dumps(expected)],
        "one by one": [f"{flag}.lava.kernel", "21", f"{flag}.lava.alpha=0.2"],
    }
    for words in ways.values():
        args = parse("--model", model, "--kv-eviction", "full", *words)
        options = options_of(AsyncEngineArgs.from_cli_args(args).create_engine_config())
        config = RequestOptions.read(options, {"kv_eviction": "lava"}, 1).config
        assert (options.policy_params, config.params["kernel"], config.params["alpha"]) == (expected, 21, 0.2)


def test_rows_of_probes_are_those_of_the_parameters(model):
    """A step has room for the probe that the server's parameters of another policy ask for."""
    rows = {}
    for probe in (None, 40, 200):
        params = {"take": {"take_probe": probe}} if probe else {}
        config = {"policy_params": params, "policies": ["take"]}
        args = EngineArgs(model=model, kv_eviction="snapkv", kv_eviction_config=config)
        scheduler = args.create_engine_config().scheduler_config
        rows[probe] = scheduler.max_num_batched_tokens - scheduler.max_num_scheduled_tokens
    assert rows == {None: 32, 40: 40, 200: 200}


def test_parsing_twice_leaves_no_trace_of_the_first_time():
    parser = serve_parser()
    parser.parse_args(["--kv-eviction-config.window", "16"])
    assert parser.parse_args(["--kv-eviction-config.kernel", "5"]).kv_eviction_config == {"kernel": 5}
    assert parser.parse_args([]).kv_eviction_config is None


@pytest.mark.parametrize("nested", [True, False])
def test_a_yaml_file(tmp_path, model, nested):
    settings = {"model": model, "kv-eviction": "ada-snapkv", "kv-budget": 128, "enforce-eager": True}
    config = {"min_prompt": 10, "alpha": 0.5}
    if nested:
        settings["kv-eviction-config"] = config
    else:
        settings |= {f"kv-eviction-config.{name}": value for name, value in config.items()}
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    args = parse("--config", str(path), "--kv-budget", "64")  # the command line wins
    options = options_of(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    assert (options.policy, options.budget, options.min_prompt) == ("ada-snapkv", 64.0, 10)
    assert options.params == {"alpha": 0.5}


def test_without_the_flag_nothing_is_configured(model):
    args = parse("--model", model)
    assert (args.kv_eviction, args.kv_budget, args.kv_eviction_config) == (None, None, None)
    vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert vllm_config.additional_config == {}
    assert vllm_config.kv_transfer_config is None


def test_options_reach_processes_that_read_arguments_before_they_load_plugins(model):
    # With --api-server-count 2 each server reads the parsed arguments in a process of its own.
    args = parse(
        "--model", model, "--kv-eviction", "snapkv", "--kv-budget", "0.3", "--kv-eviction-config.window", "8"
    )
    AsyncEngineArgs.from_cli_args(args)
    unpatched = {field.name: getattr(args, field.name) for field in dataclasses.fields(AsyncEngineArgs)
                 if hasattr(args, field.name) and field.name not in plugin.FIELDS}  # fmt: skip
    options = options_of(AsyncEngineArgs(**unpatched).create_engine_config())
    assert (options.policy, options.budget, options.params) == ("snapkv", 0.3, {"window": 8})


def test_a_server_that_evicts_looks_at_bodies_and_others_do_not(model):
    """Once, though further API servers read the arguments again; and before what the user adds."""
    plain = parse("--model", model)
    AsyncEngineArgs.from_cli_args(plain)
    assert plain.middleware == []
    args = parse("--model", model, "--kv-eviction", "snapkv", "--middleware", "some.other")
    for _ in range(2):
        AsyncEngineArgs.from_cli_args(args)
        assert args.middleware == ["vllm_kvevict.engine.frontend.bodies.BodyCheck", "some.other"]
    evicting = parse("--model", model, "--kv-eviction", "snapkv")
    AsyncEngineArgs.from_cli_args(evicting)
    assert evicting.middleware and parse("--model", model).middleware == []


def test_flags_win_over_additional_config(model):
    settings = json.dumps({KEY: {"policy": "snapkv", "budget": 0.5, "min_prompt": 3}})
    args = parse("--model", model, "--additional-config", settings, "--kv-budget", "0.25")
    options = options_of(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    assert (options.policy, options.budget, options.min_prompt) == ("snapkv", 0.25, 3)


# From Python.


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_keywords_and_copies_of_arguments(kind, model):
    args = kind(model=model, kv_eviction="snapkv", kv_budget=0.3, kv_eviction_config={"window": 16})
    again = [
        args,
        copy.deepcopy(args),
        dataclasses.replace(args),
        kind(**vars(args)),  # as LLM.from_engine_args does
        kind.from_cli_args(argparse.Namespace(**vars(args))),
    ]
    for other in again:
        options = options_of(other.create_engine_config())
        assert (options.policy, options.budget, options.params) == ("snapkv", 0.3, {"window": 16})


def test_additional_config(model):
    settings = {KEY: {"policy": "streaming-llm", "budget": 64, "sinks": 2}, "other": {"kept": 1}}
    vllm_config = EngineArgs(model=model, additional_config=settings).create_engine_config()
    options = options_of(vllm_config)
    assert (options.policy, options.budget, options.params) == ("streaming-llm", 64, {"sinks": 2})
    assert vllm_config.additional_config["other"] == {"kept": 1}
    json.dumps(vllm_config.additional_config)


def test_configuring_twice_gives_the_same(model):
    args = EngineArgs(model=model, kv_eviction="snapkv")
    before = copy.deepcopy(vars(args))
    first, second = args.create_engine_config(), args.create_engine_config()
    for name in (
        "enable_prefix_caching",
        "additional_config",
        "worker_cls",
        "kv_transfer_config",
        *plugin.FIELDS,
    ):
        assert getattr(args, name) == before[name], name
    assert options_of(first) == options_of(second)
    assert first.scheduler_config.scheduler_cls == second.scheduler_config.scheduler_cls
    assert first.kv_transfer_config.kv_connector == second.kv_transfer_config.kv_connector


def test_registering_twice_changes_nothing():
    before = EngineArgs.__init__, EngineArgs.create_engine_config, EngineArgs.add_cli_args
    plugin.register()
    assert before == (EngineArgs.__init__, EngineArgs.create_engine_config, EngineArgs.add_cli_args)


# Malformed; test_fuzz.py has policies and budgets, JSON, and entries of --kv-eviction-config that nobody knows.

MALFORMED = {
    "no policy": (["--kv-budget", "0.5"], ["--kv-budget", "--kv-eviction POLICY"]),
    "no number": (["--kv-eviction", "snapkv", "--kv-decode-budget=much"], ["--kv-decode-budget", "got 'much'"]),
    "below 0": (["--kv-eviction", "snapkv", "--kv-decode-budget=-1"], ["--kv-decode-budget", "got '-1'"]),
    "budget in the wrong place": (
        ["--kv-eviction", "snapkv", "--kv-eviction-config.budget", "0.5"],
        ["--kv-eviction-config.budget", "use --kv-budget"],
    ),
    "additional config": (["--additional-config.kv_eviction", "snapkv"], ["additional_config.kv_eviction", "snapkv"]),
}  # fmt: skip


@pytest.mark.parametrize("words, expected", MALFORMED.values(), ids=MALFORMED)
def test_malformed_flags_end_in_one_line(words, expected, model, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/vllm", "serve", model, *words])
    with pytest.raises(SystemExit) as end:
        AsyncEngineArgs.from_cli_args(parse("--model", model, *words))
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    # argparse's own lines begin with the parser's name, which is only "vllm" here.
    assert last.startswith(("vllm: error: ", "vllm serve: error: "))
    for word in expected:
        assert word in last


@pytest.mark.parametrize(
    "keywords, word",
    [
        ({"kv_eviction": "nope"}, "--kv-eviction"),
        ({"kv_eviction": "snapkv", "kv_eviction_config": [1]}, "--kv-eviction-config"),
        ({"additional_config": {KEY: {"budget": 0.5}}}, "--kv-eviction POLICY"),
    ],
)
def test_malformed_keywords_raise(keywords, word, model):
    with pytest.raises(KVEvictionError, match=word):
        EngineArgs(model=model, **keywords).create_engine_config()


# As processes.


@pytest.mark.engine
@pytest.mark.parametrize(
    "words, expected",
    [
        (["--kv-eviction", "snapkv", "--kv-budget", "2.5"], "--kv-budget"),
        (["--kv-eviction", "snapkv", "--enable-sleep-mode"], "--enable-sleep-mode"),
    ],
)
def test_serve_says_what_is_wrong_in_one_line(words, expected, model):
    ended = forked_command("vllm", "serve", model, *words)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stdout + ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("vllm serve: error: ") and expected in last
    assert ended.stderr.count("error: ") == 1
