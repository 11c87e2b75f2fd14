"""What the page calls what the engine says."""

from __future__ import annotations

import ast

import pytest

from app.server import frames
from app.services.answer_queue import AnswerQueue, Request
from app.ui.controls import label
from app.ui.tabs.analysis_views import HEADS
from app.ui.theme import ROOT
from app.wording import describe_change, lossy
from core.settings.config import params
from core.settings.loading import LoadSpec
from core.settings.param import declared
from core.settings.sampling import Sampling
from tests.fakes import FakeEngine

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("telemetry off", "Telemetry off"),
        ("eviction lru → lfu", "Cache policy: LRU → LFU"),
        ("miss wait → substitute_drop", "When an expert is missing: Wait for it (exact) → Use another, else leave out"),
        ("budget 50% → 6.5GB", "Memory budget: 50% → 6.5GB"),
        ("eviction.lfru.half_life 32 → 64", "Half-life: 32 → 64"),
        ("the device ran out of memory: fewer experts", "the device ran out of memory: fewer experts"),
        ("eviction", "eviction"),
    ],
)
def test_a_setting_that_was_turned_has_the_name_of_its_control(said: str, shown: str) -> None:
    assert describe_change(said) == shown


def test_the_deck_is_told_in_these_words() -> None:
    engine = FakeEngine.load(LoadSpec("demo"))
    engine.change({"eviction": "lfu"})
    frame = engine.frame()
    assert frame is not None
    told, _ = frames.decode(frames.encode(frame))
    assert len(told["mark_texts"]) == len(told["marks"])
    assert all(said == describe_change(text) for said, (_, text) in zip(told["mark_texts"], told["marks"], strict=True))


def test_a_queued_answer_knows_how_many_come_before_it() -> None:
    queue, requests = AnswerQueue(), []
    for _ in range(3):
        requests.append(Request(object(), "", object(), object()))  # type: ignore[arg-type]
        queue.put(requests[-1])
    assert [queue.before(one.answer) for one in requests] == [0, 1, 2]
    assert queue.next(0) is requests[0]
    assert [queue.before(one.answer) for one in requests] == [0, 0, 1]


def test_controls_have_the_words_that_were_agreed_on() -> None:
    """Of the table that a trial in the browser led to; what the deck itself says is in the browser's tests."""
    known, length = params(), declared(Sampling)["max_new_tokens"]
    assert (label(known["miss"]), known["miss"].choice_titles) == (
        "When an expert is missing",
        ("Wait for it (exact)", "Use another", "Leave it out", "Use another, else leave out"),
    )
    assert label(length) == "Maximum answer length (tokens)"
    assert length.help == "The answer stops here. Takes effect with the next answer."
    assert label(known["link_gbps"]) == "Emulated bandwidth (GB/s)"
    heads = dict(HEADS)
    assert (heads["tpot"], heads["belady"]) == ("Time per token", "Below best possible (points)")
    assert lossy({"exact": True, "weights": "int8"}) == "EXACT for int8 weights"


def test_no_text_of_the_page_says_tpot() -> None:
    """The answer's own figures and the exports keep the field's term; on the page it is the time per token."""
    for file in (ROOT / "app" / "ui").rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        docs = {ast.get_docstring(one, clean=False) for one in ast.walk(tree) if isinstance(one, DOCUMENTED)}
        said = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        assert not [text for text in said if "TPOT" in text and text not in docs], file
    for folder in (ROOT / "app" / "ui" / "deck", ROOT / "assets" / "ui"):
        for page in (*folder.rglob("*.html"), *folder.rglob("*.js")):
            assert "TPOT" not in page.read_text("utf-8"), page
