"""Random requests for the soak: valid ones of every kind, turns of conversations, malformed ones, and clients that
go away."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from benchmarks.harness.conversations import SALTS, Conversations, Turn
from benchmarks.harness.questions import Question, body_of, random_words
from vllm_kvevict.policies.registry import policies_for_parts

DEADLINE = 180.0
"""Seconds after which a request counts as hanging."""
BUDGETS = (0.05, 0.1, 0.2, 0.5, 1.0, 96, 128, 300)
"""Every policy's defaults allow these."""
LONGEST_ANSWER = 100
KINDS, LEAVING = {"valid": 62, "turn": 20, "malformed": 15, "probe": 3}, 0.15
"""Requests in a hundred; and the share of clients of the first two that go away."""
DOCUMENTS = 6
"""Texts that many requests begin with; each is cached on its own for each of ``SALTS``."""
EXPECTED, LEFT, HUNG, WRONG, BROKEN = "as expected", "left by the client", "hung", "wrong", "broken off"
"""What becomes of a request: answered or refused as it should be, or one of the other four."""

JSON = {"Content-Type": "application/json"}
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "kv_eviction": ("nope", "", 7, ["snapkv"]),
    "kv_budget": (0, -0.5, 2.5, "much", "nan", float("nan"), float("inf"), None, [0.2], {}),
    "kv_prefix_len": (0, -1, 2.5, "ten", 10**6, [10]),
    "kv_turns": ([], [0], [3, 3], [5, 4], [2.5], ["ten"], [10**6], 4, "ten"),
    **{unknown: (0.2,) for unknown in ("kv_budgets", "kv_page_size", "kv_")},
}
"""Entries of ``vllm_xargs``, each of which must be refused in a sentence that names the field."""

BAD_BODIES: dict[str, Mapping[str, Any]] = {
    "fields that are no object": {"vllm_xargs": "snapkv"},
    "a negative length": {"max_tokens": -1},
    "a length in words": {"max_tokens": "ten"},
    "no answers": {"n": 0},
    "a negative temperature": {"temperature": -1},
    "another model": {"model": "nobody"},
    "beam search": {"use_beam_search": True, "n": 2},
    "a prompt that is a number": {"prompt": 5, "messages": 5},
}


@dataclass(frozen=True)
class Ask:
    """One request and what has to come of it.

    Attributes:
        kind: for the tally.
        path: of the endpoint.
        content: the body as sent.
        choices: answers that it asks for.
        tokens: of all answers together; None where the server may cut them short.
        text: the answer, where it is known.
        refusal: a word that its refusal must contain; None for requests that are to be answered.
        leave: after how many events of a stream, or seconds without one, the client goes away; None: never.
        stream: whether the answer comes in events.
        turn: of a conversation, that it asks for the answer to.
    """

    kind: str
    path: str
    content: bytes
    choices: int = 1
    tokens: int | None = 0
    text: str | None = None
    refusal: str | None = None
    leave: float | None = None
    stream: bool = False
    turn: Turn | None = None


def asked(question: Question, body: Mapping[str, Any], leave: float | None = None) -> Ask:
    """A request that is to be answered in full length, unless its client leaves."""
    stream, choices = body.get("stream", False), body.get("n", 1)
    kind = f"{question.kind}{', streamed' if stream else ''}{', left' if leave is not None else ''}"
    path, tokens = ENDPOINTS[question.endpoint], choices * question.tokens
    return Ask(kind, path, encoded(body), choices, tokens, None, None, leave, stream, question.turn)


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes:
        ends: why each choice ended.
        tokens: of all choices together.
        text: of the first choice.
        cached: tokens of the prompt that were found in the prefix cache, if the server says so.
        prompt: tokens of it.
    """

    ends: list[str]
    tokens: int
    text: str
    cached: int = 0
    prompt: int = 0

    @classmethod
    def of(cls, ends: list[str], text: str, usage: Mapping[str, Any]) -> "Answer":
        """With what the server says of its tokens."""
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return cls(ends, usage.get("completion_tokens", 0), text, cached, usage.get("prompt_tokens", 0))


@dataclass(frozen=True)
class Outcome:
    """What became of a request: one of the constants above, details where something is wrong, and a whole answer."""

    result: str
    status: int | None = None
    details: str = ""
    answer: Answer | None = None


class Traffic:
    """An endless series of random requests.

    Args:
        model: its name.
        seed: the same seed makes the same series, but for conversations, which go on with what is answered.
        longest: words of the longest prompt.
        max_len: tokens that the server takes at most.
        probes: by policy, bodies of completions with their answers, some of which are asked again between the others;
            no request names another policy.
    """

    def __init__(
        self,
        model: str,
        seed: int,
        longest: int,
        max_len: int,
        probes: Mapping[str, tuple[dict[str, Any], str]],
    ):
        self.model, self.longest, self.max_len, self.probes = model, longest, max_len, probes
        self._choose = random.Random(seed)
        by_turns = [policy for policy in policies_for_parts() if policy in probes and policy != "full"]
        self._conversations = Conversations(seed, longest, list(probes), by_turns)
        self._documents = [
            random_words(random.Random(number), longest * (number + 2) // (DOCUMENTS + 2))
            for number in range(DOCUMENTS)
        ]

    def next(self) -> Ask:
        """The next request."""
        kind = self._choose.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "probe":
            body, text = self._choose.choice(list(self.probes.values()))
            return Ask("probe", ENDPOINTS["completions"], encoded(body), tokens=body["max_tokens"], text=text)
        if kind == "malformed":
            return self._malformed()
        leaving = self._choose.random() < LEAVING
        return self._turn(leaving) if kind == "turn" else self._valid(leaving)

    def hear(self, ask: Ask, outcome: "Outcome") -> "Outcome":
        """What became of a request. Conversations go on with the answer, which must be the same for the same turn."""
        if ask.turn is None or outcome.result != EXPECTED or outcome.answer is None:
            return outcome
        before, now = self._conversations.hear(ask.turn, outcome.answer.text), outcome.answer.text
        return outcome if now == before else replace(outcome, result=WRONG, details=_changed(before, now))

    def _valid(self, leaving: bool) -> Ask:
        choose = self._choose
        endpoint, length = choose.choice(list(ENDPOINTS)), self._random_length(self.longest)
        tokens, stream = choose.randint(1, LONGEST_ANSWER), choose.random() < 0.5
        body = self._body(endpoint, length, tokens, stream)
        if choose.random() < 0.9:
            body["vllm_xargs"] = {"kv_eviction": choose.choice(list(self.probes))}
            if choose.random() < 0.7:
                body["vllm_xargs"]["kv_budget"] = choose.choice(BUDGETS)
            if choose.random() < 0.3:
                about, body["vllm_xargs"]["kv_prefix_len"] = self._about_a_document(endpoint)
                body |= about
            elif choose.random() < 0.2:
                body["vllm_xargs"]["kv_prefix_len"] = choose.randint(1, length)
        if choose.random() < 0.3:
            body |= {"temperature": 0.8, "top_p": 0.9, "seed": choose.randrange(1 << 30)}
        if choose.random() < 0.1:
            body |= {"n": choose.randint(2, 4), "temperature": 1.0}
        if choose.random() < 0.1:
            body |= {"logprobs": 3} if endpoint == "completions" else {"logprobs": True, "top_logprobs": 3}
        if choose.random() < 0.03 and not stream:
            body["prompt_logprobs"] = 1
        question = Question(endpoint, endpoint, {}, tokens, {})
        return asked(question, body, self._when_to_leave(stream) if leaving else None)

    def _turn(self, leaving: bool) -> Ask:
        """The turn of a conversation, always answered in the same way: what it begins with makes no difference."""
        choose, question = self._choose, self._conversations.next()
        stream = choose.random() < 0.5
        body = question.body(self.model, stream)
        if choose.random() < 0.15:
            body |= {"n": choose.randint(2, 4), "temperature": 1.0, "top_k": 1}
        leave = self._when_to_leave(stream) if leaving else None
        return asked(question, body, leave)

    def _when_to_leave(self, stream: bool) -> float:
        return self._choose.choice((0, 1, 3, 10) if stream else (0.0, 0.02, 0.1, 0.5))

    def _about_a_document(self, endpoint: str) -> tuple[dict[str, Any], int]:
        """A prompt that begins as others do, and how many of its tokens may be evicted; many find them cached."""
        choose = self._choose
        document = choose.choice(self._documents)
        words = len(document.split())
        question = random_words(choose, self._random_length(self.longest - words))
        body = self._prompt(endpoint, f"{document} {question}")
        if salt := choose.choice(SALTS):
            body["cache_salt"] = salt
        # A word is at least one token, so that as many tokens belong to the document.
        return body, words

    def _malformed(self) -> Ask:
        choose = self._choose
        endpoint = choose.choice(list(ENDPOINTS))
        body = self._body(endpoint, 8, 4, choose.random() < 0.5)
        word, cut = "", None
        which = choose.random()
        if which < 0.6:
            word = choose.choice(list(BAD_VALUES))
            body["vllm_xargs"] = {word: choose.choice(BAD_VALUES[word])}
        elif which < 0.8:
            body |= choose.choice(list(BAD_BODIES.values()))
        elif which < 0.9:
            body |= self._prompt(endpoint, random_words(choose, self.max_len + 1))
        else:
            cut = -choose.randint(1, 20)
        return Ask("malformed", ENDPOINTS[endpoint], encoded(body)[:cut], refusal=word)

    def _body(self, endpoint: str, length: int, tokens: int, stream: bool) -> dict[str, Any]:
        prompt = self._prompt(endpoint, random_words(self._choose, length))
        return body_of(self.model, tokens, stream, **prompt)

    def _prompt(self, endpoint: str, text: str) -> dict[str, Any]:
        if endpoint == "completions":
            return {"prompt": text}
        return {"messages": [{"role": "user", "content": text}]}

    def _random_length(self, most: int) -> int:
        """Between 1 and most; each order of magnitude is equally likely."""
        return max(1, int(most ** self._choose.random()))


async def send(client: httpx.AsyncClient, ask: Ask) -> Outcome:
    """Send a request and look at what comes back."""
    try:
        async with asyncio.timeout(DEADLINE):
            if ask.stream:
                return await _stream(client, ask)
            try:
                async with asyncio.timeout(ask.leave):
                    answer = await client.post(ask.path, content=ask.content, headers=JSON)
            except TimeoutError:
                if ask.leave is None:
                    raise
                return Outcome(LEFT)
            return _judge(ask, answer)
    except TimeoutError:
        return Outcome(HUNG, details=f"no answer within {DEADLINE:g} s")
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return Outcome(BROKEN, details=repr(error))


async def ask_probes(
    client: httpx.AsyncClient, model: str, policies: Sequence[str]
) -> dict[str, tuple[dict[str, Any], str]]:
    """One request for each policy: body and greedy answer by policy.

    Every other one is evicted before its end, so that the next time it finds what was kept, unless that was dropped.
    """
    probes = {}
    choose = random.Random(0)
    words = 300
    for number, policy in enumerate(policies):
        fields: dict[str, Any] = {"kv_eviction": policy, "kv_budget": 0.3}
        if number % 2:
            fields["kv_prefix_len"] = words - 50
        body = body_of(model, 24, prompt=random_words(choose, words), vllm_xargs=fields)
        answer = await client.post("/v1/completions", json=body, timeout=120)
        answer.raise_for_status()
        probes[policy] = body, answer.json()["choices"][0]["text"]
    return probes


def _judge(ask: Ask, answer: httpx.Response) -> Outcome:
    status = answer.status_code
    if ask.refusal is not None:
        good = 400 <= status < 500 and ask.refusal in answer.text
        return Outcome(EXPECTED if good else WRONG, status, "" if good else answer.text[:300])
    if status != 200:
        return Outcome(WRONG, status, answer.text[:300])
    body = answer.json()
    ends = [choice["finish_reason"] for choice in body["choices"]]
    return _complete(ask, Answer.of(ends, _text(body["choices"][0], "message"), body["usage"]))


async def _stream(client: httpx.AsyncClient, ask: Ask) -> Outcome:
    """Read a stream to its end, or until the client loses interest."""
    ends: list[str] = []
    usage: Mapping[str, Any] = {}
    text, last, events = "", "", 0
    async with client.stream("POST", ask.path, content=ask.content, headers=JSON) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return _judge(ask, answer)
        async for line in answer.aiter_lines():
            if ask.leave is not None and events >= ask.leave:
                return Outcome(LEFT)
            if not line.startswith("data: "):
                continue
            last, events = line.removeprefix("data: "), events + 1
            if last == "[DONE]":
                continue
            event = json.loads(last)
            if "error" in event:
                return Outcome(WRONG, event["error"].get("code"), last[:300])
            ends += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
            text += "".join(_text(choice, "delta") for choice in event["choices"] if not choice.get("index"))
            usage = event.get("usage") or usage
    if last != "[DONE]":
        return Outcome(BROKEN, 200, "the stream ended without [DONE]")
    return _complete(ask, Answer.of(ends, text, usage))


def _text(choice: Mapping[str, Any], part: str) -> str:
    """What a choice of a completion says, or of a chat, where it is in a part of the choice."""
    return choice.get("text") or (choice.get(part) or {}).get("content") or ""


def _complete(ask: Ask, answer: Answer) -> Outcome:
    """Whether a whole answer has the choices, the length and the text that it must have."""
    ends, tokens = answer.ends, answer.tokens
    if len(ends) != ask.choices or set(ends) != {"length"} or ask.tokens not in (tokens, None):
        wanted = f"{ask.choices} answers with {ask.tokens} tokens"
        return Outcome(WRONG, 200, f"{wanted} were asked for, {ends} with {tokens} came", answer)
    if ask.text is not None and answer.text != ask.text:
        return Outcome(WRONG, 200, _changed(ask.text, answer.text), answer)
    return Outcome(EXPECTED, 200, answer=answer)


def _changed(before: str, now: str) -> str:
    return f"{before!r} was answered before, {now!r} now"


def encoded(body: Any) -> bytes:
    """Also of values that JSON has no word for: clients in Python send NaN."""
    return json.dumps(body).encode()
