"""Answers a batch with any server of the OpenAI API, several requests at a time."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from time import time
from typing import Any

import httpx

from app.services.batch.endpoint import HOST, Server
from app.services.batch.lines import Line
from app.services.batch.records import answered, failed, refused
from app.services.batch.reply import Malformed, Reply, post
from core.errors import MoestroError

AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses after which a request is sent again
FIRST_S, LONGEST_S = 1.0, 60.0  # waits between two attempts, doubled each time
OF_LINE = (400, 413, 422)  # statuses that one line gets for what it asks; any other may concern all
BAD_GATEWAY = 502  # what is recorded of a reply that makes no sense
SILENT, REFUSED = 3, 16  # lines in a row without an answer that end a run: without any reply, and with a status
LEAST_KEY = 8  # characters; shorter ones are words in the place of a key
KEPT = "What was answered is kept: run the command again {}, to go on."
Put = Callable[[dict[str, Any]], None]


class Failing(MoestroError):
    """The server answers no line: none got a record for that."""


@dataclass(frozen=True, slots=True)
class Doubtful:
    """A line without an answer, for a reason that may concern every line. It gets its record once another line is
    answered. `most` in a row end the run; `own`: a few of them at the end of the file are the lines' own."""

    record: dict[str, Any]
    why: str
    most: int
    own: bool = False


class ByServer:
    """For one run. `wait_s(seconds)` is called between two attempts."""

    def __init__(self, server: Server, at_once: int, wait_s: Callable[[float], object] | None = None) -> None:
        self._server, self._at_once, self._over = server, at_once, threading.Event()
        self._wait_s, self._failing = wait_s or self._over.wait, ""

    def run(self, lines: Iterable[Line], put: Put) -> Iterator[int]:
        """Send lines until there are no more, and `put` each one's record. Yields the tokens of each answer. Raises
        Failing when the server answers no line any more, after what it still answered was put."""
        held, any_answered = list[Doubtful](), False

        def put_held() -> Iterator[int]:
            for one in held:
                put(one.record)
                yield 0
            held.clear()

        with (
            self._client() as client,
            closing(self._outcomes(client, lines)) as outcomes,
        ):
            for found in outcomes:
                if isinstance(found, Doubtful):
                    held.append(found)
                    if len(held) >= found.most:
                        self._fail(found.why)
                    continue
                if not failed(found):
                    any_answered = True
                    yield from put_held()
                put(found)
                yield _tokens(found)
        if not any_answered:
            self._fail(next((one.why for one in held if not one.own), ""))
        if self._failing:
            raise Failing(self._failing)
        yield from put_held()

    def _outcomes(self, client: httpx.Client, lines: Iterable[Line]) -> Generator[dict[str, Any] | Doubtful]:
        """What became of each line that was sent. None is sent after `_fail`."""
        source, pending = iter(lines), set[Future[dict[str, Any] | Doubtful]]()
        with ThreadPoolExecutor(self._at_once, "moestro-batch") as pool:
            try:
                while True:
                    while (
                        not self._failing and len(pending) < self._at_once and (line := next(source, None)) is not None
                    ):
                        pending.add(pool.submit(self._answer, client, line))
                    if not pending:
                        return
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for one in done:
                        try:
                            found = one.result()
                        except Failing as error:
                            self._fail(str(error))
                        else:
                            yield found
            finally:
                self._over.set()
                for one in pending:
                    one.cancel()

    def _fail(self, why: str) -> None:
        """End the run for the first of such reasons; "" is none."""
        self._failing = self._failing or why
        if self._failing:
            self._over.set()  # what is being sent need not be sent again

    def _answer(self, client: httpx.Client, line: Line) -> dict[str, Any] | Doubtful:
        """The record of a line. Raises Failing for what concerns every line."""
        server, pause_s = self._server, FIRST_S
        body = {**line.body, **({"model": server.model} if server.model else {}), "stream": False}
        address, sent = server.address(line), json.dumps(body).encode()
        for attempt in range(server.retries + 1):
            got: Reply | httpx.RequestError
            try:
                got = post(client, address, sent, server.timeout_s)
            except httpx.RequestError as error:
                got = error
            if isinstance(got, Reply) and not got.cut and got.status not in AGAIN:
                return self._record(line, got)
            if attempt == server.retries or self._over.is_set():
                break
            after_s = _after_s(got.headers.get("retry-after")) if isinstance(got, Reply) else None
            self._wait_s(after_s if after_s is not None else pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
        later = KEPT.format("when the server is back")
        if isinstance(got, Reply):
            if got.status not in AGAIN:
                return _malformed(line, f"it was cut off ({_printable(got.cut)})")
            why = f"{address} answers no line ({self._describe(got)}). {later}"
            return Doubtful(_refused(line, got), why, REFUSED, own=True)
        problem = _printable(str(got)) or type(got).__name__
        why = f"{address} does not answer ({problem}). {later}"
        if isinstance(got, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
            raise Failing(why)
        return Doubtful(refused(line, f"The server did not reply: {problem}.", BAD_GATEWAY), why, SILENT)

    def _record(self, line: Line, reply: Reply) -> dict[str, Any] | Doubtful:
        """The record of a line whose request is not to be sent again. Raises Failing."""
        status, server = reply.status, self._server
        if 200 <= status < 300:
            try:
                return answered(line, reply.answer(line.kind))
            except Malformed as problem:
                return _malformed(line, str(problem))
        if status == 401:
            wrong = "does not accept the key" if server.key else "asks for a key"
            with_key = KEPT.format("with the right one (--api-key or OPENAI_API_KEY)")
            raise Failing(f"{server.host} {wrong} ({self._describe(reply)}). {with_key}")
        if status in OF_LINE:
            return _refused(line, reply)
        right = KEPT.format("with the right --endpoint, --model and key")
        return Doubtful(
            _refused(line, reply),
            f"{server.address(line)} refuses every line ({self._describe(reply)}). {right}",
            REFUSED,
        )

    def _client(self) -> httpx.Client:
        """Raises MoestroError."""
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",  # so that the limit of a reply is one
            **({"authorization": f"Bearer {self._server.key}"} if self._server.key else {}),
        }
        try:
            return httpx.Client(
                headers=headers,
                timeout=self._server.timeout_s,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._at_once),
                follow_redirects=False,
                event_hooks={"response": [self._refuse_redirect]},  # before httpx makes sense of its address
                verify=_certificates(),
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:  # ImportError: for SOCKS
            raise MoestroError(
                f"No connection can be prepared: {_printable(str(error))}. Check the environment variables of a proxy: "
                "HTTP_PROXY, HTTPS_PROXY and ALL_PROXY."
            ) from error

    def _refuse_redirect(self, response: httpx.Response) -> None:
        """Raises Failing for one."""
        if 300 <= response.status_code < 400:
            raise Failing(
                f"{self._server.host} redirects to {_host(response.headers.get('location', ''))} "
                f"({response.status_code}). Neither prompts nor the key are sent there. If that is the server you "
                "mean, give its address as --endpoint."
            )

    def _describe(self, reply: Reply) -> str:
        """A status with the server's message, for the terminal; the key is removed from it."""
        message, key = _printable(reply.message), self._server.key
        return f"{reply.status}: {message.replace(key, '...') if len(key) >= LEAST_KEY else message}"


@cache
def _certificates() -> ssl.SSLContext:
    """Those that the system trusts. To read them takes a tenth of a second."""
    return ssl.create_default_context()


def _refused(line: Line, reply: Reply) -> dict[str, Any]:
    return refused(line, reply.message, reply.status, reply.error)


def _malformed(line: Line, problem: str) -> dict[str, Any]:
    message = f"The server's reply is malformed: {problem}."
    return refused(line, message, BAD_GATEWAY, {"message": message, "type": "malformed_reply"})


def _host(location: str) -> str:
    """The host that a redirect names, without what else may be in its address."""
    try:
        url = httpx.URL(location)
    except (httpx.InvalidURL, UnicodeError):
        return "another address"
    return url.netloc.decode() if HOST.fullmatch(url.host) else "another address"


def _printable(text: str) -> str:
    """One line that moves no cursor."""
    return " ".join("".join(char if char.isprintable() else " " for char in text[:500]).split())


def _after_s(retry_after: str | None) -> float | None:
    """Seconds that a server asks to wait, at most LONGEST_S."""
    if not retry_after:
        return None
    try:
        seconds = (
            float(retry_after)
            if retry_after.strip().isdigit()
            else parsedate_to_datetime(retry_after).timestamp() - time()
        )
    except (ValueError, OverflowError, OSError):
        return None
    return min(max(0.0, seconds), LONGEST_S)


def _tokens(record: dict[str, Any]) -> int:
    if "answer_tokens" in record:
        return int(record["answer_tokens"] or 0)
    body = (record.get("response") or {}).get("body") or {}
    return int((body.get("usage") or {}).get("completion_tokens") or 0)
