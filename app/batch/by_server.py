"""Answers a batch with any server of the OpenAI API, several requests at a time. Standard library only."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from time import time
from typing import Any

from app.batch.lines import KINDS, Line
from app.batch.records import answered, refused
from core.errors import MoestroError

AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses after which a request is sent again
FIRST_S, LONGEST_S = 1.0, 60.0  # waits between two attempts, doubled each time
URLS = {kind: url for url, kind in KINDS.items()}
Put = Callable[[dict[str, Any]], None]


class Failing(MoestroError):
    """The server does not answer."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. `retries`: how often one is sent again; `timeout_s`: how long one may take."""

    url: str
    key: str = ""
    model: str = ""
    retries: int = 5
    timeout_s: float = 600.0

    def address(self, line: Line) -> str:
        """Of the API that a line asks for."""
        return self.url.rstrip("/").removesuffix("/v1") + URLS[line.kind]


class ByServer:
    """`wait_s(seconds)` is called between two attempts."""

    def __init__(self, server: Server, at_once: int, wait_s: Callable[[float], object] | None = None) -> None:
        self._server, self._at_once, self._over = server, at_once, threading.Event()
        self._wait_s = wait_s or self._over.wait

    def run(self, lines: Iterable[Line], put: Put) -> Iterator[int]:
        """Send lines until there are no more, and `put` each one's record. Yields the tokens of each answer. Raises
        Failing when the server does not answer any more, after what it still answered was put."""
        source, pending, failing = iter(lines), dict[Future[dict[str, Any]], Line](), None
        with ThreadPoolExecutor(self._at_once, "moestro-batch") as pool:
            try:
                while True:
                    while failing is None and len(pending) < self._at_once and (line := next(source, None)) is not None:
                        pending[pool.submit(self._answer, line)] = line
                    if not pending:
                        break
                    for one in wait(pending, return_when=FIRST_COMPLETED).done:
                        pending.pop(one)
                        try:
                            record = one.result()
                        except Failing as error:
                            failing = failing or error
                            self._over.set()  # others need not be sent again either
                            continue
                        put(record)
                        yield _tokens(record)
            finally:
                self._over.set()
                for one in pending:
                    one.cancel()
        if failing is not None:
            raise failing

    def _answer(self, line: Line) -> dict[str, Any]:
        """The record of a line. Raises Failing."""
        server, pause_s, problem = self._server, FIRST_S, ""
        body = {**line.body, **({"model": server.model} if server.model else {}), "stream": False}
        headers = {
            "content-type": "application/json",
            **({"authorization": f"Bearer {server.key}"} if server.key else {}),
        }
        for attempt in range(server.retries + 1):
            request = urllib.request.Request(server.address(line), json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=server.timeout_s) as response:
                    return answered(line, json.loads(response.read()))
            except urllib.error.HTTPError as error:
                said = error.read()
                if error.code not in AGAIN:
                    return refused(line, _message(said, error.code), error.code, _error(said))
                problem, after_s = f"{error.code} {error.reason}", _after_s(error.headers.get("retry-after"))
            except (OSError, HTTPException, ValueError, KeyError) as error:
                problem, after_s = str(getattr(error, "reason", None) or error) or type(error).__name__, None
            if attempt == server.retries or self._over.is_set():
                break
            self._wait_s(after_s if after_s is not None else pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
        raise Failing(
            f"{server.address(line)} does not answer ({problem}). What was answered is kept: run the command again "
            "when the server is back, to go on."
        )


def _after_s(said: str | None) -> float | None:
    """Seconds that a server asks to wait, at most LONGEST_S."""
    if not said:
        return None
    try:
        seconds = float(said) if said.strip().isdigit() else parsedate_to_datetime(said).timestamp() - time()
    except ValueError:
        return None
    return min(max(0.0, seconds), LONGEST_S)


def _error(said: bytes) -> dict[str, Any] | None:
    """The object under "error" of an answer."""
    try:
        found = json.loads(said)
    except ValueError:
        return None
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else None


def _message(said: bytes, status: int) -> str:
    error = _error(said)
    text = str(error.get("message", "")) if error else said.decode("utf-8", "replace")[:500]
    return text or f"The server answered with status {status}."


def _tokens(record: dict[str, Any]) -> int:
    if "answer_tokens" in record:
        return int(record["answer_tokens"] or 0)
    body = (record.get("response") or {}).get("body") or {}
    return int((body.get("usage") or {}).get("completion_tokens") or 0)
