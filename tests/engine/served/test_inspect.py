"""What the page of ``inspect`` shows of a prompt is what the engine keeps of it."""

import dataclasses
import json
import os
import re
import sys

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.documents import ROOT, commands
from tests.engine.support.inspecting import ASK, BUDGET, LENGTH, TEXT, kept_by, page_of
from tests.engine.support.running import Ask, evicting_engine, run
from tests.engine.support.serving import command, forked_command
from tests.inspection.pages import read as read_page
from vllm_kvevict.chats import Chat
from vllm_kvevict.engine import inspection
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.inspect.page import render
from vllm_kvevict.policies import available
from vllm_kvevict.policy_list import Entry

pytestmark = pytest.mark.engine
POLICIES = ["ada-snapkv", "kvzip", "snapkv", "take"]


@pytest.fixture(scope="module")
def llm(models):
    # Several chunks for those that read a prompt in chunks.
    with evicting_engine(models("llama"), max_num_batched_tokens=128) as llm:
        yield llm


def test_every_policy(llm):
    page = page_of(llm, available())
    assert page["token_ids"] == ASK.prompt and "".join(page["token_texts"]) == TEXT
    assert page["layers"] == [0, 1, 2, 3] and page["kv_heads"] == 2
    answers = run(llm, [Ask(LENGTH, policy, BUDGET, max_tokens=2) for policy in available()])
    assert [policy["policy"] for policy in page["policies"]] == list(available())
    for shown, answer in zip(page["policies"], answers, strict=True):
        kept = kept_by(answer, 4, 2, LENGTH, LENGTH)
        assert shown["kept"] == kept, shown["policy"]
        assert shown["entries_per_head"] == [[len(head) for head in layer] for layer in kept]
        of_budget = LENGTH if shown["policy"] == "full" else BUDGET * LENGTH
        assert shown["entries"] == {"kept": 8 * of_budget, "of": 8 * LENGTH}


def test_another_budget_is_another_page(llm):
    """A control: what was kept is not the same whatever is asked for."""
    pages = [page_of(llm, available(), budget) for budget in (BUDGET, 0.3)]
    for one, other in zip(*(page["policies"] for page in pages), strict=True):
        assert (one["kept"] != other["kept"]) == (one["policy"] != "full")


def test_what_is_behind_a_prefix_is_kept(llm):
    page = page_of(llm, ["ada-snapkv", "kvzip", "full"], prefix_len=200)
    asks = [Ask(LENGTH, policy, BUDGET, 200, max_tokens=2) for policy in ("ada-snapkv", "kvzip", "full")]
    for shown, answer in zip(page["policies"], run(llm, asks), strict=True):
        assert shown["kept"] == kept_by(answer, 4, 2, 200, LENGTH)
    assert page["evicted_tokens"] == 200
    assert page["policies"][0]["entries"]["kept"] == 8 * (40 + 100)


def test_a_prompt_that_is_hard_to_show(llm):
    """Its words are in the tokenizer's vocabulary; what is not of it stands between them."""
    hostile = "</script>\r\n<b>\0 & \\ \U0001f600 \u202e \u05e9\u05dc\u05d5\u05dd \ufeff\r"
    text = hostile.join(TEXT.split()[:100])
    wanted = inspection.Wanted("tiny", text, [Entry("snapkv")], BUDGET)
    page = read_page(render(inspection.read(llm, wanted)))
    assert "".join(page["token_texts"]) == text


def freed_pages(llm):
    name = "vllm:kv_eviction_freed_pages"
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def test_memory_is_that_of_the_pages(llm):
    for policy in ("ada-snapkv", "snapkv"):
        before = freed_pages(llm)
        page = page_of(llm, [policy])
        memory = page["policies"][0]["bytes"]
        # A float32 key and value of 32 numbers each.
        assert page["page_bytes"] == 32 * 2 * 32 * 4 and page["page_size"] == 32
        assert memory["before"] - memory["after"] == (freed_pages(llm) - before) * page["page_bytes"]
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


def test_a_policy_with_parameters_is_that_of_a_server_with_them(models, tmp_path):
    prompt, data = tmp_path / "prompt.txt", tmp_path / "data.json"
    prompt.write_text(TEXT)

    def shown(*words):
        flags = ["--budget", str(BUDGET), *words, "--output", tmp_path / "page.html", "--json", data]
        engine = ["--dtype", "float32", "--max-model-len", "512"]
        inspect = ["vllm-kvevict", "inspect", models("llama"), "--prompt", prompt]
        done = forked_command(*inspect, *flags, *engine, "--kv-eviction-config.page_size", "64")
        assert done.returncode == 0, done.stderr
        content = json.loads(data.read_text())
        assert content["page_size"] == 64  # in every engine
        return {policy["policy"]: policy["kept"] for policy in content["policies"]}

    # A parameter of the first policy belongs to none of the others.
    wide = "snapkv:window=16,kernel=31@wide"
    several = shown("--compare", wide, "snapkv", "--kv-eviction-config.alpha", "0.5")
    assert list(several) == ["ada-snapkv", wide, "snapkv"]
    parameters = ["--kv-eviction-config.window", "16", "--kv-eviction-config.kernel", "31"]
    alone = shown("--policy", "snapkv", *parameters)["snapkv"]
    assert several[wide] == alone != several["snapkv"]


def test_the_engine_takes_the_memory_that_it_needs(llm, models, tmp_path):
    """Not nearly all of the machine's, in the words of README, where a user's environment has nothing to say of it;
    the page is the same."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT)
    (line,) = (line for line in commands(ROOT / "README.md") if line[:2] == ["vllm-kvevict", "inspect"])
    line = [{"MODEL": models("llama"), "FILE": prompt}.get(word, word) for word in line[1:]]
    kept = ["PATH", "HOME", "HF_HUB_OFFLINE", "VLLM_CPU_OMP_THREADS_BIND"]
    bare = ["env", "-i", *(f"{name}={os.environ[name]}" for name in kept if name in os.environ)]
    program = [f"PYTHONPATH={ROOT}", "VLLM_LOGGING_LEVEL=INFO", sys.executable, "-m", "vllm_kvevict"]
    out = ["--output", tmp_path / "page.html", "--dtype", "float32"]
    done = command(*bare, *program, *line, *out)
    assert done.returncode == 0, done.stderr
    gibibytes = re.search(r"Explicitly set \(([\d.]+)/", done.stdout + done.stderr)
    assert gibibytes is not None and float(gibibytes[1]) < 0.1
    policies = read_page((tmp_path / "page.html").read_text())["policies"]
    assert policies == page_of(llm, ["ada-snapkv", "lava"])["policies"]


@pytest.fixture
def no_choice(monkeypatch):
    """Nobody has chosen how much memory there is."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def wanted_of(model, text=TEXT, policies=("ada-snapkv", "lava"), **how):
    return inspection.Wanted(str(model), text, [Entry(policy) for policy in policies], BUDGET, **how)


def test_what_is_too_long_is_refused_before_an_engine_starts(models, no_choice, monkeypatch):
    monkeypatch.setattr(inspection, "LLM", None)
    says = f"the prompt's {LENGTH} tokens and one of an answer exceed the {LENGTH} tokens of --max-model-len: shorten"
    with pytest.raises(KVEvictionError, match=says):
        inspection.inspect(wanted_of(models("llama"), arguments={"max_model_len": LENGTH}))
    chat = Chat([{"role": role, "content": f"{role} {TEXT}"} for role in ("user", "assistant", "user")])
    with pytest.raises(
        ValueError, match=r"the chat cannot be rendered: .* maximum context length is 400 tokens"
    ):
        inspection.inspect(wanted_of(models("llama"), "", chats=[chat], arguments={"max_model_len": 400}))
    # A control: one that fits gets as far as the engine.
    with pytest.raises(RuntimeError, match="'NoneType' object is not callable"):
        inspection.inspect(wanted_of(models("llama"), arguments={"max_model_len": LENGTH + 1}))


def memory(wanted, **settings):
    """What the engine is given."""
    ours = {"kv_eviction": str(wanted.policies[0]), "kv_budget": BUDGET, "block_size": inspection.BLOCK}
    settings = {"dtype": "float32", "max_model_len": 512, **ours, **settings}
    config = EngineArgs(model=wanted.model, **settings).create_engine_config()
    return inspection._kv_memory(wanted, settings, config)


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
def test_the_user_may_choose_the_memory(chosen, space, gets, models, no_choice, monkeypatch):
    if space is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    config = {"min_prompt": 0, "scope": "prompt", "policies": POLICIES[1:]}
    wanted = wanted_of(models("llama"), policies=POLICIES)
    assert memory(wanted, kv_eviction_config=config, max_num_batched_tokens=128, **chosen) == gets


def test_who_is_evicted_turn_by_turn_gets_memory_for_all_of_it(models, no_choice):
    """Not layer by layer, though one step may read it."""
    wanted = wanted_of(models("llama"), policies=["snapkv"])
    settings = {"kv_eviction_config": {"min_prompt": 0}, "max_num_batched_tokens": 512}
    in_turns = memory(dataclasses.replace(wanted, turns=(100,)), **settings)
    as_one = memory(wanted, **settings)
    whole = 8 * (512 + 128) * 2 * 32 * 4
    assert as_one["kv_cache_memory_bytes"] < in_turns["kv_cache_memory_bytes"] == whole
