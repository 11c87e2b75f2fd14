"""The real server killed (SIGKILL) at random moments of a chat, an import, a calibration, an export, and started anew.

MOESTRO_KILLS=30 spreads so many moments over the four (default 8); MOESTRO_SEED draws others. A moment is a signal of
progress and a random delay after it: the delay is what is tested, nothing waits for it to be right.
"""

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from core.memory.pack import check, verify
from core.profile import load
from tests.client.page import Failed, Page
from tests.client.process import Server

pytestmark = [pytest.mark.long(0.5), pytest.mark.timeout(1800)]
KILLS = int(os.environ.get("MOESTRO_KILLS", "8"))
SEED = int(os.environ.get("MOESTRO_SEED", "1"))
PATIENCE_S = 120.0
EVICTIONS = ("lru", "lfu", "fifo", "random")


class Crashing:
    """A server with its data, the page of one who uses it, and what must be there after every start."""

    def __init__(self, home: Path) -> None:
        self.server, self.dice = Server(home), random.Random(SEED)
        self.page = Page(self.server.http, self.dice)
        self.texts: dict[int, str] = {}  # message -> what was last found of it
        self.kills = 0

    def kill(self) -> None:
        """The process alone, as the system's killer does; its helpers have to end by themselves."""
        helpers = psutil.Process(self.server.process.pid).children(recursive=True)
        self.server.process.kill()
        self.server.process.wait()
        _, left = psutil.wait_procs(helpers, PATIENCE_S)
        assert not left, f"helper processes outlived the server: {left}"
        self.kills += 1

    def start(self) -> None:
        """Again, with the same data; everything that holds after any crash is asserted here."""
        settings = {name: self.page.value(name) for name in ("set-eviction", "set-budget-text")}
        self.server.start()
        self.page = Page(self.server.http, self.dice)
        assert {name: self.page.value(name) for name in settings} == settings, "a setting was forgotten"
        with closing(sqlite3.connect(f"{(self.server.home / 'moestro.sqlite3').as_uri()}?mode=ro", uri=True)) as db:
            assert db.execute("PRAGMA quick_check").fetchall() == [("ok",)]
            found = dict(db.execute("SELECT id, text FROM messages").fetchall())
            assert not db.execute("SELECT 1 FROM messages WHERE state = 'writing'").fetchall()
        lost = {one for one, text in self.texts.items() if found.get(one) != text}
        assert not lost, f"messages of earlier answers changed: {lost}"
        self.texts = found
        assert not list(self.server.home.glob("exports/*")), "half an export stayed"
        assert "Traceback" not in self.server.log.read_text(errors="replace"), self.server.log.read_text()

    def turn(self) -> None:
        """A setting is moved, and has been taken when this returns."""
        self.page.turn("set-eviction", self.dice.choice(EVICTIONS))
        self.page.set("set-budget-text", f"{self.dice.randint(30, 90)}%")
        self.page.fire("set-budget-text", "submit")

    def wait(self, is_so: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < end, f"never came: {what}"
            time.sleep(0.01)

    def state(self, **asked: object) -> dict[str, Any]:
        return self.server.http.json("/live/state?" + "&".join(f"{k}={v}" for k, v in asked.items()))


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    crashing = Crashing(tmp_path_factory.mktemp("killed"))
    yield crashing
    print(f"{crashing.kills} kills")
    crashing.page.fire("new-chat", "click")
    crashing.page.set("message", "Is everything there?")
    crashing.page.fire("message", "submit")
    chat = crashing.page.value("tail")["chat"]
    crashing.wait(lambda: crashing.state(chat=chat)["answer"] is None, "an answer after all the crashes")
    assert crashing.server.end() == ""


@pytest.mark.parametrize("moment", range(-(-KILLS // 4)))
def test_in_an_answer_nothing_is_lost_that_was_shown(crashing: Crashing, moment: int) -> None:
    page, dice = crashing.page, crashing.dice
    crashing.turn()
    if page.value("tail").get("chat") and dice.random() < 0.4:
        page.fire("chat", "select", {"do": "regenerate"})
    else:
        page.fire("new-chat", "click")
        page.set("message", f"Question {moment}: what does heapq do?")
        page.fire("message", "submit")
    chat = page.value("tail")["chat"]
    until, seen, answer = dice.choice((0, 1, 20, 60, 150)), "", None
    while len(seen) < until:
        told = crashing.state(chat=chat, since=len(seen), **({} if answer is None else {"answer": answer}))["answer"]
        if told is None:
            break  # it has ended: killed just then is a moment, too
        answer = told["id"]
        seen = seen[: told["from"]] + told["text"]
    time.sleep(dice.uniform(0, 0.1))
    crashing.kill()
    crashing.start()
    if answer is not None:
        assert crashing.texts[answer].startswith(seen), (seen, crashing.texts[answer])
    crashing.page.set("tail", {"open": True, "chat": chat, "stamp": "", "turn": "", "sent": False})
    crashing.page.fire("tail", "end")
    assert seen.strip() in str(crashing.page.value("chat")), "what is stored is shown"


@pytest.mark.parametrize("moment", range(-(-(KILLS - 1) // 4)))
def test_an_import_leaves_a_whole_pack_or_none_and_is_gone_on_with(crashing: Crashing, moment: int) -> None:
    page, dice, packs = crashing.page, crashing.dice, crashing.server.home / "packs"
    crashing.turn()
    page.set("import-source", "demo")
    page.set("import-format", ("int8", "int4-g32", "mxfp4")[moment % 3])
    until = dice.uniform(0, 1.0)
    page.fire("import-start", "click")
    assert page.value("import-alert") == ""
    crashing.wait(
        lambda: (job := crashing.state()["import"])["share"] >= until or job["state"] != "running", "its share"
    )
    time.sleep(dice.uniform(0, 0.05))
    crashing.kill()
    crashing.start()
    whole = finished(packs)
    assert all(not verify(pack).problems for pack in whole)
    if not whole:
        job = crashing.state()["import"]
        if job is not None and job["resume"]:
            crashing.page.fire("import-resume", "click")
        else:
            crashing.page.set("import-source", "demo")
            crashing.page.set("import-format", ("int8", "int4-g32", "mxfp4")[moment % 3])
            crashing.page.fire("import-start", "click")
        crashing.wait(lambda: crashing.state()["import"]["state"] == "done", "the rest of the import")
        whole = finished(packs)
    assert len(whole) == 1 and not verify(whole[0]).problems and check(whole[0]).layers
    crashing.page.fire("library-refresh", "click")
    crashing.page.fire("models", "select", {"entry": str(whole[0])})
    crashing.page.fire("delete-model-yes", "click")
    assert not [one for one in packs.iterdir() if one.is_dir()], "something of the import stayed"


def finished(packs: Path) -> list[Path]:
    """What looks like a pack."""
    return [one for one in packs.iterdir() if one.is_dir() and one.suffix != ".partial"]


@pytest.mark.parametrize("moment", range(-(-(KILLS - 2) // 4)))
def test_a_profile_is_the_old_one_or_the_new_one(crashing: Crashing, moment: int) -> None:
    page, dice, profiles = crashing.page, crashing.dice, crashing.server.home / "profiles"
    page.set("calibration-parts", ["counts", "pairs", "gate_recall"])
    page.set("calibration-limit", 300)
    if not profiles.exists():
        page.fire("calibration-go", "click")
        crashing.wait(lambda: crashing.state()["jobs"]["calibration"]["state"] == "done", "the first profile")
    (file,) = profiles.glob("*.safetensors")
    old = file.read_bytes()
    crashing.turn()
    page.set("calibration-limit", 600 + 100 * moment)
    until = dice.uniform(0, 1.0)
    page.fire("calibration-go", "click")
    crashing.wait(
        lambda: (job := crashing.state()["jobs"]["calibration"])["share"] >= until or job["state"] != "running",
        "its share",
    )
    time.sleep(dice.uniform(0, 0.05))
    crashing.kill()
    now = file.read_bytes()
    assert load(file).parts(), "it opens"
    crashing.start()
    assert file.read_bytes() == now, "a start changes no profile"
    if now == old:
        assert load(file).tokens <= 600 + 100 * max(0, moment - 1)
    left = [one.name for one in profiles.iterdir() if one != file]
    assert not left, f"half a profile stayed: {left}"


@pytest.mark.parametrize("moment", range(-(-(KILLS - 3) // 4)))
def test_half_an_export_never_stays(crashing: Crashing, moment: int) -> None:
    crashing.turn()
    path = crashing.dice.choice(("/export/session.zip", "/export/session.trace"))
    began = time.monotonic()
    status, whole = crashing.server.http.ask(path)
    took_s = time.monotonic() - began
    if status != 200:  # nothing was recorded since the last start: so be it recorded
        crashing.page.set("message", "Record something")
        crashing.page.fire("message", "submit")
        chat = crashing.page.value("tail")["chat"]
        crashing.wait(lambda: crashing.state(chat=chat)["answer"] is None, "an answer to export")
        began = time.monotonic()
        status, whole = crashing.server.http.ask(path)
        took_s = time.monotonic() - began
    assert status == 200 and whole
    got: list[bytes] = []

    def ask() -> None:
        try:
            got.append(crashing.server.http.ask(path)[1])
        except Failed:
            pass  # the server died in the middle

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(crashing.dice.uniform(0, took_s))
    crashing.kill()
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    crashing.start()
    assert crashing.server.http.ask("/export/session.zip")[0] in (200, 404)
