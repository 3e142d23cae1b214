"""A request with parameters keeps what a server that was started with them keeps, on the engine."""

import pytest

from tests.engine.support.running import Answer, Ask, evicting_engine, run

PARAMETERS = {
    "snapkv": {"window": 16, "kernel": 21, "rows": "max"},
    "lava": {"pooling": "decay", "alpha": 0.3},
    "ada-pyramid": {"beta": 3, "ada_safeguard": "guarantee"},
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
