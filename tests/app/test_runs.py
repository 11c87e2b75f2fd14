"""Answers as runs: the settings each was computed with, what changed meanwhile, and what differs between some."""

import csv
import io
from dataclasses import replace
from pathlib import Path

from app.services.runs import differing, runs, settings_in_force, to_csv
from app.store import Store
from app.ui.tabs.runs import NOT_RECORDED, SAME, listing, side_by_side
from app.wording import title_of
from tests.app.conftest import open_store
from tests.app.records import SHAPE, a_step

FIGURES = {
    "prompt_tokens": 5,
    "new_tokens": 3,
    "ttft_ms": 12.0,
    "tpot_ms": 4.0,
    "tok_s": 250.0,
    "hit_rate": 0.75,
    "compute_ms": 3.0,
    "stall_ms": 1.0,
    "idle_ms": 0.0,
    "exact": True,
    "emulated": False,
    "reason": "limit",
}


def load_of(store: Store) -> int:
    settings = {"budget": "50%", "eviction": "lru", "predictor": "none"}
    return store.steps.add_load("demo", {}, settings, SHAPE, {})


def answer(store: Store, load: int, first: int, changes: dict[int, dict[str, str]], *, tok_s: float = 250.0) -> int:
    """An answer of three passes, before some of which settings change."""
    chat, answer = store.chats.begin(None, f"Question {first}", "demo")
    for index in range(first, first + 3):
        step = replace(a_step(index), changes=changes.get(index, {}))
        store.token(load, chat, answer, index - first, "word ", step, {"eviction": "lru", "predictor": "none"})
    store.chats.finish(answer, "done", {**FIGURES, "tok_s": tok_s})
    return answer


def test_each_has_the_settings_of_its_first_pass_and_what_was_turned_later(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    load = load_of(store)
    one = answer(store, load, 0, {})
    two = answer(store, load, 3, {3: {"eviction": "lcp"}, 5: {"predictor": "gate"}})
    three = answer(store, load, 6, {})
    found = runs(store)
    assert [run.answer for run in found] == [three, two, one]
    assert [(run.settings["eviction"], run.settings["predictor"]) for run in found] == [
        ("lcp", "gate"),
        ("lcp", "none"),
        ("lru", "none"),
    ]
    assert [run.turned for run in found] == [(), ("predictor",), ()]
    assert differing(found[1:]) == {"eviction": ["lcp", "lru"]} and differing(found[:1]) == {}
    assert settings_in_force(store, store.steps.loads([load])[0])[0] == [3, 5]
    assert len(runs(store, 2)) == 2, "the latest"


def test_what_was_not_recorded_or_is_damaged(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    answer(store, load_of(store), 0, {})
    _, plain = store.chats.begin(None, "Without telemetry", "demo")
    store.chats.finish(plain, "done", FIGURES)
    _, torn = store.chats.begin(None, "Torn", "demo")
    store.chats.finish(torn, "done", FIGURES)
    with store.db.tx() as db:
        db.execute("UPDATE messages SET stats = '{\"tok_s\": []}' WHERE id = ?", (torn,))
    found = runs(store)
    assert found[0].answer == plain and len(found) == 2
    assert found[0].settings == {} and found[0].model == "demo"
    assert differing(found)["eviction"] == ["", "lru"] and NOT_RECORDED in side_by_side(found)


def test_the_tables(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    load = load_of(store)
    answer(store, load, 0, {})
    answer(store, load, 3, {3: {"eviction": "lcp"}}, tok_s=300.0)
    found = runs(store)
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert [row["tok_s"] for row in rows] == ["300.0", "250.0"]
    assert [row["setting.eviction"] for row in rows] == ["lcp", "lru"]
    page = listing(found)
    assert page.count("<tr>") == 3 and "300.0 tok/s" in page and "/export/runs.csv" in page
    both = side_by_side(found)
    assert "300.0 tok/s" in both and "<td>LCP</td><td>LRU</td>" in both
    assert title_of("eviction") in both and title_of("predictor") not in both
    assert side_by_side([found[0], found[0]]).endswith(SAME)
    assert "at least two" in side_by_side(found[:1]) and side_by_side([]) == ""


def test_texts_are_escaped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    _, one = store.chats.begin(None, "<script>alert(1)</script>", "<b>demo</b>")
    store.chats.finish(one, "done", FIGURES)
    found = runs(store)
    assert "<script>" not in listing(found) + side_by_side([*found, *found])
