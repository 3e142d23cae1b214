"""An OpenAI-compatible server in a thread: it answers from the text like the needle model, and remembers what came."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

POLICIES = ("full", "snapkv", "ada-snapkv")
MODEL = "fake"


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


class FakeServer:
    """A context manager.

    Args:
        evicts: whether it knows our fields; otherwise it ignores them.
        tokenizes: whether it has ``/tokenize``.
        tunes: whether requests may set parameters of policies.
        finds_turns: whether it evicts chats turn by turn, and so asks others where their turns end.
        fail: from a chat's number (from 1) and body to a status and message, or None to answer it.
    """

    def __init__(
        self,
        evicts: bool = True,
        tokenizes: bool = True,
        tunes: bool = True,
        finds_turns: bool = False,
        fail: Callable[[int, dict[str, Any]], tuple[int, str] | None] = lambda number, body: None,
    ):
        self.evicts, self.tokenizes, self.tunes, self.fail = evicts, tokenizes, tunes, fail
        self.finds_turns = finds_turns
        self.asked: list[dict[str, Any]] = []
        self.tokenized: list[dict[str, Any]] = []
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
            return 200, {"tokens": [hash(word) for word in words(body)]}
        if path in ("/v1/chat/completions", "/v1/completions"):
            return self._complete(path, body)
        return 404, {"detail": "Not Found"}

    def _complete(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        policy = body.get("vllm_xargs", {}).get("kv_eviction")
        if self.evicts and policy is not None and policy not in POLICIES:
            return 400, {"error": {"message": f"kv_eviction: unknown policy {policy!r}"}}
        parameters = body.get("vllm_xargs", {}).get("kv_params")
        if parameters is not None and not self.tunes:
            return 400, {"error": {"message": "kv_params is unknown (valid: kv_eviction, kv_budget)"}}
        if parameters is not None and not parameters.startswith("kernel="):
            name = parameters.partition("=")[0]
            valid = f"requests may set for policy {policy}: kernel"
            return 400, {
                "error": {"message": f"kv_params: {name} is not a parameter of policy {policy} ({valid})"}
            }
        if self.finds_turns and "prompt" in body and policy in POLICIES:
            return 400, {"error": {"message": "kv_turns is required with --kv-eviction-config.scope turns"}}
        if policy == "no-such-policy":
            return 200, {"choices": [{"text": ""}]}
        with self._lock:
            self.asked.append(body)
            number = len(self.asked)
        failure = self.fail(number, body)
        if failure:
            return failure[0], {"error": {"message": failure[1]}}
        text = reply_to(body)
        choice = {"finish_reason": "stop", "text": text, "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": len(words(body)), "completion_tokens": len(text.split())}
        return 200, {"id": f"chatcmpl-{number}", "choices": [choice], "usage": usage}

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
