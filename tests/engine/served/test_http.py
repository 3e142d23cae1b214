"""A real server and real clients: per-request settings, refusals, and metrics."""

import itertools

import httpx
import pytest

from tests.engine.support.clients import complete, eventually, idle, text_of, words
from tests.engine.support.serving import ForkedServer, log_evictions

pytestmark = pytest.mark.engine

ROWS = 4 * 2  # layers x KV heads of the model
PAGE = 32
BUDGET, INTERVAL = 48, 32
"""Of answers."""


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    flags = ["--kv-eviction", "ada-snapkv", "--kv-budget", "0.2", "--kv-eviction-config.min_prompt", "0"]
    flags += ["--kv-eviction-config.policies", "all", "--max-logprobs", "-1"]
    flags += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    flags += ["--num-gpu-blocks-override", "20", "--enable-prompt-tokens-details"]
    flags += ["--kv-decode-budget", str(BUDGET), "--kv-eviction-config.decode_interval", str(INTERVAL)]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_KVEVICT_CHECK": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with ForkedServer(models("llama"), log, *flags, *log_evictions(log), env=env) as server:
        yield server


# What is done, and what is reported of it.


def gauges_of_one_request(server, client):
    """What the gauges show while one long answer is read, or None if nobody looked before it ended: machines may be so
    busy that a client sees an answer of seconds at once."""
    assert eventually(lambda: idle(server))
    fields = {"kv_eviction": "streaming-llm", "kv_budget": 60, "kv_decode_budget": 0}
    with complete(client, words(300), fields=fields, max_tokens=1500, stream=True) as stream:
        for _ in itertools.islice(stream, 5):
            pass
        # The server counts a step after it has sent the step's tokens.
        return eventually(
            lambda: (read := server.metrics())['logical_kv_tokens{rank="0"}'] > 0 and read, patience=1.0
        )


def test_gauges_show_what_a_running_request_holds(server, client):
    complete(client, words(40))  # before the first request a server has no gauges
    numbers = eventually(lambda: gauges_of_one_request(server, client), patience=120.0)
    names = ("logical_kv_tokens", "physical_pages", "cached_pages", "cached_uncompressed_pages")
    entries, pages, *cached = (numbers[f'{name}{{rank="0"}}'] for name in names)
    assert entries % ROWS == 0 and entries / ROWS >= 60 + 4
    assert pages - sum(cached) == ROWS * -(-entries / ROWS // PAGE)
    # The client went away: so do the pages.
    assert eventually(lambda: idle(server))


def test_a_client_that_goes_away_during_prefill_and_decode(server, client):
    for events in (0, 1, 3):
        streams = [complete(client, words(900, seed), max_tokens=1000, stream=True) for seed in range(4)]
        for stream in streams:
            for _ in itertools.islice(stream, events):
                pass
            stream.close()
        assert eventually(lambda: idle(server))


def test_long_answers(server, client):
    """Evicted as often as their length says; the same as a whole one up to the first time, and not always after it."""
    before, length, same = server.snapshot().evictions, 200, BUDGET + INTERVAL
    logged = len(server.evictions)
    whole, short = (
        text_of(client, words(100), tokens, {"kv_eviction": "full", "kv_decode_budget": budget}).split()
        for tokens, budget in ((length, 0), (same, BUDGET))
    )
    assert server.snapshot().evictions == before
    evicted = text_of(client, words(100), length, {"kv_eviction": "full"}).split()
    # The last token of an answer is not stored.
    times = (length - 1 - BUDGET) // INTERVAL
    assert eventually(lambda: server.snapshot().evictions == before + times)
    assert {one["phase"] for one in server.evictions[logged:]} == {"decode"}
    assert len(whole) == len(evicted) == length and len(short) == same
    assert evicted[:same] == whole[:same] == short and evicted != whole
    assert eventually(lambda: idle(server))


# Settings of single requests.


def test_fields_are_followed(server, client):
    answer = complete(
        client, words(500), fields={"kv_eviction": "snapkv", "kv_budget": 64, "kv_prefix_len": 400}
    )
    (line,) = eventually(lambda: [one for one in server.evictions if one["request"].startswith(answer.id)])
    assert (line["tokens"], line["policy"]) == (400, "snapkv")
    assert (line["kept"], line["stored"]) == (ROWS * 64, ROWS * 400)
    assert line["heads"] == [[64, 64]] * 4


def test_usage_tells_what_was_cached_and_a_reset_empties_it(server, client):
    """Salts keep users apart."""
    cached = []
    for salt in ("one", "other", "one", "other"):
        fields = {"kv_prefix_len": 250, "kv_budget": 0.3}
        extra = {"vllm_xargs": fields, "cache_salt": salt}
        answer = client.completions.create(
            model=server.model, prompt=words(280, seed=5), max_tokens=3, temperature=0, extra_body=extra
        )
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert cached == [0, 0, 250, 250]
    assert eventually(lambda: server.metrics()["cached_entries"] >= 2)
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
    assert eventually(lambda: server.metrics()['physical_pages{rank="0"}'] == 0)
    assert server.metrics()["cached_entries"] == server.metrics()['cached_pages{rank="0"}'] == 0


MESSAGES = {"messages": [{"role": "user", "content": words(50)}], "max_tokens": 4}
BODIES = {
    "completions": {"prompt": words(50), "max_tokens": 4},
    "chat/completions": MESSAGES,
    "messages": MESSAGES,
    "responses": {"input": words(50), "max_output_tokens": 4},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_bad_fields_get_400(path, stream, server):
    """Before a stream begins; all that may be bad is in the front-end's tests."""
    body = {"model": server.model, **BODIES[path], "stream": stream}
    for fields, sentence in (
        ({"vllm_xargs": {"kv_budget": 2.5}}, "kv_budget"),
        ({"vllm_xargs": {"kv_budget": True}}, "kv_budget must not be true or false"),
        ({"kv_budget": 0.5}, "kv_budget is a field of vllm_xargs, not of the request itself"),
    ):
        answer = httpx.post(f"{server.url}/v1/{path}", json=body | fields, timeout=60)
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["message"].startswith(sentence)
    assert httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60).status_code == 200


def test_parameters_of_requests_have_no_series_of_their_own(server, client):
    """They change the answer, and count as the policy's."""
    before = server.metrics()
    texts = [
        text_of(client, words(700), fields={"kv_eviction": "lava", **fields}, max_tokens=40)
        for fields in ({}, {"kv_params": "window=8,kernel=1"}, {"kv_params": "kernel=1.0,window=8"})
    ]
    assert texts[0] != texts[1] == texts[2]
    name = 'evictions_total{policy="lava"}'
    assert eventually(lambda: server.metrics()[name] - before[name] == 3)
    assert not [name for name in server.metrics() if "kernel" in name or "window=" in name]


# Together with vLLM's other features.


@pytest.mark.parametrize("way", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}], ids=" ".join)
def test_logprobs_of_the_prompt_are_those_of_the_whole_prompt(client, way):
    """What the page on measuring quality warns of."""

    def logprobs(fields):
        choice = complete(client, words(300), fields=fields, extra_body=way).choices[0]
        if "echo" in way:
            return choice.logprobs.token_logprobs[1:300]
        return [next(iter(row.values()))["logprob"] for row in choice.model_extra["prompt_logprobs"][1:]]

    expected = logprobs({"kv_eviction": "full"})
    assert len(expected) == 299
    assert logprobs({}) == pytest.approx(expected, abs=1e-4)
    # Rows behind the prefix see its evicted form.
    prefix = logprobs({"kv_prefix_len": 200})
    assert prefix[:199] == pytest.approx(expected[:199], abs=1e-4)
    assert prefix[200:] != pytest.approx(expected[200:], abs=1e-2)
