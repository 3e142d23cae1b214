"""A real server and real clients: every endpoint, per-request settings, refusals, metrics, and a soak."""

import asyncio
import itertools
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.engine.support.clients import (
    ENDPOINTS,
    complete,
    eventually,
    idle,
    text_of,
    words,
)
from tests.engine.support.serving import ForkedServer, log_evictions
from vllm_kvevict.engine.config import REQUEST_FIELDS
from vllm_kvevict.policies import available

pytestmark = pytest.mark.engine

ROWS = 4 * 2  # layers x KV heads of the model
PAGE = 32
EVICTING = [policy for policy in available() if policy != "full"]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    flags = ["--kv-eviction", "ada-snapkv", "--kv-budget", "0.2", "--kv-eviction-config.min_prompt", "0"]
    flags += ["--kv-eviction-config.policies", "all", "--max-logprobs", "-1"]
    flags += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    # So few blocks of 128 tokens that requests of the soak have to wait for pages.
    flags += ["--num-gpu-blocks-override", "20", "--enable-prompt-tokens-details"]
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_KVEVICT_CHECK": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_LOG_STATS_INTERVAL": "1",
    }
    log = tmp_path_factory.mktemp("server") / "log"
    with ForkedServer(models("llama"), log, *flags, *log_evictions(log), env=env) as server:
        yield server


# What is done, and what is reported of it.


def test_start_up_and_request_lines(server, client):
    line = re.search(r"KV eviction: policy ada-snapkv, budget 0.2, .*", server.log)
    assert "page size 32 tokens" in line[0] and "(rank 0: 640)" in line[0]
    answer = complete(client, words(300), fields={"kv_eviction": "streaming-llm"})
    line = eventually(lambda: re.search(rf"DEBUG.*KV eviction: request {answer.id}.*", server.log))
    assert "at 300 tokens by streaming-llm: kept 480/2400 entries, freed 64 pages" in line[0]
    assert line[0].endswith("; ".join(f"layer {layer}: 120/600 (60 60)" for layer in range(4)))
    assert eventually(
        lambda: re.search(r"INFO.*evictions=\d+, mean kept ratio=0.2, freed pages=64", server.log)
    )


def test_metrics_are_exact(server, client):
    before = server.metrics()
    complete(client, words(300), fields={"kv_eviction": "streaming-llm", "kv_budget": 0.25})
    complete(client, words(200), fields={"kv_eviction": "streaming-llm", "kv_budget": 40})
    complete(client, words(250), fields={"kv_eviction": "full"})
    complete(client, words(250), fields={"kv_budget": 1.0})
    complete(client, words(40), fields={"kv_budget": 40})

    def difference(name):
        return server.metrics().get(name, 0.0) - before.get(name, 0.0)

    assert eventually(lambda: difference("kept_ratio_count") == 2)
    evicted = ROWS * (300 - 75 + 200 - 40)
    freed = ROWS * sum(-(-n // PAGE) - -(-kept // PAGE) for n, kept in ((300, 75), (200, 40)))
    assert difference("evicted_tokens_total") == evicted
    assert difference("freed_pages_total") == freed > 0
    assert difference('evictions_total{policy="streaming-llm"}') == 2
    assert sum(difference(f'evictions_total{{policy="{policy}"}}') for policy in available()) == 2
    assert difference("kept_ratio_sum") == pytest.approx(0.25 + 0.2)
    for name in ("decision_seconds", "compaction_seconds"):
        assert difference(f"{name}_count") == 2
        assert 0 < difference(f"{name}_sum") < 60
    assert eventually(lambda: idle(server))


def gauges_of_one_request(server, client):
    """What the gauges show while one long answer is read, or None if nobody looked before it ended: machines may be so
    busy that a client sees an answer of seconds at once."""
    assert eventually(lambda: idle(server))
    fields = {"kv_eviction": "streaming-llm", "kv_budget": 60}
    with complete(client, words(300), fields=fields, max_tokens=1500, stream=True) as stream:
        for _ in itertools.islice(stream, 5):
            pass
        # The server counts a step after it has sent the step's tokens.
        return eventually(
            lambda: (read := server.metrics())['logical_kv_tokens{rank="0"}'] > 0 and read, patience=1.0
        )


def test_gauges_show_what_a_running_request_holds(server, client):
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


def test_every_evicting_policy_has_its_series(server):
    names = server.metrics()
    for policy in EVICTING:
        assert f'evictions_total{{policy="{policy}"}}' in names


# Settings of single requests.


def test_budgets_matter_and_full_means_everything(client):
    prompt = words(600)
    full = text_of(client, prompt, 32, {"kv_eviction": "full"})
    assert text_of(client, prompt, 32, {"kv_budget": 1.0}) == full
    assert text_of(client, prompt, 32, {"kv_budget": 600}) == full
    evicted = text_of(client, prompt, 32)
    assert evicted != full
    assert text_of(client, prompt, 32, {"kv_budget": 0.2}) == evicted
    assert text_of(client, prompt, 32, {"kv_budget": 120}) == evicted
    assert text_of(client, prompt, 32, {"kv_budget": 120.0}) == evicted
    assert text_of(client, prompt, 32, {"kv_budget": "0.2"}) == evicted
    assert text_of(client, prompt, 32, {"kv_eviction": "ada-snapkv"}) == evicted
    assert text_of(client, prompt, 32, {"kv_prefix_len": 600}) == evicted


def test_fields_are_followed(server, client):
    answer = complete(
        client, words(500), fields={"kv_eviction": "snapkv", "kv_budget": 64, "kv_prefix_len": 400}
    )
    (line,) = eventually(lambda: [one for one in server.evictions if one["request"].startswith(answer.id)])
    assert (line["tokens"], line["policy"]) == (400, "snapkv")
    assert (line["kept"], line["stored"]) == (ROWS * 64, ROWS * 400)
    assert line["heads"] == [[64, 64]] * 4


def test_turns_are_evicted_one_by_one(server, client):
    answer = complete(client, words(500), fields={"kv_turns": [150, 250, 400], "kv_budget": 0.25})

    def lines() -> list[dict]:
        return [line for line in server.evictions if line["request"].startswith(answer.id)]

    assert eventually(lambda: len(lines()) == 3)
    told = [(line["tokens"], line["kept"], line["stored"], line["phase"]) for line in lines()]
    # A quarter of each, rounded down: 37, 25 and 37 tokens.
    expected = [(150, 37, 150), (250, 62, 37 + 100), (400, 99, 62 + 150)]
    assert told == [(end, ROWS * kept, ROWS * stored, "prefill") for end, kept, stored in expected]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_endpoints(endpoint, server, client):
    full = endpoint(client, {"kv_eviction": "full"})
    assert endpoint(client, {"kv_eviction": "full"}, stream=True) == full != ""
    before, hits = server.metrics(), prefix_hits(server)
    fields = {"kv_eviction": "snapkv", "kv_budget": 64, "kv_prefix_len": 300}
    evicted = endpoint(client, fields)
    assert endpoint(client, fields, stream=True) == evicted != full

    def is_accounted_for() -> bool:
        """Each was evicted, and found whole blocks; or began with what another one had kept of the same 300 tokens."""
        name = 'evictions_total{policy="snapkv"}'
        evictions = server.metrics()[name] - before[name]
        blocks, rest = divmod(prefix_hits(server) - hits - 300 * (2 - evictions), 128)
        return evictions <= 1 and 0 <= blocks <= 2 * evictions and rest == 0

    assert eventually(is_accounted_for)


def prefix_hits(server) -> float:
    """Prompt tokens that were found in the prefix cache."""
    return float(
        re.search(r"^vllm:prefix_cache_hits_total.* (\S+)$", httpx.get(f"{server.url}/metrics").text, re.M)[1]
    )


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


@pytest.fixture
def change_weights(server, models):
    """Gives the server the weights of another seed; it has its own again afterwards."""

    def change(seed: int | None) -> None:
        path = models("llama") if seed is None else models("llama", seed=seed)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        httpx.post(f"{server.url}/collective_rpc", json=body).raise_for_status()

    yield change
    change(None)
    httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("fields", [{"kv_prefix_len": 250}, {}, {"kv_eviction": "full"}], ids=str)
def test_new_weights_answer_nobody_from_what_was_cached(server, client, change_weights, mode, fields):
    def ask(salt: str) -> tuple[str, bool]:
        """The answer, and whether the prompt's beginning was cached."""
        answer = complete(client, words(300, seed=6), fields=fields, extra_body={"cache_salt": salt})
        return answer.choices[0].text, bool(answer.usage.prompt_tokens_details.cached_tokens)

    before = [ask(mode) for _ in range(2)]
    httpx.post(f"{server.url}/pause", params={"mode": mode}).raise_for_status()
    change_weights(1)
    for path in ("reset_prefix_cache", "resume"):
        httpx.post(f"{server.url}/{path}").raise_for_status()
    after = [ask(mode) for _ in range(2)]
    alone, _ = ask(f"{mode} alone")
    assert alone != before[0][0] == before[1][0]
    assert after == [(alone, False), (alone, True)] and before[1][1]


BAD = [
    ({"kv_eviction": "nope"}, "kv_eviction"),
    ({"kv_eviction": 3}, "kv_eviction"),
    ({"kv_eviction": ["snapkv"]}, "kv_eviction"),
    ({"kv_budget": 0}, "kv_budget"),
    ({"kv_budget": 2.5}, "kv_budget"),
    ({"kv_budget": -1}, "kv_budget"),
    ({"kv_budget": "much"}, "kv_budget"),
    ({"kv_budget": "nan"}, "kv_budget"),
    ({"kv_budget": [0.5]}, "kv_budget"),
    ({"kv_budget": 32}, "kv_budget"),  # no more than the window
    ({"kv_params": "kernel=4"}, "kernel must be an odd integer"),
    ({"kv_params": "kernel=3, alpha=0.2"}, "kv_params: ' alpha=0.2' is not NAME=VALUE"),
    ({"kv_params": "sinks=4"}, "requests may set for policy ada-snapkv: window, kernel"),
    ({"kv_params": "tp_local=1"}, "tp_local can be set for the server only"),
    ({"kv_params": "window=65"}, "window must be at most 64"),
    ({"kv_params": 3}, "kv_params"),
    ({"kv_params": ["kernel=3"]}, "kv_params"),
    ({"kv_eviction": "full", "kv_params": "kernel=3"}, "kv_params: kernel is not a parameter of policy full"),
    ({"kv_prefix_len": 0}, "kv_prefix_len"),
    ({"kv_prefix_len": -5}, "kv_prefix_len"),
    ({"kv_prefix_len": 1.5}, "kv_prefix_len"),
    ({"kv_prefix_len": "10"}, "kv_prefix_len"),
    ({"kv_prefix_len": 1500}, "kv_prefix_len"),
    ({"kv_turns": 100}, "kv_turns"),
    ({"kv_turns": [120, 100]}, "strictly ascending"),
    ({"kv_turns": [100, 1500]}, "kv_turns"),
    ({"kv_turns": [True, 100]}, "kv_turns must not be true or false"),
    ({"kv_turns": [100], "kv_budget": 64}, "a share of the tokens"),
    ({"kv_evictions": "snapkv"}, "kv_evictions"),
    ({"kv_window": 16}, "kv_window"),
    ({"kv_repeat_rows": [7, 8]}, "kv_repeat_rows"),  # the front-end's own
    ({"kv_decode_budget": 64}, "--kv-decode-budget"),  # this server does not evict answers
    ({"kv_repeat_rows": "[[7], [8], [9]]"}, "kv_repeat_rows"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_bad_fields_get_400(endpoint, stream, client):
    for fields, named in BAD:
        with pytest.raises(openai.BadRequestError) as error:
            endpoint(client, fields, stream)
        assert error.value.status_code == 400
        assert error.value.message.count(named) and "Traceback" not in error.value.message
    assert endpoint(client, {"kv_eviction": "full"})


MISTAKEN = [
    *[({"vllm_xargs": {name: True}}, f"{name} must not be true or false") for name in REQUEST_FIELDS],
    *[
        ({name: 0.5}, f"{name} is a field of vllm_xargs, not of the request itself")
        for name in REQUEST_FIELDS
    ],
]


MESSAGES = {"messages": [{"role": "user", "content": words(50)}], "max_tokens": 4}
BODIES = {
    "completions": {"prompt": words(50), "max_tokens": 4},
    "chat/completions": MESSAGES,
    "messages": MESSAGES,
    "responses": {"input": words(50), "max_output_tokens": 4},
}


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_vllm_would_drop_or_misread_get_400(path, server):
    body = {"model": server.model, **BODIES[path]}
    for fields, sentence in MISTAKEN:
        answer = httpx.post(f"{server.url}/v1/{path}", json=body | fields, timeout=60)
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["message"].startswith(sentence)
    assert httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", "{}", '{"a": 1}', "1e999"])
def test_values_that_clients_cannot_send_properly(value, server):
    body = (
        f'{{"model": {json.dumps(server.model)}, "prompt": "w1 w2", "vllm_xargs": {{"kv_budget": {value}}}}}'
    )
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert "kv_budget" in answer.json()["error"]["message"]


def test_beam_search_gets_400(client):
    model = client.models.list().data[0].id
    beams = {"n": 2, "max_tokens": 4, "extra_body": {"use_beam_search": True}}
    with pytest.raises(openai.BadRequestError, match="beam search cannot be used with --kv-eviction"):
        client.completions.create(model=model, prompt=words(50), **beams)
    with pytest.raises(openai.BadRequestError, match="beam search cannot be used with --kv-eviction"):
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": words(50)}], **beams
        )


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


def test_several_answers_to_one_prompt(server, client):
    before = server.metrics()
    answer = complete(client, words(300), n=3, temperature=1.0, seed=1)
    assert len({choice.text for choice in answer.choices}) == 3
    name = 'evictions_total{policy="ada-snapkv"}'
    assert eventually(lambda: server.metrics()[name] - before[name] == 3)


def test_several_prompts_in_one_request(client):
    prompts = [words(300, seed) for seed in range(3)]
    answer = complete(client, prompts)
    assert [choice.text for choice in answer.choices] == [text_of(client, prompt) for prompt in prompts]


def test_logprobs(client):
    answer = complete(client, words(300), logprobs=2)
    full = complete(client, words(300), logprobs=2, fields={"kv_eviction": "full"})
    assert len(answer.choices[0].logprobs.token_logprobs) == 12
    # The first token is chosen before anything is evicted.
    first, first_full = (a.choices[0].logprobs.token_logprobs[0] for a in (answer, full))
    assert first == pytest.approx(first_full, abs=1e-4)
    assert answer.choices[0].logprobs.token_logprobs[1:] != full.choices[0].logprobs.token_logprobs[1:]


def test_logprobs_of_the_prompt_are_those_of_the_whole_prompt(client):
    def logprobs(fields):
        answer = complete(client, words(300), fields=fields, extra_body={"prompt_logprobs": 0})
        rows = answer.choices[0].model_extra["prompt_logprobs"]
        return [next(iter(row.values()))["logprob"] for row in rows[1:]]

    expected = logprobs({"kv_eviction": "full"})
    assert len(expected) == 299
    assert logprobs({}) == pytest.approx(expected, abs=1e-4)
    # Rows behind the prefix see its evicted form.
    prefix = logprobs({"kv_prefix_len": 200})
    assert prefix[:199] == pytest.approx(expected[:199], abs=1e-4)
    assert prefix[200:] != pytest.approx(expected[200:], abs=1e-2)


# Every word is a token, and no grammar here leaves a prefix that no token continues.
@pytest.mark.parametrize("constraint", [{"regex": "w6(w7|w8)+"}, {"choice": ["w6w7w6", "w8w9"]}])
def test_structured_output(constraint, client):
    answer = complete(
        client, words(300), 8, extra_body={"structured_outputs": constraint, "ignore_eos": False}
    )
    text = answer.choices[0].text.replace(" ", "")  # words are joined with spaces
    assert re.fullmatch(constraint.get("regex") or "|".join(constraint["choice"]), text)


def test_policies_share_a_batch(server, client):
    asks = [*zip(EVICTING, itertools.cycle([0.2, 0.5, 100]), strict=False), *[("full", 0.2)] * 3]
    prompts = [words(200 + 7 * index, index) for index in range(len(asks))]

    def ask(index):
        policy, budget = asks[index]
        return text_of(client, prompts[index], 24, {"kv_eviction": policy, "kv_budget": budget})

    alone = [ask(index) for index in range(len(asks))]
    with ThreadPoolExecutor(len(asks)) as threads:
        assert list(threads.map(ask, range(len(asks)))) == alone
    assert eventually(lambda: idle(server))


# Soak.


def test_soak(server):
    """200 random requests, some of them broken off, in a pool too small for all: nothing is lost, nothing breaks."""
    chooser = random.Random(7)
    kinds = [
        {
            "prompt": words(chooser.randrange(1, 300), seed),
            "max_tokens": chooser.randrange(1, 100),
            "vllm_xargs": {
                "kv_eviction": chooser.choice(available()),
                "kv_budget": chooser.choice([0.1, 0.2, 0.5, 1.0, 64, 100]),
            },
        }
        for seed in range(40)
    ]
    log_before = len(server.log)
    answers: dict[int, set[str]] = {}

    async def ask(client, slots, kind, events):
        body = {"model": server.model, "temperature": 0, "ignore_eos": True, "stream": True, **kinds[kind]}
        async with slots, client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            text = ""
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event
                    text += event["choices"][0]["text"]
                    events -= 1
                    if events == 0:
                        return
        answers.setdefault(kind, set()).add(text)

    async def soak():
        slots = asyncio.Semaphore(24)
        limits = httpx.Limits(max_connections=24)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            await asyncio.gather(
                *(ask(client, slots, chooser.randrange(40), chooser.choice([0, 0, 1, 5])) for _ in range(200))
            )

    asyncio.run(soak())
    assert eventually(lambda: idle(server))
    assert len(answers) > 20
    assert [kind for kind, texts in answers.items() if len(texts) > 1] == []
    log = server.log[log_before:]
    assert [line for line in log.splitlines() if "ERROR" in line or "Traceback" in line] == []
    assert httpx.get(f"{server.url}/health").status_code == 200
