"""Pages of conversations: what each turn keeps is what a server in scope ``turns`` keeps of it, in branches too."""

import contextlib
import json
from itertools import pairwise

import pytest
from vllm import SamplingParams

from tests.documents import ROOT
from tests.engine.support.clients import words
from tests.engine.support.inspecting import BUDGET, LENGTH, TEXT, kept_by, page_of
from tests.engine.support.running import Ask, evicting_engine, run
from tests.engine.support.serving import forked_command
from tests.inspection.pages import read as read_page
from vllm_kvevict.chats import Chat
from vllm_kvevict.engine import inspection
from vllm_kvevict.engine.worker import recording
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


def test_the_last_turn_may_end_with_the_prompt(llm):
    page = page_of(llm, ["snapkv"], turns=(96, LENGTH))
    assert page["turns"] == [96, LENGTH] and page["evicted_tokens"] == LENGTH
    (shown,) = page["policies"]
    assert shown["entries_per_turn"] == [8 * int(BUDGET * 96), 8 * int(BUDGET * (LENGTH - 96))]


def test_a_prompt_that_is_evicted_as_one_is_another_page(llm):
    """A control."""
    page = page_of(llm, ["snapkv", "full"], turns=TURNS)
    as_one = page_of(llm, ["snapkv", "full"], prefix_len=200)
    assert as_one["turns"] == []
    assert page["policies"][0]["kept"] != as_one["policies"][0]["kept"]
    assert page["policies"][1]["kept"] == as_one["policies"][1]["kept"]


SYSTEM = {"role": "system", "content": words(120)}
SAID = [words(60, 1), words(50, 2), words(45, 3), words(40, 4)]


def chat(*said):
    roles = ("user", "assistant")
    return [SYSTEM, *({"role": roles[i % 2], "content": text} for i, text in enumerate(said))]


def kept_on_a_server(llm, messages, policy):
    """What a chat keeps that goes the way of a server's, by layer and head, and after how many tokens."""
    fields = {"kv_eviction": policy, "kv_budget": BUDGET}
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0, extra_args=fields)
    (output,) = llm.chat(messages, sampling, use_tqdm=False)
    done = recording.of_request(
        recording.evictions(llm.collective_rpc(recording.take_decisions)), output.request_id
    )
    return [[head.tolist() for head in heads] for _, heads in sorted(done[-1].kept.items())], output


@pytest.mark.parametrize("policy", ["ada-snapkv", "kvzip"])
def test_a_chat_is_evicted_as_on_a_server(llm, policy):
    messages = chat(*SAID[:3])
    page = page_of(llm, [policy], chats=[Chat(messages)])
    kept, output = kept_on_a_server(llm, messages, policy)
    assert page["token_ids"] == output.prompt_token_ids
    end = page["turns"][-1]
    assert len(page["turns"]) == 2 and end < page["prompt_tokens"]
    shown = page["policies"][0]["kept"]
    assert [[[x for x in head if x < end] for head in layer] for layer in shown] == kept
    # A control: asked otherwise, the server finds other turns.
    assert kept_on_a_server(llm, chat(SAID[3], *SAID[1:3]), policy)[0] != kept


SETTINGS = "{{ 'w5 ' * (tools or []) | length }}{{ 'w6 ' * (documents or []) | length }}{{ word }} "
"""Shows what a template is given besides messages."""
TOOL = {"type": "function", "function": {"name": "look"}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


def inspected(llm, monkeypatch, tmp_path, body, *words_):
    """The page that the command writes of a chat, with an engine that is there; None if none may be asked for."""
    from vllm_kvevict.inspect.__main__ import main

    engine = contextlib.nullcontext(llm) if llm else None
    monkeypatch.setattr(inspection, "_engine", lambda wanted: engine or pytest.fail("an engine starts"))
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


def test_an_answer_that_only_calls_tools(llm, monkeypatch, tmp_path):
    """Its content may be empty or missing."""
    result = {"role": "tool", "tool_call_id": "1", "content": words(60, 8)}
    pages = []
    for content in ({"content": ""}, {"content": None}, {}):
        messages = [*chat(SAID[0]), {"role": "assistant", "tool_calls": CALLS, **content}, result]
        pages.append(inspected(llm, monkeypatch, tmp_path, messages))
    assert len(pages[0]["turns"]) == 2
    assert pages[0]["token_ids"] == pages[1]["token_ids"] == pages[2]["token_ids"]


def of_turn(page, start, end):
    """What each policy keeps between two tokens."""
    return [
        [[x for x in head if start <= x < end] for layer in policy["kept"] for head in layer]
        for policy in page["policies"]
    ]


def test_a_branch_keeps_the_same_of_what_both_share(llm):
    chats = [Chat(chat(*SAID[:3])), Chat(chat(SAID[0], SAID[3], *SAID[2:]))]
    page = page_of(llm, ["ada-snapkv", "kvzip"], chats=chats)
    branch = page["branch"]
    assert page["shared_turns"] == 1 and page["turns"][0] == branch["turns"][0]
    bounds = [0, *page["turns"]]
    same = [of_turn(page, *turn) == of_turn(branch, *turn) for turn in pairwise(bounds)]
    assert same == [True, False]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (chat(SAID[0])[1:], "no turn of the chat ends"),
        (
            [{"role": "system", "content": "w7"}, *chat(SAID[0])[1:]],
            "turns of fewer than 32 are evicted with the next",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "nowhere"}}]}],
            "the chat cannot be rendered",
        ),
    ],
)
def test_chats_that_are_not_evicted(llm, messages, sentence):
    with pytest.raises(ValueError, match=sentence):
        page_of(llm, ["snapkv"], chats=[Chat(messages)])


def test_turns_that_are_too_short(llm):
    with pytest.raises(ValueError, match="the turns have 20 tokens in all, and turns of fewer than 32"):
        page_of(llm, ["snapkv"], turns=(10, 20))


def test_command(tmp_path):
    """A policy with parameters, whose engine is another one; turns of 256 tokens at least, as on a server."""
    for name, said in (("chat", SAID[:3]), ("branch", [SAID[0], SAID[3], *SAID[2:]])):
        (tmp_path / f"{name}.json").write_text(json.dumps(chat(*said)))
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    words_ = ["vllm-kvevict", "inspect", ROOT / "benchmarks/quality/needle", "--chat", tmp_path / "chat.json"]
    words_ += ["--branch", tmp_path / "branch.json", "--budget", "0.25", "--policy", "snapkv"]
    words_ += ["--compare", "knorm:window=2", "--output", page, "--json", data]
    engine = ["--dtype", "float32", "--max-model-len", "2048"]
    done = forked_command(*words_, *engine)
    assert "turns of fewer than 256 are evicted with the next one" in done.stderr
    done = forked_command(*words_, *engine, "--kv-eviction-config.min_turn", "32")
    assert done.returncode == 0, done.stderr
    content = read_page(page.read_text())
    assert content == json.loads(data.read_text())
    for side in (content, content["branch"]):
        assert [policy["policy"] for policy in side["policies"]] == ["snapkv", "knorm:window=2"]
    assert content["shared_turns"] == 1
    assert "the branch shares 1 of 2 turns" in done.stderr


@pytest.mark.parametrize(
    ("words_", "sentence"),
    [
        (["--policy", "take"], "--turns cannot be used with policy take (choose from"),
        (["--compare", "take"], "--turns cannot be used with policy take (choose from"),
        (["--budget", "64"], "--turns needs a budget that is a share of the tokens"),
    ],
)
def test_refusals(words_, sentence, tmp_path, capsys, monkeypatch):
    """Before an engine starts."""
    from vllm_kvevict.inspect.__main__ import main

    monkeypatch.setattr(inspection, "_engine", lambda wanted: pytest.fail("an engine starts"))
    (tmp_path / "prompt.txt").write_text(TEXT)
    with pytest.raises(SystemExit):
        main(["MODEL", "--prompt", str(tmp_path / "prompt.txt"), "--turns", "100", *words_])
    assert sentence in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words_", "sentence"),
    [
        (["--port", "80"], "--port is for a server's front end, which is not started here: leave it out"),
        (
            ["--chat-template", "no.jinja"],
            "--chat-template: The supplied chat template (no.jinja) looks like a file",
        ),
        (
            [],
            "the chat has a chat_template, which servers take with --trust-request-chat-template only: add it",
        ),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_arguments_of_a_front_end(words_, sentence, tmp_path, capsys, monkeypatch):
    body = {"messages": chat(*SAID[:3]), "chat_template": "{{ messages }}"}
    with pytest.raises(SystemExit):
        inspected(None, monkeypatch, tmp_path, body, *words_)
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_a_prompt_has_no_template(tmp_path, capsys):
    from vllm_kvevict.inspect.__main__ import main

    (tmp_path / "prompt.txt").write_text(TEXT)
    with pytest.raises(SystemExit):
        main(["MODEL", "--prompt", str(tmp_path / "prompt.txt"), "--chat-template", "{{ messages }}"])
    sentence = "--chat-template is for --chat: a prompt has no template"
    assert sentence in capsys.readouterr().err.splitlines()[-1]
