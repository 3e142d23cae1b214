"""Chats are read from files as servers are sent them, and what is wrong with one is named by line and message."""

import json

import pytest

from vllm_kvevict.chats import ChatRequest, parse_chat, read_chat, read_entries

USER = {"role": "user", "content": "Hello."}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
MESSAGES = "x must be a list of messages, each with role and content, or a chat request that has one"


def test_all_that_the_prompt_depends_on_is_kept():
    body = {"model": "m", "max_tokens": 5, "messages": [USER], "tool_choice": None}
    body |= {"chat_template_kwargs": {"a": 1}, "documents": [{"text": "d"}]}
    kept = {
        "tools": TOOLS,
        "chat_template": "t",
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    body |= kept
    settings = {**kept, "chat_template_kwargs": {"a": 1, "documents": [{"text": "d"}]}}
    assert parse_chat(body, "x") == ChatRequest([USER], settings)
    assert parse_chat([USER], "x") == ChatRequest([USER])
    assert parse_chat({"messages": [USER], "tools": None}, "x") == ChatRequest([USER])


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "reasoning_effort": "none"},
        ),
    ],
)
def test_effort_is_an_argument_of_the_template(given, arguments):
    assert parse_chat({"messages": [USER], **given}, "x").settings == {"chat_template_kwargs": arguments}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_what_agents_send(content):
    result = {"role": "tool", "tool_call_id": "1", "content": "Found."}
    called = {"role": "assistant", "tool_calls": [CALL], **content}
    chat = parse_chat([{"role": "system", "content": "s"}, USER, called, result], "x")
    assert chat.body()["messages"][2] == called and (chat.question, chat.asked) == (1, "Hello.")
    assert chat.body("Bye.")["messages"][1:] == [{"role": "user", "content": "Bye."}, called, result]
    assert chat.messages[1] is USER


def test_the_text_of_a_question_in_parts():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "u"}},
        {"type": "text", "text": "b"},
    ]
    assert parse_chat([{"role": "user", "content": parts}], "x").asked == "ab"
    assert parse_chat([{"role": "system", "content": "a"}], "x").question is None


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ([], MESSAGES),
        ([USER, "Hello."], "x, message 2: it must be an object with a role"),
        ([USER, {"role": "user"}], "x, message 2: content must be text or a list of parts, not null"),
        (
            [USER, {"role": "assistant", "tool_calls": [{}]}],
            "x, message 2: tool_calls must be a list of objects",
        ),
        ({"messages": [USER], "tools": {}}, "x: tools must be a list"),
        ({"messages": [USER], "add_generation_prompt": 1}, "x: add_generation_prompt must be true or false"),
    ],
)
def test_wrong_chats(entry, sentence):
    with pytest.raises(ValueError) as error:
        parse_chat(entry, "x")
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (json.dumps([USER], indent=1), [""]),
        (json.dumps({"messages": [USER]}), [""]),
        (f'{json.dumps([USER])}\r\n\n{{"prompt": "a\u2028b"}}', [" line 1", " line 3"]),
    ],
)
def test_files_of_one_and_of_many(text, places, tmp_path):
    path = tmp_path / "chats"
    path.write_bytes(text.encode())
    assert [place for place, _ in read_entries(str(path), "--f")] == [
        f"--f {path}{place}" for place in places
    ]
    if len(places) == 1:
        assert read_chat(str(path), "--f") == ChatRequest([USER])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", " is empty"),
        ("Hello.", " is not JSON (Expecting value: line 1 column 1"),
        ("[1]\n{", " line 2 is not JSON (Expecting property name enclosed in double quotes: line 1 column 2"),
        (f"{json.dumps([USER])}\n" * 2, " has 2 chats: give a file with one of them"),
    ],
)
def test_wrong_files(text, sentence, tmp_path):
    (tmp_path / "chats").write_text(text)
    with pytest.raises(ValueError) as error:
        read_chat(str(tmp_path / "chats"), "--f")
    assert str(error.value).startswith(f"--f {tmp_path / 'chats'}{sentence}")
