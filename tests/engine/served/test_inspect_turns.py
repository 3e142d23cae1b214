"""Pages of conversations: what each turn keeps is what a server in scope ``turns`` keeps of it, in branches too."""

import contextlib
import json
from itertools import pairwise

import pytest
from vllm import SamplingParams

from tests.engine.support.clients import words
from tests.engine.support.inspecting import BUDGET, LENGTH, kept_by, page_of
from tests.engine.support.running import Ask, decided, evicting_engine, run
from tests.inspection.pages import read as read_page
from vllm_kvevict.chats import ChatRequest
from vllm_kvevict.inspect import inspection
from vllm_kvevict.inspect.__main__ import main
from vllm_kvevict.policies.registry import policies_for_parts

pytestmark = pytest.mark.engine
POLICIES = [policy for policy in policies_for_parts() if policy != "full"]
TURNS = (96, 110, 200)
"""Of which the second is too short."""


@pytest.fixture(scope="module")
def llm(models):
    options = {"min_turn": 32, "scope": "turns"}
    with evicting_engine(models("llama"), eviction=options, max_num_batched_tokens=128) as llm:
        yield llm


def test_every_policy(llm):
    """What several evictions of a prompt have left, by positions in it: each turn its share of its own tokens."""
    page = page_of(llm, POLICIES, turns=TURNS)
    answers = run(llm, [Ask(LENGTH, policy, BUDGET, max_tokens=2, turns=TURNS) for policy in POLICIES])
    assert page["turns"] == [96, 200] and page["evicted_tokens"] == 200
    for shown, answer in zip(page["policies"], answers, strict=True):
        assert len(answer.kept) == 2
        assert shown["kept"] == kept_by(answer, 4, 2, 200, LENGTH), shown["policy"]
        # As it was left when the first turn ended.
        assert [[[x for x in head if x < 96] for head in layer] for layer in shown["kept"]] == [
            answer.kept[0][layer] for layer in range(4)
        ]
        assert shown["entries_per_turn"] == [8 * int(BUDGET * 96), 8 * int(BUDGET * 104), 8 * 100]


SYSTEM = {"role": "system", "content": words(120)}
SAID = [words(60, 1), words(50, 2), words(45, 3), words(40, 4)]


def chat(*said):
    roles = ("user", "assistant")
    return [SYSTEM, *({"role": roles[i % 2], "content": text} for i, text in enumerate(said))]


def kept_on_a_server(llm, messages, policy):
    """What a chat keeps that goes the way of a server's, by layer and head, and after how many tokens."""
    fields = {"kv_eviction": policy, "kv_budget": BUDGET}
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0, extra_args=fields)
    (answer,) = decided(llm, llm.chat(messages, sampling, use_tqdm=False))
    return [heads for _, heads in sorted(answer.kept[-1].items())], answer


@pytest.mark.parametrize("policy", ["ada-snapkv", "kvzip"])
def test_a_chat_is_evicted_as_on_a_server(llm, policy):
    messages = chat(*SAID[:3])
    page = page_of(llm, [policy], chats=[ChatRequest(messages)])
    kept, answer = kept_on_a_server(llm, messages, policy)
    assert page["token_ids"] == answer.prompt
    end = page["turns"][-1]
    assert len(page["turns"]) == 2 and end < page["prompt_tokens"]
    shown = page["policies"][0]["kept"]
    assert [[[x for x in head if x < end] for head in layer] for layer in shown] == kept
    # A control: asked otherwise, the server finds other turns.
    assert kept_on_a_server(llm, chat(SAID[3], *SAID[1:3]), policy)[0] != kept


SETTINGS = "{{ 'w5 ' * (tools or []) | length }}{{ 'w6 ' * (documents or []) | length }}{{ word }} "
"""Shows what a template is given besides messages."""
TOOL = {"type": "function", "function": {"name": "look"}}


def inspected(llm, monkeypatch, tmp_path, body, *words_):
    """The page that the command writes of a chat, with an engine that is there."""
    monkeypatch.setattr(inspection, "_engine", lambda wanted: contextlib.nullcontext(llm))
    (tmp_path / "chat.json").write_text(json.dumps(body))
    page = ["--policy", "snapkv", "--budget", str(BUDGET), "--output", str(tmp_path / "page.html")]
    main(["MODEL", "--chat", str(tmp_path / "chat.json"), *page, *words_])
    return read_page((tmp_path / "page.html").read_text())


def test_templates_and_what_they_are_given(llm, monkeypatch, tmp_path):
    messages, tokenizer = chat(*SAID[:3]), llm.get_tokenizer()
    (tmp_path / "template.jinja").write_text(SETTINGS + tokenizer.chat_template)
    flags = ["--chat-template", str(tmp_path / "template.jinja")]
    flags += ["--default-chat-template-kwargs", '{"word": "w8"}']
    body = {"messages": messages, "tools": [TOOL], "documents": [{"text": "a"}, {"text": "b"}]}
    page = inspected(llm, monkeypatch, tmp_path, body, *flags)
    plain = inspected(llm, monkeypatch, tmp_path, messages)
    assert page["token_ids"] == tokenizer.encode("w5 w6 w6 w8") + plain["token_ids"]
    assert [end - 4 for end in page["turns"]] == plain["turns"]
    body |= {"chat_template_kwargs": {"word": "w9"}, "chat_template": SETTINGS + tokenizer.chat_template}
    trusted = inspected(llm, monkeypatch, tmp_path, body, "--trust-request-chat-template")
    assert trusted["token_ids"] == tokenizer.encode("w5 w6 w6 w9") + plain["token_ids"]


def of_turn(page, start, end):
    """What each policy keeps between two tokens."""
    return [
        [[x for x in head if start <= x < end] for layer in policy["kept"] for head in layer]
        for policy in page["policies"]
    ]


def test_a_branch_keeps_the_same_of_what_both_share(llm):
    chats = [ChatRequest(chat(*SAID[:3])), ChatRequest(chat(SAID[0], SAID[3], *SAID[2:]))]
    page = page_of(llm, ["ada-snapkv", "kvzip"], chats=chats)
    branch = page["branch"]
    assert page["shared_turns"] == 1 and page["turns"][0] == branch["turns"][0]
    bounds = [0, *page["turns"]]
    same = [of_turn(page, *turn) == of_turn(branch, *turn) for turn in pairwise(bounds)]
    assert same == [True, False]
