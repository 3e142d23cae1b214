"""A request with parameters keeps what a server that was started with them keeps, on the engine."""

import pytest

from benchmarks.quality import NEEDLE
from tests.engine.support.emulated import emulated_gpu
from tests.engine.support.running import Answer, Ask, evicting_engine, run
from tests.engine.support.serving import ON_REQUEST, ForkedServer
from vllm_kvevict.engine.worker.runtime import get_runtime
from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality.results import RESULTS, Result, read

PARAMETERS = {
    "snapkv": {"window": 16, "kernel": 21, "rows": "max"},
    "lava": {"pooling": "decay", "alpha": 0.3},
    "ada-pyramid": {"beta": 3, "ada_safeguard": "paper"},
    "kvzip": {"window": 16, "sinks": 9, "kernel": 3},
    "take": {"kernel": 1, "gqa": "max"},
}
SETTINGS = {"max_model_len": 1024, "max_num_batched_tokens": 128}


def ask(policy: str, params: str | None = None) -> Ask:
    return Ask(300, policy, 0.2, prefix_len=280, max_tokens=4, params=params)


def written(policy: str) -> str:
    return ",".join(f"{name}={value}" for name, value in PARAMETERS[policy].items())


def same(one: Answer, other: Answer) -> bool:
    return (one.tokens, one.kept) == (other.tokens, other.kept)


@pytest.mark.engine
def test_requests_keep_what_a_server_with_their_parameters_keeps(models):
    """All in one batch, beside requests that give none; the server's own parameters are others where it has some."""
    model = models("llama", layers=3)
    server = {"policy_params": {"snapkv": {"kernel": 3}, "lava": {"kernel": 9}, "take": {"take_chunk": 128}}}
    asks = [ask(policy, params) for policy in PARAMETERS for params in (written(policy), None)]
    with evicting_engine(model, eviction=server, **SETTINGS) as llm:
        by_request = run(llm, asks)
    params = {**PARAMETERS, "take": {**PARAMETERS["take"], "take_chunk": 128}}
    with evicting_engine(model, eviction={"policy_params": params}, **SETTINGS) as llm:
        by_policy = run(llm, [ask(policy) for policy in PARAMETERS])
    for policy, expected, given, plain in zip(
        PARAMETERS, by_policy, by_request[::2], by_request[1::2], strict=True
    ):
        assert expected.kept and same(given, expected), policy
        assert not same(plain, expected), policy
    with evicting_engine(model, eviction={"policy": "snapkv", **PARAMETERS["snapkv"]}, **SETTINGS) as llm:
        assert same(run(llm, [ask("snapkv")])[0], by_request[0])


def _note_windows(worker) -> None:
    """Let the rank remember how many rows its kernel was called with."""
    evictor = get_runtime().rank.evictor
    attend, evictor.called_with = evictor.sources.window_attention, set()

    def noted(query, *others):
        evictor.called_with.add(len(query))
        return attend(query, *others)

    evictor.sources.window_attention = noted


def _noted(worker) -> list[int]:
    return sorted(get_runtime().rank.evictor.called_with)


@pytest.mark.engine
def test_no_kernel_is_compiled_for_a_requests_window(models):
    """On a GPU, where it would take seconds: windows that the server does not know are scored without the kernel."""
    model = models("llama", layers=2)
    asks = [
        Ask(90, "snapkv", 0.5, max_tokens=2, params=params) for params in (None, "window=16", "window=31")
    ]
    with evicting_engine(model) as llm:
        expected = run(llm, asks)
    with emulated_gpu(), evicting_engine(model) as llm:
        llm.collective_rpc(_note_windows)
        answers = run(llm, asks)
        assert llm.collective_rpc(_noted) == [[32]]
    assert [answer.kept for answer in answers] == [answer.kept for answer in expected]
    assert expected[0].kept != expected[1].kept != expected[2].kept


@pytest.mark.engine
def test_one_server_answers_for_a_policy_with_different_parameters(tmp_path, capsys):
    """Replies follow the parameters; what the server refuses ends the run with the server's sentence."""
    with ForkedServer(
        NEEDLE, tmp_path / "server.log", *ON_REQUEST, env={"VLLM_KVEVICT_CHECK": "1"}
    ) as server:
        command = [
            "run",
            "--url",
            f"{server.url}/v1",
            "--tasks",
            "single",
            "--lengths",
            "600",
            "--samples",
            "4",
        ]
        command += ["--budgets", "40", "--output"]
        policies = [
            "snapkv",
            "snapkv:pooling=none,rows=mean",
            "snapkv:window=32,rows=recent",
            "ada-snapkv:alpha=0.5,rows=max",
        ]
        assert quality.main([*command, str(tmp_path / "out"), "--policies", *policies]) == 0
        assert quality.main([*command, str(tmp_path / "no"), "--policies", "kvzip:kvzip_chunk=64"]) == 2
        assert "requests may not choose kvzip" in capsys.readouterr().err
        assert quality.main([*command, str(tmp_path / "no"), "--policies", "knorm:skip_layers=1"]) == 2
        assert "kv_params: skip_layers can be set for the server only" in capsys.readouterr().err
    replies = {policy: {} for policy in policies}
    for result in read(tmp_path / "out" / RESULTS, Result):
        replies[result.policy][result.sample] = result.reply
    assert all(len(found) == 4 for found in replies.values())
    assert (
        replies["snapkv"]
        == replies["snapkv:window=32,rows=recent"]
        != replies["snapkv:pooling=none,rows=mean"]
    )
