"""Pages of engines with several ranks, with several evictions, with other layers; and what ``inspect`` refuses."""

import itertools

import pytest

from tests.engine.support.inspecting import BUDGET, LENGTH, TEXT, kept_by, page_of
from tests.engine.support.running import Ask, evicting_engine, run
from vllm_kvevict.inspect.__main__ import main

pytestmark = pytest.mark.engine


def test_several_evictions_of_a_prompt(models):
    """Positions are those in the prompt, though later evictions choose among what the earlier ones kept."""
    options = {"policy": "take", "budget": 48, "take_chunk": 64, "take_probe": 16}
    with evicting_engine(models("llama"), eviction=options) as llm:
        page = page_of(llm, ["take"], 48)
        (answer,) = run(llm, [Ask(LENGTH, "take", 48.0, max_tokens=2)])
    assert len(answer.kept) == 5
    shown = page["policies"][0]["kept"]
    assert shown == kept_by(answer, 4, 2, LENGTH, LENGTH)
    assert all(head[-16:] == list(range(LENGTH - 16, LENGTH)) for layer in shown for head in layer)


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


def test_layers_that_are_not_evicted_are_left_out(models):
    with evicting_engine(models("gemma3_text")) as llm:
        page = page_of(llm, ["snapkv"])
    assert page["layers"] == [2, 5]
    assert page["policies"][0]["entries"] == {"kept": 2 * 2 * 60, "of": 2 * 2 * LENGTH}


def test_layers_with_a_state_are_left_out_and_what_is_kept_whole_is_said(models):
    """This model has no rotary embedding, which one of the policies would undo."""
    with evicting_engine(models("granitemoehybrid")) as llm:
        page = page_of(llm, ["snapkv"])
        with pytest.raises(ValueError, match="expected-attention cannot evict this model"):
            page_of(llm, ["expected-attention"])
    assert page["layers"] == [1, 3]
    assert page["policies"][0]["entries"] == {"kept": 2 * 2 * 60, "of": 2 * 2 * LENGTH}


def test_a_layer_that_a_policy_leaves_alone_is_kept(models):
    options = {"policy": "knorm", "budget": BUDGET, "skip_layers": 1}
    with evicting_engine(models("llama"), eviction=options) as llm:
        first, *others = page_of(llm, ["knorm"])["policies"][0]["entries_per_head"]
    assert first == [LENGTH, LENGTH] and all(len(layer) == 2 and max(layer) < LENGTH for layer in others)


def test_a_layer_that_a_policy_leaves_alone_keeps_all_turns(models):
    options = {"policy": "knorm", "budget": BUDGET, "skip_layers": 1, "min_turn": 32}
    with evicting_engine(models("llama"), eviction=options) as llm:
        first, *others = page_of(llm, ["knorm"], turns=(96, 200))["policies"][0]["entries_per_head"]
    assert first == [LENGTH, LENGTH] and all(max(layer) < LENGTH for layer in others)


def test_what_was_cached_is_seen_all_the_same(models):
    """Who begins with what others have left is not evicted again."""
    with evicting_engine(models("llama"), eviction={"min_turn": 32}, enable_prefix_caching=True) as llm:
        first, again = (page_of(llm, ["ada-snapkv"], turns=(96, 200)) for _ in range(2))
        assert first == again
        # The control: of two requests without a look in between, the second is evicted nowhere.
        ask = Ask(LENGTH, "snapkv", BUDGET, turns=(96, 200), max_tokens=2)
        assert [len(answer.kept) for answer in (*run(llm, [ask]), *run(llm, [ask]))] == [2, 0]


def test_a_prompt_without_room_for_an_answer_is_refused(models):
    with evicting_engine(models("llama"), max_model_len=LENGTH + 1) as llm:
        shown = page_of(llm, ["snapkv"])["policies"][0]
        with pytest.raises(ValueError, match="repeats the tokens it evicts after the prompt"):
            page_of(llm, ["kvzip"])
    # Layers of several stages compete: a later step decides, and then the request must still be there.
    short = {"max_model_len": LENGTH + 1, "pipeline_parallel_size": 2}
    with (
        evicting_engine(models("llama"), **short) as llm,
        pytest.raises(ValueError, match="no room for an answer"),
    ):
        page_of(llm, ["lava"])
    assert shown["entries"]["kept"] == 8 * 60


REFUSALS = {
    "--budget must be a ratio": ["--budget", "0"],
    "--policy snapkv: budget must exceed window": ["--policy", "snapkv", "--budget", "3"],
    "argument --policy: invalid choice": ["--policy", "nothing"],
    "use --budget": ["--kv-budget", "0.3"],
    "--prompt nowhere.txt cannot be read": ["--prompt", "nowhere.txt"],
    "there is no such folder": ["--output", "nowhere/page.html"],
    "unrecognized arguments: --nonsense": ["--nonsense"],
    "--model is not an argument of this command: use the first argument": ["--model", "Qwen/Qwen3-0.6B"],
    "vLLM does not start": ["--max-model-len", "100000"],
}


@pytest.mark.parametrize("words", REFUSALS)
def test_refusals(models, words, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT)
    with pytest.raises(SystemExit) as ended:
        main([str(models("llama")), "--prompt", str(prompt), *REFUSALS[words]])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
