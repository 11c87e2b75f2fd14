"""What leaves the dashboard of answers: how exact they are, the settings of each, a timeline in Chrome's format."""

import csv
import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from app.server.live_state import host_state
from app.services.exports import archive, timeline
from app.services.exports.archive import NothingThere
from app.services.host import Host
from app.services.runs import differing, runs, settings_in_force, to_csv
from app.store import Store
from app.ui.tabs.runs import NOT_RECORDED, SAME, listing, side_by_side
from app.wording import title_of
from core.engine.arithmetic import Arithmetic, Distance
from core.types import Outcome
from tests.app.conftest import WAIT_S, QuickEngine, asked, ended
from tests.app.records import SHAPE, STATS, a_step
from tests.app.test_export import read


def test_exact_up_to_rounding_is_not_called_exact(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_state(host)["closeness"] == 0.0
    monkeypatch.setattr(QuickEngine, "closeness", 1e-6)
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    tables, manifest = read(archive.write(host.store, tmp_path / "chat.zip", chat=asked(host, None, "How exact?")))
    assert host_state(host)["closeness"] == 1e-6
    assert (manifest["exact"], manifest["loads"][0]["closeness"]) == (False, 1e-6)
    assert tables["answers"][["exact", "closeness"]].to_numpy().tolist() == [[True, 1e-6]]


def test_fast_arithmetic_has_its_distance(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what the page polls, in the manifest and beside every answer; answers of earlier versions are the
    reference's."""
    old = asked(host, None, "Which?")
    with host.store.db.tx() as db:
        db.execute("UPDATE messages SET stats = json_remove(stats, '$.arithmetic') WHERE chat = ?", [old])
    assert read(archive.write(host.store, tmp_path / "a.zip", chat=old))[0]["answers"]["arithmetic"][0] == "reference"
    distance = Distance(200, 0.0004, 0.0001, 0.01, 190, 5.0, 5.1, 0.02)
    monkeypatch.setattr(QuickEngine, "arithmetic", Arithmetic("fast", distance=distance))
    monkeypatch.setattr(QuickEngine, "closeness", 0.02)
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    tables, manifest = read(archive.write(host.store, tmp_path / "b.zip", chat=asked(host, None, "How exact?")))
    state = host_state(host)
    assert (state["arithmetic"], state["fallback"], state["distance"]["tokens"]) == ("fast", "", 200)
    assert manifest["exact"] is True and manifest["loads"][0]["distance"]["kl"] == 0.0004
    columns = ["exact", "arithmetic", "closeness", "distance_kl", "distance_tokens"]
    assert tables["answers"][columns].to_numpy().tolist() == [[True, "fast", 0.02, 0.0004, 200]]


def test_an_export_is_as_exact_as_its_answers(host: Host, tmp_path: Path) -> None:
    """What was set when the model was loaded does not matter once it is turned off."""
    host.models.change("miss", "drop")
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    lossy = asked(host, None, "Lossy?")
    host.models.change("miss", "wait")
    exact = asked(host, None, "Exact?")
    for chat, expected in ((lossy, False), (exact, True)):
        _, manifest = read(archive.write(host.store, tmp_path / f"{chat}.zip", chat=chat))
        assert manifest["exact"] is expected and manifest["loads"][-1]["exact"] is False


def load_of(store: Store) -> int:
    settings = {"budget": "50%", "eviction": "lru", "predictor": "none"}
    return store.steps.add_load("demo", {}, settings, SHAPE, {})


def answer(store: Store, load: int, first: int, changes: dict[int, dict[str, str]], *, tok_s: float = 250.0) -> int:
    """An answer of three passes, before some of which settings change."""
    chat, answer = store.chats.begin(None, f"Question {first}", "demo")
    for index in range(first, first + 3):
        step = replace(a_step(index), changes=changes.get(index, {}))
        store.token(load, chat, answer, index - first, "word ", step, {"eviction": "lru", "predictor": "none"})
    store.chats.finish(answer, "done", {**STATS, "tok_s": tok_s})
    return answer


def test_each_has_the_settings_of_its_first_pass_and_what_was_turned_later(store: Store) -> None:
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


def test_what_was_not_recorded_or_is_damaged(store: Store) -> None:
    answer(store, load_of(store), 0, {})
    _, plain = store.chats.begin(None, "Without telemetry", "demo")
    store.chats.finish(plain, "done", STATS)
    _, torn = store.chats.begin(None, "Torn", "demo")
    store.chats.finish(torn, "done", STATS)
    with store.db.tx() as db:
        db.execute("UPDATE messages SET stats = '{\"tok_s\": []}' WHERE id = ?", (torn,))
    found = runs(store)
    assert found[0].answer == plain and len(found) == 2
    assert found[0].settings == {} and found[0].model == "demo"
    assert differing(found)["eviction"] == ["", "lru"] and NOT_RECORDED in side_by_side(found)


def test_the_tables(store: Store) -> None:
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


def test_texts_are_escaped(store: Store) -> None:
    _, one = store.chats.begin(None, "<script>alert(1)</script>", "<b>demo</b>")
    store.chats.finish(one, "done", STATS)
    found = runs(store)
    assert "<script>" not in listing(found) + side_by_side([*found, *found])


def test_a_timeline_has_the_last_answers_passes_and_copies(host: Host, tmp_path: Path) -> None:
    chat = asked(host, None, "one two three")
    assert host.models.change("budget", "31%") == ""
    answer = ended(host.chats.ask(chat, "four")).message_id
    found = json.loads(timeline.write(host.store, tmp_path / "out" / "it.json", chat).read_text("utf-8"))
    events, steps = found["traceEvents"], list(host.store.steps.records(answer=answer))
    of = {thread: [e for e in events if e["ph"] == "X" and e["tid"] == thread] for thread in range(80)}
    assert found["otherData"]["answer"] == answer and 2 < len(steps) == len(of[timeline.PASSES])
    for event, step in zip(of[timeline.PASSES], steps, strict=True):
        assert event["ts"] == pytest.approx(step.started_s * 1e6) and event["dur"] == pytest.approx(step.total_ms * 1e3)
        assert event["args"]["pass"] == step.index
        told = [v.split()[:3] for k, v in event["args"].items() if k.startswith("layer ")]
        hits = int((step.outcome <= Outcome.PREFETCH_HIT).sum())
        assert (sum(int(hit) for hit, _, _ in told), sum(int(n) for *_, n in told)) == (hits, len(step.outcome))
    parts = sum(e["dur"] for e in of[timeline.SHARES])
    assert parts == pytest.approx(1e3 * sum(s.compute_ms + s.stall_ms + s.idle_ms for s in steps))
    copies = [e for thread in range(10, 80) for e in of[thread]]
    moved = [t for step in steps for t in step.transfers]
    assert sum(e["args"]["bytes"] for e in copies) == sum(t.bytes for t in moved) > 0
    for thread in range(10, 80):  # none lies over another on its thread
        mine = of[thread]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(mine))
    assert [e["name"] for e in events if e["ph"] == "i"] == ["Memory budget: 62% → 31%"]
    with pytest.raises(NothingThere, match="Telemetry"):
        timeline.write(host.store, tmp_path / "none.json", 77)
    assert not (tmp_path / "none.json").exists()
