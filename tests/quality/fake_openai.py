"""An OpenAI-compatible server in a thread: it answers from the text like the needle model, and remembers what came."""

import json
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllm_kvevict.quality.decoding import TRIES

FAST = ("--backoff", "0.01", "--tries", "2")
"""What a command needs to give such a server up soon."""
POLICIES = ("full", "snapkv", "ada-snapkv")
MODEL = "fake"
TOP = 20
"""Tokens of a list of log-probabilities at most."""
LENGTH, INTERVAL = 160, 8
"""Tokens of an answer with a seed, and from one eviction of an answer to the next."""
OTHER = 1
"""The token that is likely where the right one is not."""
IDS: dict[str, int] = {}
"""Tokens by their words, the same for all servers."""


def words(body: dict[str, Any]) -> list[str]:
    """Tokens of a request: one per word, one in front of each message, and one for each tool."""
    if "prompt" in body:
        return body["prompt"].split()
    tools = [f"<{tool['function']['name']}>" for tool in body.get("tools", ())]
    said = [w for message in body["messages"] for w in (f"<{message['role']}>", *message["content"].split())]
    return [*tools, *said, "<assistant>"]


def reply_to(body: dict[str, Any]) -> str:
    """What the text says about the name that is asked for; evicted texts are answered wrongly."""
    tokens = words(body)
    if body.get("vllm_xargs", {}).get("kv_eviction", "full") != "full":
        return "nothing"
    name = tokens[-3]
    place = tokens.index(name)
    return " ".join(tokens[place : place + 3])


@dataclass
class FakeServer:
    """A context manager. What it scores is the likelier the more is kept; a chat with instructions has a turn.

    Attributes:
        evicts: whether it knows our fields; otherwise it ignores them.
        tokenizes: whether it has ``/tokenize``.
        tunes: whether requests may set parameters of policies.
        finds_turns: whether it evicts chats turn by turn, and so asks others where their turns end.
        renders: whether it says where the turns of a chat end.
        decodes: whether it was started with --kv-decode-budget.
        tells: whether answers come with log-probabilities.
        noise: of log-probability, what the full cache loses.
        loss: the same of an answer behind its first eviction.
        extra: tokens of chats that it renders alone.
        repeats: tries of an answer that repeat themselves.
        fail: from a chat's number (from 1) and body to a status and message, or None to answer it.
    """

    evicts: bool = True
    tokenizes: bool = True
    tunes: bool = True
    finds_turns: bool = False
    renders: bool = True
    decodes: bool = True
    tells: bool = True
    noise: float = 0.0
    loss: float = 1.0
    extra: Sequence[int] = ()
    repeats: Container[int] = ()
    fail: Callable[[int, dict[str, Any]], tuple[int, str] | None] = lambda number, body: None
    asked: list[dict[str, Any]] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "FakeServer":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and content of an answer."""
        if path == "/v1/models":
            return 200, {"data": [{"id": MODEL}]}
        if path == "/tokenize" and self.tokenizes:
            self.tokenized.append(body)
            return 200, {"tokens": self.ids(body)}
        if path == "/v1/chat/completions/render" and self.renders:
            return 200, self.render(body)
        if path == "/inference/v1/generate":
            self.remember(body)
            rows = self.read(body["token_ids"], body["sampling_params"]["extra_args"])
            return 200, {"choices": [], "prompt_logprobs": rows}
        if path in ("/v1/chat/completions", "/v1/completions"):
            fault = self.fault_of(body)
            return self.complete(body) if fault is None else (400, {"error": {"message": fault}})
        return 404, {"detail": "Not Found"}

    def ids(self, body: dict[str, Any]) -> list[int]:
        with self._lock:
            return [IDS.setdefault(word, 10_000 + len(IDS)) for word in words(body)]

    def remember(self, body: dict[str, Any]) -> int:
        """The number of a request, from 1."""
        with self._lock:
            self.asked.append(body)
            return len(self.asked)

    def render(self, body: dict[str, Any]) -> dict[str, Any]:
        fields = body["vllm_xargs"] | {"kv_eviction": "full"}
        if body["messages"][0]["role"] == "system":
            fields = body["vllm_xargs"] | {"kv_turns": [41], "kv_rendered": {}}
        return {"token_ids": [*self.ids(body), *self.extra], "sampling_params": {"extra_args": fields}}

    def fault_of(self, body: dict[str, Any]) -> str | None:
        """What it refuses a request with."""
        fields = body.get("vllm_xargs", {})
        policy, parameters = fields.get("kv_eviction"), fields.get("kv_params")
        if self.evicts and policy is not None and policy not in POLICIES:
            return f"kv_eviction: unknown policy {policy!r}"
        if parameters is not None and not self.tunes:
            return "kv_params is unknown (valid: kv_eviction, kv_budget)"
        if parameters is not None and not parameters.startswith("kernel="):
            name, valid = parameters.partition("=")[0], f"requests may set for policy {policy}: kernel"
            return f"kv_params: {name} is not a parameter of policy {policy} ({valid})"
        if self.finds_turns and isinstance(body.get("prompt"), str) and policy in POLICIES:
            return "kv_turns is required with --kv-eviction-config.scope turns"
        if fields.get("kv_decode_budget") and not self.decodes:
            return "kv_decode_budget needs a server with --kv-decode-budget"
        if body.get("prompt_logprobs", body.get("logprobs", 0)) > TOP:
            return f"the server's max_logprobs is {TOP}"
        return None

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        fields = body.get("vllm_xargs", {})
        scores = "logprobs" in body or "prompt_logprobs" in body
        if fields.get("kv_eviction") == "no-such-policy" or (fields.get("kv_decode_budget") and not scores):
            return 200, {"choices": [{"text": ""}]}  # it is asked what it can do
        number = self.remember(body)
        if failure := self.fail(number, body):
            return failure[0], {"error": {"message": failure[1]}}
        if "logprobs" in body:
            return 200, {"choices": [{"text": "a b c", **(self.write(body) if self.tells else {})}]}
        if "prompt_logprobs" in body:
            return 200, {"choices": [{"text": "", "prompt_logprobs": self.read(body["prompt"], fields)}]}
        text = reply_to(body)
        choice = {"finish_reason": "stop", "text": text, "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": len(words(body)), "completion_tokens": len(text.split())}
        return 200, {"id": f"chatcmpl-{number}", "choices": [choice], "usage": usage}

    def write(self, body: dict[str, Any]) -> dict[str, Any]:
        """An answer's tokens, three or what a seed gives, and the likely ones at each place."""
        tokens = [1001, 1002, 1003]
        if (seed := body.get("seed")) is not None:
            again = seed // LENGTH % TRIES in self.repeats
            tokens = [2000 + (i % 4 if again else i * (seed + 1) % 997) for i in range(body["max_tokens"])]
        names = [f"token_id:{token}" for token in tokens]
        rows = [{name: -0.1, f"token_id:{OTHER}": -3.0} for name in names]
        return {"logprobs": {"tokens": names, "top_logprobs": rows}}

    def read(self, tokens: Sequence[int], fields: dict[str, Any]) -> list[Any]:
        """The likely tokens at each place of a prompt."""
        start, loss = 0, 1 - fields["kv_budget"] if "kv_budget" in fields else self.noise
        if budget := fields.get("kv_decode_budget"):
            start, loss = fields["kv_answer_from"] + budget + INTERVAL + 1, self.loss
        elif ahead := fields.get("kv_lookahead"):
            start = fields["kv_answer_from"] + ahead + 1
        rows: list[Any] = [None]
        for place, token in enumerate(tokens[1:], 1):
            lost = loss if place >= start else 0.0
            other = -3.0 if lost < 0.5 else -0.05
            rows.append({str(token): {"logprob": -0.1 - lost}, str(OTHER): {"logprob": other}})
        return rows

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # one packet per answer

            def do_GET(self) -> None:
                self._send(*fake.respond(self.path, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*fake.respond(self.path, body))

            def _send(self, status: int, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
