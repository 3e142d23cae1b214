"""What the page of ``inspect`` shows of a prompt is what the engine keeps of it."""

import json

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine.support.inspecting import ASK, BUDGET, LENGTH, TEXT, kept_by, page_of
from tests.engine.support.running import Ask, evicting_engine, metric, run
from tests.engine.support.serving import forked_command
from tests.inspection.pages import read as read_page
from vllm_kvevict.inspect import inspection
from vllm_kvevict.policies import available
from vllm_kvevict.policy_list import PolicySpec

pytestmark = pytest.mark.engine
POLICIES = ["ada-snapkv", "kvzip", "snapkv", "take"]


@pytest.fixture(scope="module")
def llm(models):
    # Several chunks for those that read a prompt in chunks, and several evictions for take.
    eviction = {"policy_params": {"take": {"take_chunk": 64, "take_probe": 16}}}
    with evicting_engine(models("llama"), eviction=eviction, max_num_batched_tokens=128) as llm:
        yield llm


def test_every_policy(llm):
    page = page_of(llm, available())
    assert page["token_ids"] == ASK.prompt and "".join(page["token_texts"]) == TEXT
    assert page["layers"] == [0, 1, 2, 3] and page["kv_heads"] == 2
    answers = run(llm, [Ask(LENGTH, policy, BUDGET, max_tokens=2) for policy in available()])
    assert [policy["policy"] for policy in page["policies"]] == list(available())
    # Positions are those in the prompt, though later evictions choose among what the earlier ones kept.
    assert len(answers[available().index("take")].kept) == 5
    for shown, answer in zip(page["policies"], answers, strict=True):
        kept = kept_by(answer, 4, 2, LENGTH, LENGTH)
        assert shown["kept"] == kept, shown["policy"]
        assert shown["entries_per_head"] == [[len(head) for head in layer] for layer in kept]
        of_budget = LENGTH if shown["policy"] == "full" else BUDGET * LENGTH
        assert shown["entries"] == {"kept": 8 * of_budget, "of": 8 * LENGTH}


def test_what_is_behind_a_prefix_is_kept(llm):
    page = page_of(llm, ["ada-snapkv", "kvzip", "full"], prefix_len=200)
    asks = [Ask(LENGTH, policy, BUDGET, 200, max_tokens=2) for policy in ("ada-snapkv", "kvzip", "full")]
    for shown, answer in zip(page["policies"], run(llm, asks), strict=True):
        assert shown["kept"] == kept_by(answer, 4, 2, 200, LENGTH)
    assert page["evicted_tokens"] == 200
    assert page["policies"][0]["entries"]["kept"] == 8 * (40 + 100)


def test_memory_is_that_of_the_pages(llm):
    for policy in ("ada-snapkv", "snapkv"):
        before = metric(llm, "kv_eviction_freed_pages")
        page = page_of(llm, [policy])
        memory = page["policies"][0]["bytes"]
        # A float32 key and value of 32 numbers each.
        assert page["page_bytes"] == 32 * 2 * 32 * 4 and page["page_size"] == 32
        assert (
            memory["before"] - memory["after"]
            == (metric(llm, "kv_eviction_freed_pages") - before) * page["page_bytes"]
        )
        assert memory["before"] == 8 * 10 * page["page_bytes"]


def test_command(models, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT)
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    flags = ["--policy", "snapkv", "--budget", "48", "--compare", "lava", "snapkv"]
    flags += ["--output", page, "--json", data]
    engine = ["--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", str(2**26)]
    inspect = ["vllm-kvevict", "inspect", models("llama"), "--prompt", prompt]
    engine += ["--kv-eviction-config.window", "16"]
    done = forked_command(*inspect, *flags, *engine, VLLM_CPU_KVCACHE_SPACE="1")
    assert done.returncode == 0, done.stderr
    content = read_page(page.read_text())
    assert content == json.loads(data.read_text())
    assert [policy["policy"] for policy in content["policies"]] == ["snapkv", "lava"]
    for policy, window in zip(content["policies"], (16, 32), strict=True):
        assert policy["entries"]["kept"] == 8 * 48
        always = set.intersection(*(set(head) for layer in policy["kept"] for head in layer))
        assert {*range(LENGTH - window, LENGTH)} <= always
    assert "snapkv keeps 384 of 2,400 entries" in done.stderr
    assert "\n--kv-cache-memory-bytes 67108864 has no effect" in done.stderr


@pytest.mark.parametrize(
    ("chosen", "space", "gets"),
    [
        # Pages of all 512 tokens and of those that kvzip repeats, in 4 layers of 2 KV heads, and vLLM's own block.
        ({}, None, {"kv_cache_memory_bytes": (288 * 32 + 8 * 128) * 2 * 32 * 4}),
        ({}, "1", {}),
        ({"kv_cache_memory_bytes": 1 << 26}, None, {}),
        ({"gpu_memory_utilization": 0.1}, None, {}),
    ],
)
def test_the_user_may_choose_the_memory(chosen, space, gets, models, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    settings = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 128, **chosen}
    settings |= {"kv_eviction": POLICIES[0], "kv_budget": BUDGET, "block_size": inspection.BLOCK}
    settings["kv_eviction_config"] = {"min_prompt": 0, "scope": "prompt", "policies": POLICIES[1:]}
    model = str(models("llama"))
    wanted = inspection.Wanted(model, TEXT, [PolicySpec(policy) for policy in POLICIES], BUDGET)
    config = EngineArgs(model=model, **settings).create_engine_config()
    assert inspection._kv_memory(wanted, settings, config) == gets
