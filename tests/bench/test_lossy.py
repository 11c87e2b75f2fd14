"""bench lossy: orderings and bounds by hand, going on after it broke off, and all of it on the demo model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import lossy, speculating
from bench.claims import verdict
from core.evaluate.modes import modes_of
from core.evaluate.rows import EvaluationRow
from core.profile import Profile
from tests.engine.profiles import drawn_profile


def test_an_ordering_must_fall_everywhere() -> None:
    assert verdict([[3, 2, 1], [0.3, 0.2, 0.1]]) == "yes" and verdict([[1, 2]], lower=True) == "yes"
    assert verdict([[3, 2, 1], [3, 3, 1]]) == "in part" and verdict([[1, 2], [2, 2]]) == "no"
    assert verdict([[None, 1], [2, 1]]) == "yes" and verdict([[None, 1]]) == verdict([]) == "not measured"


def test_claims_are_held_against_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lossy, "CLAIMS", (lossy.Claim("says", ("exact", "drop")), lossy.Claim("speed", ("drop", "exact"), ("tok_s",)))
    )
    rows = [
        {"mode": "exact", "residency": 0.75, "exact_match": 1.0, "kl": 0.0, "tok_s": 9.0},
        {"mode": "drop", "residency": 0.75, "exact_match": 0.5, "kl": 0.2, "tok_s": 8.0},
        {"mode": "exact", "residency": 0.5, "exact_match": 1.0, "kl": 0.0, "tok_s": 7.0},
        {"mode": "drop", "residency": 0.5, "exact_match": 1.0, "kl": 0.3, "tok_s": 8.0},
    ]
    found = {(one["claim"], one["figure"]): one["holds"] for one in lossy.orderings(rows)}
    assert found == {("says", "exact_match"): "in part", ("says", "kl"): "yes", ("speed", "tok_s"): "in part"}
    known = {mode.name for mode in modes_of()}
    monkeypatch.undo()
    assert all(set(claim.modes) <= known for claim in lossy.CLAIMS)


def test_the_bound_is_what_computing_and_copying_have_in_common() -> None:
    def copy(layer: int, ms: float) -> Any:
        return SimpleNamespace(layer=layer, started_s=1.0, ended_s=1.0 + ms / 1e3)

    steps: Any = [
        SimpleNamespace(compute_ms=4.0, transfers=(copy(0, 1.0), copy(0, 2.0), copy(1, 5.0))),
        SimpleNamespace(compute_ms=8.0, transfers=(copy(1, 9.0),)),
    ]
    # a token computes 6 ms, 3 in each layer; it copies 1.5 ms in layer 0 and 7 ms in layer 1: 1.5 + 3
    assert speculating.bound_ms(steps, 2) == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("context", "lengths"), [(1024, [64, 256, 768, 976]), (816, [64, 256, 768]), (112, [64]), (60, [12])]
)
def test_times_go_up_to_the_models_own_context(context: int, lengths: list[int]) -> None:
    assert speculating.lengths(context, 48) == lengths


def test_redundancy_is_the_best_pair() -> None:
    likeness = np.array([[[1, 0.5, 0.1], [0.5, 1, 0.3], [0.1, 0.3, 1]]], np.float32)
    profile: Any = SimpleNamespace(likeness=likeness)
    [best] = lossy.redundancy(profile) or [0.0]
    assert best == pytest.approx((0.5 + 0.5 + 0.3) / 3) and lossy.redundancy(None) is None


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    pace = SimpleNamespace(gbps=0.25, latency_us=10.0)
    engine: Any = SimpleNamespace(transfers=SimpleNamespace(pace=pace))
    rows = [
        EvaluationRow("exact", "Exact", 0.5, tok_s=3.0),
        EvaluationRow("drop", "Drop", 0.5, settings={"miss": "drop"}),
    ]
    first = lossy.Kept(tmp_path, {"tokens": 8})
    assert first.rows == [] and first.link(engine)["link_gbps"] == 0.25
    for row in rows:
        first.add(row)
    file = tmp_path / "lossy" / "rows.jsonl"
    with file.open("a", encoding="utf-8") as torn:
        torn.write(json.dumps(asdict(rows[0]))[:40])
    again = lossy.Kept(tmp_path, {"tokens": 8})
    pace.gbps = 0.5  # another load timed it so
    assert again.rows == rows and again.link(engine)["link_gbps"] == 0.25
    assert lossy.Kept(tmp_path, {"tokens": 9}).rows == []
    again.done()
    assert not file.exists()


@pytest.mark.long(0.2)
def test_all_of_it_on_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(engine: Any, modes: Any, limit: int) -> Profile:
        engine.use_profile(drawn_profile(engine))
        return drawn_profile(engine)

    monkeypatch.setattr(lossy, "calibrated", drawn)
    monkeypatch.setattr(lossy, "RESIDENCIES", (0.75,))
    said: list[str] = []
    found: Any = json.loads(json.dumps(lossy.run(tmp_path, small=True, say=said.append), allow_nan=False))
    assert [row["mode"] for row in found["rows"]] == ["exact", "drop", "execute_gate"]
    assert found["rows"][0]["kl"] == 0 and found["rows"][1]["saved"] == 1.0 and found["emulated"]
    layers = found["layers"]
    assert {
        len(rates) for rates in (*found["speculating"]["cosine"].values(), *found["speculating"]["recall"].values())
    } == {layers - 1}
    for row in found["speculating"]["tpot"].values():
        assert row["systems"].keys() == speculating.SYSTEMS.keys() and row["bound_ms"] > 0
        for one in row["systems"].values():
            assert one["tpot_ms"] == pytest.approx(one["compute_ms"] + one["stall_ms"] + one["idle_ms"])
        assert row["systems"]["on demand"]["gained_ms"] == 0
    assert {one["holds"] for one in found["orderings"]} <= {"yes", "in part", "no", "not measured"}
    assert "BuddyMoE" in lossy.table(found) and not (tmp_path / "lossy" / "rows.jsonl").exists()
