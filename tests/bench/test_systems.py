"""bench systems: medians, bounds, what is kept, table and picture by hand; and all of it on a generated model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.store import results as stored
from app.ui.tabs.analysis_answers import SystemsAnswer
from app.ui.tabs.systems_figures import LOSSY, bound_lines, lines, tpot_over_budgets
from bench import systems
from bench.kept import KeptRows
from bench.systems_measure import NAMES, PER_TOKEN, bounds, median_round
from bench.systems_table import BOUNDS, table
from core.errors import SettingError
from core.memory.link import Pace
from core.metrics import BY_NAME
from core.settings.presets import PRESETS
from core.simulate import Clock
from core.trace import Chunk, FileTrace
from core.trace.file import TraceWriter
from tests.bench.systems_result import systems_result


def test_every_figure_is_a_metric_of_the_table() -> None:
    assert set(PER_TOKEN) <= BY_NAME.keys()


def test_the_round_with_the_median_time_stands_for_a_system() -> None:
    rounds = [
        {"round": 1, "tpot_ms": 9.0, "ttft_ms": 1.0, "stall_ms": 4.0},
        {"round": 2, "tpot_ms": 7.0, "ttft_ms": 5.0, "stall_ms": 2.0},
        {"round": 3, "tpot_ms": 8.0, "ttft_ms": 3.0, "stall_ms": 3.0},
        {"round": 4, "problem": "too small"},
    ]
    found = median_round(rounds)
    assert (found["tpot_ms"], found["stall_ms"], found["ttft_ms"]) == (8.0, 3.0, 3.0)
    assert found["tpot_rounds_ms"] == [9.0, 7.0, 8.0] and found["problem"] == ""
    assert median_round(rounds[3:]) == {"problem": "too small"}
    assert median_round([])["problem"]


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "systems" / "rows.jsonl"
    first = KeptRows(file, {"tokens": 8})
    assert first.rows == [] and first.note("link", lambda: [1]) == [1]
    first.add({"round": 1})
    with file.open("a", encoding="utf-8") as torn:
        torn.write('{"round": 2, "tp')
    again = KeptRows(file, {"tokens": 8})
    assert again.rows == [{"round": 1}] and again.note("link", lambda: [2]) == [1]
    assert again.note("link", lambda: [3], anew=True) == [3]
    assert KeptRows(file, {"tokens": 9}).rows == []
    again.done()
    assert not file.exists()


def traced(path: Path) -> FileTrace:
    """Two layers of six experts, two active, 40 decoded tokens."""
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(6)[:2] for _ in range(80)]).reshape(40, 2, 2)
    with TraceWriter(path, 2, 6, 2) as trace:
        trace.write(Chunk(ids.astype(np.int16), np.ones(40, np.int32), np.ones(40, bool), np.ones(40, np.int32)))
    return FileTrace(path)


def test_bounds_are_in_their_order(tmp_path: Path) -> None:
    trace, pace = traced(tmp_path / "a.trace"), Pace(1.0, 0.0)
    clock = Clock(compute_ms=2.0, load_ms=1.0, expert_ms=0.1)
    found = bounds(trace, 8, (), 2.0, pace, 1_000_000, clock)
    hits = [found[name]["hit_rate"] or 0.0 for name in NAMES]
    assert 0 < hits[0] <= hits[2] and hits[1] > 0  # one pool can keep whatever pools of layers keep
    times = [found[name]["tpot_ms"] or 0.0 for name in ("resident", "perfect_prefetch", "belady")]
    assert 0 < times[0] <= times[1] <= times[2]
    fewest = min(found[name]["misses"] or 0.0 for name in NAMES)
    assert found["perfect_prefetch"]["tpot_ms"] == pytest.approx(max(2.0, fewest))  # a copy takes 1 ms
    few = bounds(trace, 4, (), 2.0, pace, 1_000_000, clock)
    assert few["belady"]["hit_rate"] is not None and few["belady_bypass"]["hit_rate"] is None
    whole = bounds(trace, 12, (), None, pace, 1_000_000, None)
    assert whole["belady"]["tpot_ms"] is whole["perfect_prefetch"]["tpot_ms"] is None
    assert found.keys() == BOUNDS.keys()


def test_the_table_says_what_was_measured() -> None:
    text = table(systems_result())
    assert "EMULATED" in text and "LOSSY" in text and "The budget is too small." in text
    rows = text.splitlines()
    at = next(i for i, line in enumerate(rows) if line.startswith("Budget 50%"))
    assert [line.split()[0] for line in rows[at + 2 : at + 4]] == ["BuddyMoE", "FineMoE"]  # the faster first
    assert all(name in text for name in BOUNDS.values())
    assert "BuddyMoE at 50%" in text and "FineMoE at" not in text


def test_the_picture_has_a_line_for_every_system_and_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "systems-20260102-030405.json").write_text(json.dumps(systems_result()), "utf-8")
    (tmp_path / "systems-20260103-030405.json").write_text(json.dumps({"bench": "systems", "small": True}), "utf-8")
    (tmp_path / "systems-20260104-030405.json").write_text("torn", "utf-8")
    found = stored.newest("systems", tmp_path)
    assert found is not None and found[0].name == "systems-20260102-030405.json"
    result = found[1]
    assert lines(result) == {"finemoe": ([25.0, 50.0], [20.0, 10.0], True), "buddymoe": ([50.0], [9.0], False)}
    assert bound_lines(result)["belady"] == ([25.0, 50.0], [12.0, 8.0])
    for dark in (True, False):
        drawn = tpot_over_budgets(result, dark)
        assert [one.name for one in drawn.data] == ["FineMoE", "BuddyMoE" + LOSSY, *BOUNDS.values()]
    monkeypatch.setattr(stored, "FOLDERS", [tmp_path])
    shown = SystemsAnswer().values(True)
    assert "systems-20260102-030405.json" in shown[2] and len(shown[3].data) == 7
    monkeypatch.setattr(stored, "FOLDERS", [tmp_path / "none"])
    assert [update.get("visible") for update in SystemsAnswer().values(True)[:2]] == [True, False]


def test_a_wrong_budget_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="not understood"):
        systems.run(tmp_path, budgets="half", say=lambda text: None)
    with pytest.raises(SettingError, match="at least one budget"):
        systems.run(tmp_path, budgets=" , ", say=lambda text: None)


@pytest.mark.long(0.5)
def test_all_of_it_on_a_generated_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def asked() -> Any:
        said.clear()
        found = systems.run(tmp_path, model="generated", budgets="50%,5MB", small=True, say=said.append)
        return json.loads(json.dumps(found, allow_nan=False))

    with monkeypatch.context() as broken:  # it breaks off after some rounds, and goes on
        broken.setattr(systems, "gather", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asked()
    measured = [line for line in said if line.startswith("round")]
    assert len(measured) == 1 + 2 * len(systems.SMALL_PRESETS)
    found = asked()
    assert f"{len(measured)} measurements are there already" in said
    assert not [line for line in said if line.startswith(("round", "calibrating"))]
    assert found["systems"].keys() == found["titles"].keys() == set(systems.SMALL_PRESETS)
    assert set(systems.SMALL_PRESETS) <= {one.name for one in PRESETS}
    assert found["budgets"]["50%"]["share"] == 0.5 and found["link"] == "emulated"
    for name, row in found["systems"].items():
        assert row.keys() == found["budgets"].keys() == found["bounds"].keys()
        for one in row.values():
            if one["problem"]:
                assert "too small" in one["problem"] and one is row["5000000"]
                continue
            assert one["tpot_ms"] == pytest.approx(one["compute_ms"] + one["stall_ms"] + one["idle_ms"])
            assert one["tokens"] == found["tokens"] and one["ttft_ms"] > 0
            assert one["exact"] == (name != "speculating_execute") == (one["quality"] is None)
    assert found["resident"]["hit_rate"] == 1.0 and found["exact_quality"]["kl"] == 0.0
    judged = found["systems"]["speculating_execute"]["50%"]["quality"]
    assert judged["kl"] > 0 and judged["exact_match"] is None  # there are no questions for a generated model
    assert {"tpot_ms", "hit_rate", "kl", "demand_bytes"} <= found["units"].keys()
    assert table(found) and len(tpot_over_budgets(found, True).data) > len(systems.SMALL_PRESETS)
