"""A client that throws at the server what nobody should send: malformed and stalled bodies, uploads beyond the quota,
batches of files that hold no prompts, and a model whose chat template never ends. Each has to be refused in words."""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from app.client.page import Failed, Http, Page
from bench.soak.score import Score

MB = 1 << 20
PATIENCE_S = 60.0
KINDS = (
    "application/json",
    "Application/JSON",
    "text/plain",
    "application/json; charset=utf-16",
    "multipart/form-data",
    "",
)
PATHS = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/gradio_api/run/predict",
    "/gradio_api/upload",
    "/v1/nothing",
)
BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[" * 5000 + b"]" * 5000,
    b'{"messages": ' + b'{"a": ' * 200 + b"1" + b"}" * 201,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": null, "max_tokens": 99999999999999999999}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}',
    b'{"data": [{"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}], "fn_index": 0}',
    b"\xff\xfe{\x00}\x00",
    b"a=b&" * 10_000,
)
LINES: tuple[bytes, ...] = (
    b'{"prompt": "What does sorted return?", "max_tokens": 4}',
    b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "def f(", "max_tokens": 3}}',
    b'{"prompt": 3}',
    b"no JSON",
    b'{"messages": [{"role": "nobody", "content": "x"}]}',
    b'{"prompt": "' + b"x" * 100_000 + b'"}',
    b"\xff\x00",
)
CONFLICT = 409  # a batch was refused, for example because the model is answering
ATTACK = "attack"  # the chat in which a hostile template never ends, by computing one of these; constants alone would
HOSTILE = (  # be computed when it is compiled, and the model would be refused at load
    "{% set n = messages | length + 8 %}{{ n ** (n ** (n ** n)) }}",
    "{{ 'a' * (messages | length * 10000000000) }}",
    "{% for i in range(10 ** 5) %}{% for j in range(10 ** 5) %}{{ ('x ' * 99) | wordwrap(i + 1) | length }}{% endfor %}"
    "{% endfor %}",
    "{{ messages[-1].content | center(10 ** 10) }}",
)


class Attacker(threading.Thread):
    """Attacks until `ended` is set. While `calm` is not set it starts nothing that needs a model."""

    def __init__(
        self, url: str, dice: random.Random, score: Score, calm: threading.Event, ended: threading.Event
    ) -> None:
        super().__init__(name="soak-attacker", daemon=True)
        self._http, self._dice, self._score = Http(url), dice, score
        self._calm, self._ended = calm, ended

    def run(self) -> None:
        """One attack after another."""
        attacks: list[Callable[[], None]] = [self._bodies, self._bodies, self._stalled, self._uploads, self._batch]
        while not self._ended.wait(self._dice.uniform(0.2, 1.5)):
            attack = self._dice.choice(attacks)
            try:
                attack()
            except Failed as error:
                if not self._ended.is_set():
                    self._score.error(f"attack{attack.__name__}: {error}")
            except Exception as error:
                self._score.error(f"attack: unexpected in the bench: {type(error).__name__} {error}")

    def _bodies(self) -> None:
        """A body that is wrong somewhere, to any route, under any content type."""
        path, kind, body = self._dice.choice(PATHS), self._dice.choice(KINDS), self._dice.choice(BODIES)
        self._note("malformed body", self._post(path, body, kind))

    def _post(self, path: str, body: bytes, kind: str) -> int:
        connection = HTTPConnection(self._http.host, self._http.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, body, {"content-type": kind} if kind else {})
            reply = connection.getresponse()
            said = reply.read()
        except (OSError, HTTPException) as error:
            raise Failed(f"{path} {kind} {body[:40]!r}: {type(error).__name__} {error}") from error
        finally:
            connection.close()
        if reply.status >= 500 and reply.status != 503:  # 503: too much at once, which is a refusal
            raise Failed(f"{path} {kind} {body[:40]!r}: {reply.status} {said[:200].decode(errors='replace')}")
        return reply.status

    def _note(self, what: str, status: int) -> None:
        (self._score.did if status < 300 else self._score.refused)(what)

    def _stalled(self) -> None:
        """Many large bodies that do not arrive."""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._http.host}:{self._http.port}\r\n"
        open_ = list[socket.socket]()
        try:
            for _ in range(self._dice.randint(5, 60)):
                one = socket.create_connection((self._http.host, self._http.port), PATIENCE_S)
                one.sendall(f"{head}content-type: application/json\r\ncontent-length: {8 * MB}\r\n\r\n".encode())
                one.settimeout(0.2)
                open_.append(one)
            for one in open_:
                try:
                    one.sendall(b"[" * (self._dice.randint(0, 2) * MB))
                except OSError:
                    pass  # the server reads no further, or has refused it
            self._ended.wait(self._dice.uniform(0, 3))
            if self._http.ask("/healthz")[0] != 200:
                self._score.error("stalled bodies: the server's health does not answer")
        finally:
            for one in open_:
                one.close()
        self._score.did("stalled bodies")

    def _uploads(self) -> None:
        """Files at the same time, some larger than may be, some of a name that leads elsewhere."""
        sizes = [self._dice.choice((1, 1000, MB, 20 * MB, 70 * MB)) for _ in range(self._dice.randint(1, 6))]
        status = dict[int, int]()

        def send(size: int) -> None:
            try:
                found = upload(self._http, "../../" + "x" * self._dice.randint(1, 300), b"x" * size)[0]
            except Failed as error:
                if not self._ended.is_set():
                    self._score.error(f"upload of {size}: {error}")
                return
            status[found] = status.get(found, 0) + 1

        threads = [threading.Thread(target=send, args=(size,)) for size in sizes]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        for found, count in status.items():
            for _ in range(count):
                self._note("upload", found)

    def _batch(self) -> None:
        """As a rule refused, since clients keep the model busy: the operator starts those that run."""
        if self._calm.is_set():
            status = batch(self._http, self._dice, lambda: self._ended.wait(self._dice.uniform(0.5, 8)))
            self._note("batch", status)


def batch(http: Http, dice: random.Random, wait: Callable[[], object]) -> int:
    """A batch of lines of which some are no prompts, stopped after `wait` or not. The status of its answers, of the
    upload where that was refused, or 409 where the batch was."""
    lines = [dice.choice(LINES) for _ in range(dice.randint(1, 6))]
    status, paths = upload(http, f"{dice.getrandbits(40):x}.jsonl", b"\n".join(lines))
    if not paths:
        return status
    page = Page(http, dice)
    page.set("batch-upload", {"path": paths[0], "meta": {"_type": "gradio.FileData"}})
    page.fire("batch-go", "click")
    if page.value("batch-alert"):
        return CONFLICT
    wait()
    if dice.random() < 0.5:
        page.fire("batch-cancel", "click")
    status, answers = http.ask("/export/batch.jsonl")
    if status == 200:
        for line in answers.splitlines():
            json.loads(line)
    return status


def upload(http: Http, name: str, content: bytes) -> tuple[int, list[str]]:
    """An upload's status, and where the server keeps it."""
    edge = b"--edge"
    head = f'\r\ncontent-disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    connection = HTTPConnection(http.host, http.port, timeout=PATIENCE_S)
    try:
        kind = {"content-type": "multipart/form-data; boundary=edge"}
        connection.request("POST", "/gradio_api/upload", edge + head + content + b"\r\n" + edge + b"--\r\n", kind)
        reply = connection.getresponse()
        said = reply.read()
    except ConnectionError:
        return 413, []  # refused while the body was on its way
    except (OSError, HTTPException) as error:
        raise Failed(f"upload of {len(content)} bytes: {type(error).__name__} {error}") from error
    finally:
        connection.close()
    if reply.status >= 500 and reply.status != 503:
        raise Failed(f"upload of {len(content)} bytes: {reply.status} {said[:200].decode(errors='replace')}")
    return reply.status, json.loads(said) if reply.status == 200 else []


def hostile_model(demo: Path, folder: Path, dice: random.Random) -> Path:
    """A copy of the demo model whose template never ends in one chat."""
    to = folder / f"hostile-{dice.getrandbits(32):x}"
    shutil.copytree(demo, to, copy_function=shutil.copyfile)
    template = to / "chat_template.jinja"
    text = template.read_text("utf-8")
    trap = f"{{% if messages[-1].content == '{ATTACK}' %}}{dice.choice(HOSTILE)}{{% endif %}}"
    template.write_text(trap + text, "utf-8")
    return to
