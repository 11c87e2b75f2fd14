"""Requests of the HTTP API: bodies, parameters and headers; after each one the server must still answer."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.services.host import Host
from core.errors import MoestroError
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Piece
from tests.app.conftest import QuickEngine, ended, open_host
from tests.fuzz.changes import Change
from tests.fuzz.draw import byte_change, drawn, json_change
from tests.fuzz.mutant import Mutant

HOME = "http://127.0.0.1:7860"
BODY, LINE = "body.json", "request.json"
CHAT = {
    "model": "demo",
    "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}],
    "max_tokens": 6,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stream": False,
    "user": "me",
}
TEXT = {
    "model": "demo",
    "prompt": "hello",
    "max_tokens": 6,
    "temperature": 0.5,
    "frequency_penalty": 0.5,
    "stop": ["."],
    "logprobs": 2,
    "stream_options": {"include_usage": True},
}
MESSAGE = {
    "model": "demo",
    "system": [{"type": "text", "text": "Be short."}],
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"at": "it"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "seen"}]},
    ],
    "max_tokens": 6,
    "stop_sequences": ["."],
}
RESPONSE = {
    "model": "demo",
    "instructions": "Be short.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t", "output": "seen"},
    ],
    "max_output_tokens": 6,
}
POSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "text": ("/v1/completions", TEXT),
    "message": ("/v1/messages", MESSAGE),
    "response": ("/v1/responses", RESPONSE),
}
GETS: dict[str, dict[str, Any]] = {
    "frame": {"path": "/live/frame", "params": {"layer": 1, "since": "1.0.0.0"}},
    "session zip": {"path": "/export/session.zip", "params": {"load": 1}},
    "chat zip": {"path": "/export/1.zip", "params": {}},
    "session trace": {"path": "/export/session.trace", "params": {"load": 1}},
    "chat trace": {"path": "/export/1.trace", "params": {"load": 1}},
    "models": {"path": "/v1/models", "params": {}},
    "health": {"path": "/healthz", "params": {}},
}
WORDS = (
    *"-1 0 4 1e3 NaN 9223372036854775808 0.5 x true \u0664 %00 ..%2f.. 1%20 [] %ed%a0%80 %ff +1 \uff11".split(),
    *("", "9" * 40, "9" * 5000, "x" * 60_000),
)
HEADERS = """content-type: text/plain
content-type: application/json; charset=utf-16
content-type:
host: example.org
host:
origin: http://example.org
origin: null
content-length: -1
sec-fetch-site: cross-site
range: bytes=-5-1
content-encoding: gzip
accept-encoding: \x01
authorization: Bearer \x7f
accept: LONG""".replace("LONG", "x" * 9000).split("\n")
PATHS = ("/export/{}.zip", "/export/{}.trace", "/{}", "/v1/{}", "/export/session.{}", "/live/{}")
METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "X")


class FewTokens(QuickEngine):
    """However many are asked for."""

    takes_tools = True

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec)

    def generate(
        self, messages: Sequence[Mapping[str, str]] | str, sampling: Sampling, cancel: Any = None, **how: object
    ) -> Iterator[Piece]:
        few = Sampling(max_new_tokens=min(8, sampling.max_new_tokens))
        yield from super().generate(messages, few, cancel)


class Refused(MoestroError):
    """The server's answer with a status of 400 to 499, or 503, 507."""


class Requests:
    """One application for all mutants, so that what one leaves behind is seen by the next."""

    name = "request"
    samples = (*POSTS, *GETS)

    def __init__(self) -> None:
        self._client: TestClient | None = None
        self._folder = Path(tempfile.mkdtemp())

    def app(self, host: Host) -> FastAPI:
        return build_app(host)

    def client(self) -> TestClient:
        if self._client is None:
            self.host = open_host(self._folder / "home", FewTokens)
            ended(self.host.chats.ask(None, "hello"))
            self._client = TestClient(self.app(self.host), base_url=HOME, raise_server_exceptions=True)
        return self._client

    def make(self, sample: str, folder: Path) -> None:
        if sample in POSTS:
            path, body = POSTS[sample]
            line: dict[str, Any] = {"method": "POST", "path": path, "params": {}}
            (folder / BODY).write_text(json.dumps(body))
        else:
            line = {"method": "GET", **GETS[sample]}
        (folder / LINE).write_text(json.dumps({**line, "headers": {"content-type": "application/json"}}))

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        body = 0.8 * (folder / BODY).is_file()
        params = list(GETS.get(sample, {}).get("params", ()))

        def header() -> Change:
            name, _, value = rng.choice(HEADERS).partition(":")
            return {**self._line(["headers", name], value.strip(" ")), "do": "add"}

        return drawn(
            rng,
            (0.19 * body, lambda: byte_change(rng, folder, BODY)),
            (0.81 * body, lambda: json_change(rng, folder, BODY)),
            (0.90 * bool(params), lambda: self._line(["params", rng.choice(params)], rng.choice(WORDS))),
            (0.03, lambda: self._line(["path"], rng.choice(PATHS).format(rng.choice(WORDS[:-1])))),
            (0.03, lambda: self._line(["method"], rng.choice(METHODS))),
            (0.04, header),
        )

    @staticmethod
    def _line(at: list[str | int], value: str) -> Change:
        return {"do": "set", "file": LINE, "at": at, "raw": json.dumps(value)}

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        client, line = self.client(), json.loads((folder / LINE).read_text())
        query = "&".join(f"{name}={quote(str(value), safe='%')}" for name, value in line["params"].items())
        body = (folder / BODY).read_bytes() if (folder / BODY).is_file() else None
        headers = {name: value.encode("latin-1", "replace") for name, value in line["headers"].items()}
        address = quote(line["path"], safe="/%") + (f"?{query}" if query else "")
        with client.stream(line["method"], address, content=body, headers=headers) as reply:
            told = reply.read()
        alive = client.get("/healthz")
        assert alive.status_code == 200 and alive.json()["model"] == "demo", "the server is not what it was"
        assert not alive.json()["busy"] and not alive.json()["waiting"], "an answer goes on that nobody reads"
        if not told and line["method"] == "HEAD" and reply.status_code < 500:
            return {"status": reply.status_code}
        return self.told(reply.status_code, told, reply.headers.get("content-type", ""))

    @staticmethod
    def told(status: int, body: bytes, kind: str) -> dict[str, Any]:
        """What the server said; its refusals as an error, so that their words are looked at, too."""
        assert status < 500 or status in (503, 507), f"HTTP {status}: {body[:300]!r}"
        if status >= 400:
            text = body.decode("utf-8", "replace")
            if "json" in kind and body:
                said = json.loads(text)
                error = said.get("error", said) if isinstance(said, dict) else said
                if isinstance(error, dict) and isinstance(error.get("detail"), list):  # of FastAPI, with what was sent
                    error = "; ".join(str(one.get("msg")) for one in error["detail"])
                text = error.get("message", "") or json.dumps(error) if isinstance(error, dict) else str(error)
            raise Refused(text if text.rstrip().endswith((".", "!", "?")) or not text else f"{text}.")
        seen: dict[str, Any] = {"status": status, "kind": kind}
        if "json" in kind and b"choices" in body:
            choice = json.loads(body)["choices"][0]
            seen["text"] = choice["message"]["content"] if "message" in choice else choice["text"]
        elif "event-stream" in kind:
            events = [one for one in body.decode().split("\n\n") if one and not one.startswith(":")]
            last, ends = events[-1], ("data: [DONE]", "event: message_stop", "event: response.", "event: error")
            assert last.startswith(ends), f"a stream that ends with {last!r:.80}"
            seen["events"] = len([json.loads(one.partition("data: ")[2]) for one in events if one != ends[0]])
        return seen

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        return ""  # another request may have another answer; that there is one, and what it is like, is seen above
