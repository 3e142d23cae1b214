"""What the front end's benchmark sends, and its verdict; renderers are made up."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import frontend
from benchmarks.frontend import (
    CHAT,
    DOCUMENT,
    STOCK,
    TURN,
    Cell,
    compare,
    messages_of,
    parse_arguments,
    targets,
)
from vllm_kvevict.quality import checkpoint


class FrontEnd:
    """A token is a word; ``notes`` are what a prompt gets besides."""

    def __init__(self, **notes):
        self.notes, self.rendered = notes, 0
        self.renderer = SimpleNamespace(
            get_tokenizer=lambda: SimpleNamespace(encode=lambda text, **options: text.split())
        )

    def render(self, messages):
        self.rendered += 1
        words = " ".join(message["content"] for message in messages).split()
        return {"prompt_token_ids": words, **self.notes}


@pytest.mark.parametrize("kind, count", [(DOCUMENT, 2), (CHAT, 2 * 4 + 1)])
def test_chats_have_about_as_many_tokens_as_asked(kind, count):
    messages = messages_of(kind, FrontEnd(), 4 * TURN)
    assert len(messages) == count and messages[-1]["role"] == "user"
    words = sum(len(message["content"].split()) for message in messages)
    assert 0.9 * 4 * TURN <= words <= 1.1 * 4 * TURN


def sides(**notes):
    return {STOCK: FrontEnd(), "prefix": FrontEnd(**notes), "turns": FrontEnd(**notes)}


def test_sides_take_turns_and_find_what_they_look_for():
    found = sides(kv_prefix_len=5, kv_turns=[5])
    cell = compare(DOCUMENT, found, 100, rounds=3)
    assert len(cell.seconds) == 3 and all(list(of) == [STOCK, "prefix", "turns"] for of in cell.seconds)
    assert found["prefix"].rendered == 1 + 4
    with pytest.raises(RuntimeError, match="scope turns found no kv_turns in a document"):
        compare(DOCUMENT, sides(kv_prefix_len=5), 100, rounds=1)


def test_the_verdict_is_on_the_long_document_with_the_usual_tokenizer(monkeypatch):
    monkeypatch.setattr(checkpoint, "find", lambda: Path("usual"))

    def cell(kind, tokens, added):
        return Cell(kind, tokens, [{STOCK: 0.2, "prefix": 0.2 + added, "turns": 1.0}] * 3)

    cells = [cell(DOCUMENT, 1024, 0.5), cell(CHAT, 32768, 0.5), cell(DOCUMENT, 32800, 0.015)]
    assert [target.met for target in targets(cells, Path("usual"))] == [True]
    assert [target.met for target in targets([cell(DOCUMENT, 32800, 0.025)], Path("usual"))] == [False]
    assert targets(cells, Path("another")) == []


def test_without_the_checkpoint_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "find", lambda: None)
    with pytest.raises(SystemExit):
        parse_arguments([])
    assert checkpoint.COMMAND in " ".join(capsys.readouterr().err.split())
    assert parse_arguments(["--model", "m"]).model == Path("m")
    assert frontend.SCOPES == ("prefix", "turns")
