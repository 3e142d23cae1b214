"""Pages of engines with several ranks, with several evictions, with other layers; and what ``inspect`` refuses."""

import itertools

import pytest

from tests.engine.served.test_inspect_turns import SAID, chat, kept_on_a_server
from tests.engine.support.inspecting import BUDGET, LENGTH, TEXT, kept_by, page_of
from tests.engine.support.running import Ask, evicting_engine, run
from vllm_kvevict.chats import ChatRequest
from vllm_kvevict.inspect.__main__ import main

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_together_keep_what_one_does(models, layout):
    """Heads of tensor ranks and layers of stages lie where they belong; decided in a later step, where stages ask."""
    policies = ("snapkv", "streaming-llm", "lava", "kvzip")
    with evicting_engine(models("llama")) as llm:
        alone = page_of(llm, policies)
    with evicting_engine(models("llama"), **{layout: 2}) as parallel:
        page = page_of(parallel, policies)
    for one, other in zip(alone["policies"], page["policies"], strict=True):
        assert one["entries"] == other["entries"]
        pairs = zip(itertools.chain(*one["kept"]), itertools.chain(*other["kept"]), strict=True)
        assert all(len({*here} ^ {*there}) <= 4 for here, there in pairs), one["policy"]
    assert alone["layers"] == page["layers"]


def test_a_prompt_whose_answer_has_begun(models):
    """The answer's tokens choose, and are not shown as the prompt's; who cannot wait for them does not."""
    policies, ahead = ["snapkv", "kvzip", "h2o", "full"], 8
    with evicting_engine(models("llama"), eviction={"policy": "snapkv", "lookahead": ahead}) as llm:
        page = page_of(llm, policies)
        answers = run(llm, [Ask(LENGTH, policy, BUDGET, max_tokens=ahead + 2) for policy in policies])
    for shown, answer, later in zip(page["policies"], answers, (True, True, False, False), strict=True):
        kept = kept_by(answer, 4, 2, LENGTH, LENGTH)
        written = list(range(LENGTH, LENGTH + ahead))
        assert later == all(head[-ahead:] == written for layer in kept for head in layer)
        assert shown["kept"] == [[[x for x in head if x < LENGTH] for head in layer] for layer in kept]
    assert page["answer"] == " ".join(f"w{token}" for token in answers[0].tokens[:ahead])
    assert page["policies"][0]["entries"]["kept"] == 8 * BUDGET * LENGTH


def test_a_first_part_that_stays_whole(models) -> None:
    options = {"min_turn": 32, "scope": "turns", "keep_first": True}
    with evicting_engine(models("llama"), eviction=options, max_num_batched_tokens=128) as llm:
        for policy in ("ada-snapkv", "kvzip"):
            page = page_of(llm, [policy], chats=[ChatRequest(chat(*SAID[:3]))])
            kept, _ = kept_on_a_server(llm, chat(*SAID[:3]), policy)
            first, end = page["turns"][0], page["turns"][-1]
            shown = page["policies"][0]
            assert [[[x for x in head if x < end] for head in layer] for layer in shown["kept"]] == kept
            assert all(head[:first] == list(range(first)) for layer in kept for head in layer)
            assert shown["entries_per_turn"][1] < 8 * (end - first) // 2
        # Nothing behind it yet.
        page = page_of(llm, ["snapkv"], chats=[ChatRequest(chat(SAID[0]))])
        assert len(page["turns"]) == 1 and page["policies"][0]["entries_per_turn"][0] == 8 * page["turns"][0]


def test_what_was_cached_is_seen_all_the_same(models):
    """Who begins with what others have left is not evicted again."""
    with evicting_engine(models("llama"), eviction={"min_turn": 32}, enable_prefix_caching=True) as llm:
        first, again = (page_of(llm, ["ada-snapkv"], turns=(96, 200)) for _ in range(2))
        assert first == again
        # The control: of two requests without a look in between, the second is evicted nowhere.
        ask = Ask(LENGTH, "snapkv", BUDGET, turns=(96, 200), max_tokens=2)
        assert [len(answer.kept) for answer in (*run(llm, [ask]), *run(llm, [ask]))] == [2, 0]


@pytest.mark.parametrize(("architecture", "layers"), [("gemma3_text", [2, 5]), ("granitemoehybrid", [1, 3])])
def test_layers_that_are_not_evicted_are_left_out(models, architecture, layers):
    """Those with a window, and those with a state."""
    with evicting_engine(models(architecture)) as llm:
        page = page_of(llm, ["snapkv"])
    assert page["layers"] == layers
    assert page["policies"][0]["entries"] == {"kept": 2 * 2 * 60, "of": 2 * 2 * LENGTH}


REFUSALS = {
    "--policy snapkv: budget must exceed window": ["--policy", "snapkv", "--budget", "3"],
    "use --budget": ["--kv-budget", "0.3"],
    "--port is for a server's front end, which is not started here: leave it out": ["--port", "80"],
    "unrecognized arguments: --nonsense": ["--nonsense"],
    "--turns cannot be used with policy take (choose from": ["--turns", "100", "--compare", "take"],
    "--chat-template is for --chat: a prompt has no template": ["--chat-template", "{{ messages }}"],
    "vLLM does not start": ["--max-model-len", "100000"],
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refusals(models, sentence, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT)
    with pytest.raises(SystemExit) as ended:
        main([str(models("llama")), "--prompt", str(prompt), *REFUSALS[sentence]])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
