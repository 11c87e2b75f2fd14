"""Lossy answers are scored while nobody is answered; what came of it is kept, shown and exported."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.frames import decode
from app.server.live_state import stamp
from app.services.exports.answers import DEFINITIONS
from app.services.host import Host
from app.ui.tabs.messages import statistics
from app.wording import lossy, percent, scored
from core.engine.quality.report import Quality
from core.settings.sampling import Sampling
from core.types import Piece
from tests.app.conftest import WAIT_S, QuickEngine, asked, ended, open_host, open_store
from tests.app.test_export import read
from tests.logged import Logged

FIGURES = Quality(
    answer=1,
    tokens=48,
    scored=36,
    kl=0.0213,
    kl_most=0.05,
    agreement=0.9722,
    perplexity=3.456,
    saved_ms=1.23,
    changed=31,
    assignments=1000,
)


class LossyEngine(QuickEngine):
    """Every answer is lossy. Its quality is there when `gate` opens; `audited` is set when it is asked for."""

    gate = threading.Event()
    audited = threading.Event()
    breaks = False

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        for piece in super().generate(messages, sampling, cancel):
            if piece.stats is not None:
                number = len(self.waiting) + 1 + (self.quality.answer if self.quality is not None else 0)
                self.waiting.append(replace(FIGURES, answer=number))
                piece = replace(
                    piece, stats=replace(piece.stats, exact=False, changed=31, assignments=1000, audit=number)
                )
            yield piece

    def audit(self, stop: threading.Event | None = None) -> Quality | None:
        self.audited.set()
        if self.breaks:
            self.waiting.pop(0)
            raise ZeroDivisionError("a figure of nothing")
        return super().audit(stop) if self.gate.wait(0.01) else None


@pytest.fixture
def engine() -> type[LossyEngine]:
    kind = type("Lossy", (LossyEngine,), {"gate": threading.Event(), "audited": threading.Event()})
    kind.gate.set()
    return kind


@pytest.fixture
def lossy_host(tmp_path: Path, engine: type[LossyEngine]) -> Host:
    return open_host(tmp_path, engine)


def wait_for(what: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if what():
            return
        pause.wait(0.005)
    raise AssertionError("it never happened")


def quality_of(host: Host, chat: int | None) -> dict[str, object] | None:
    assert chat is not None
    return host.chats.messages(chat)[-1].quality


def test_an_answer_is_scored_kept_and_shown(lossy_host: Host, engine: type[LossyEngine]) -> None:
    engine.gate.clear()
    chat = asked(lossy_host, None, "one")
    assert engine.audited.wait(WAIT_S)
    assert quality_of(lossy_host, chat) is None
    assert lossy_host.models.quality is None
    before, told = stamp(lossy_host, chat), statistics(lossy_host.chats.messages(chat)[-1])
    assert told.endswith("· LOSSY 3.1 %")
    engine.gate.set()
    wait_for(lambda: quality_of(lossy_host, chat) is not None)
    assert quality_of(lossy_host, chat) == asdict(FIGURES)
    assert lossy_host.models.quality == FIGURES
    assert stamp(lossy_host, chat) != before, "no page would show it"
    assert (
        statistics(lossy_host.chats.messages(chat)[-1])
        == f"{told} · KL 0.021 · agrees 97.2 % (35 of 36 tokens, 95 % interval 86–100 %): too few tokens to tell · "
        "perplexity 3.46 · saved ~1.2 ms/token"
    )


def test_the_deck_is_told(lossy_host: Host) -> None:
    with TestClient(build_app(lossy_host), base_url="http://127.0.0.1:7860") as client:
        assert decode(client.get("/live/frame").content)[0]["quality"] is None
        chat = ended(lossy_host.chats.ask(None, "one")).chat_id
        wait_for(lambda: quality_of(lossy_host, chat) is not None)
        told = decode(client.get("/live/frame").content)[0]["quality"]
        assert {name: told[name] for name in asdict(FIGURES)} == asdict(FIGURES)
        assert (told["agreed"], told["verdict"]) == (35, "unclear")
        assert (told["low"], told["high"]) == pytest.approx((0.858, 0.995), abs=0.001)


def test_exact_answers_say_so_and_start_nothing(host: Host) -> None:
    chat = asked(host, None, "one")
    assert "· EXACT" in statistics(host.chats.messages(chat)[-1])
    assert host.models.quality is None
    assert not any(thread.name == "moestro-quality" for thread in threading.enumerate())


def test_a_quality_finds_its_answer(lossy_host: Host, engine: type[LossyEngine]) -> None:
    engine.gate.clear()
    first = ended(lossy_host.chats.ask(None, "one")).chat_id
    second = ended(lossy_host.chats.ask(None, "two")).chat_id
    lossy_host.chats.complete([{"role": "user", "content": "for no chat"}], Sampling(max_new_tokens=2)).join(WAIT_S)
    third = ended(lossy_host.chats.ask(None, "three")).chat_id
    engine.gate.set()
    wait_for(lambda: quality_of(lossy_host, third) is not None)
    assert [q["answer"] for q in (quality_of(lossy_host, c) for c in (first, second, third)) if q] == [1, 2, 4]


def test_nothing_is_scored_while_an_answer_is_written(tmp_path: Path, engine: type[LossyEngine]) -> None:
    tokens = threading.Semaphore(0)

    class Gated(engine):  # type: ignore[misc, valid-type]
        def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
            for piece in super().generate(messages, sampling, cancel):
                assert tokens.acquire(timeout=WAIT_S)
                yield piece

    host = open_host(tmp_path, Gated)
    engine.gate.clear()
    first, second = host.chats.ask(None, "one"), host.chats.ask(None, "two")
    for _ in range(14):  # all of the first answer
        tokens.release()
    ended(first)
    assert not engine.audited.is_set()
    assert quality_of(host, first.chat_id) is None
    for _ in range(14):
        tokens.release()
    ended(second)
    engine.gate.set()
    wait_for(lambda: quality_of(host, second.chat_id) is not None)
    assert quality_of(host, first.chat_id) is not None


def test_an_audit_that_fails_is_logged_and_skipped(lossy_host: Host, engine: type[LossyEngine], caplog: Logged) -> None:
    engine.breaks = True
    with caplog.at_level(logging.ERROR, "moestro.app"):
        first = ended(lossy_host.chats.ask(None, "one")).chat_id
        wait_for(lambda: any(r.exc_info and "a figure of nothing" in str(r.exc_info[1]) for r in caplog.records))
    engine.breaks = False
    second = ended(lossy_host.chats.ask(None, "two")).chat_id
    wait_for(lambda: quality_of(lossy_host, second) is not None)
    assert quality_of(lossy_host, first) is None


def test_a_deleted_chat_and_an_unloaded_model_end_it(lossy_host: Host, engine: type[LossyEngine]) -> None:
    engine.gate.clear()
    chat = asked(lossy_host, None, "one")
    lossy_host.chats.delete(chat)
    other = ended(lossy_host.chats.ask(None, "two")).chat_id
    engine.gate.set()
    wait_for(lambda: quality_of(lossy_host, other) is not None)
    engine.gate.clear()
    last = ended(lossy_host.chats.ask(None, "three")).chat_id
    lossy_host.models.unload()
    engine.gate.set()
    assert quality_of(lossy_host, last) is None
    assert lossy_host.models.quality is None


def test_closing_does_not_wait_for_what_is_not_scored(tmp_path: Path, engine: type[LossyEngine]) -> None:
    engine.gate.clear()
    host = open_host(tmp_path, engine)
    chat = ended(host.chats.ask(None, "one")).chat_id
    assert engine.audited.wait(WAIT_S)
    host.close()
    assert not any(thread.name == "moestro-quality" for thread in threading.enumerate())
    store = open_store(tmp_path)
    assert chat is not None
    assert store.chats.messages(chat)[-1].quality is None


def test_it_is_in_the_export(lossy_host: Host, engine: type[LossyEngine], tmp_path: Path) -> None:
    from app.services.exports import archive

    chat = asked(lossy_host, None, "one")
    wait_for(lambda: quality_of(lossy_host, chat) is not None)
    engine.gate.clear()
    ended(lossy_host.chats.regenerate(chat))
    tables, manifest = read(archive.write(lossy_host.store, tmp_path / "chat.zip", chat=chat))
    table = tables["answers"]
    assert list(table) == list(DEFINITIONS) == list(manifest["definitions"]["answers"])
    assert table["chat"].tolist() == [chat, chat]
    old, new = (row for _, row in table.iterrows())
    assert (old["rate"], old["exact"], old["new_tokens"], old["state"]) == (0.031, False, 12, "done")
    for name in ("scored", "kl", "kl_most", "agreement", "perplexity", "saved_ms"):
        assert old[name] == getattr(FIGURES, name)
    assert new[["scored", "kl", "agreement", "perplexity", "saved_ms"]].isna().all()
    assert new["rate"] == 0.031
    assert set(table["answer"]) == set(tables["tokens"]["answer"])
    session, _ = read(archive.write(lossy_host.store, tmp_path / "load.zip", load=lossy_host.models.load_id))
    assert session["answers"].equals(table)


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (0.00042, "0.042 %"), (0.031, "3.1 %"), (0.314, "31.4 %"), (1.0, "100 %")]
)
def test_percentages(share: float, text: str) -> None:
    assert percent(share) == text


def test_the_words_of_a_line() -> None:
    assert lossy({"exact": True}) == lossy({"exact": True, "closeness": 0.0}) == "EXACT"
    assert lossy({"exact": True, "closeness": 1e-6}) == "EXACT UP TO ROUNDING"
    assert lossy({"exact": True, "weights": "int8"}) == "EXACT for int8 weights"
    assert lossy({"exact": False, "closeness": 1e-6, "weights": "int8"}) == "LOSSY"
    assert lossy({"exact": False}) == "LOSSY", "stored before the rate was"
    assert lossy({"exact": False, "changed": 0, "assignments": 100}) == "LOSSY 0 %"
    assert scored(None) == []
    lost = replace(FIGURES, kl=None, agreement=None, perplexity=None, scored=0, note="not scored: too late")
    assert scored(asdict(lost)) == ["not scored: too late", "saved ~1.2 ms/token"]
