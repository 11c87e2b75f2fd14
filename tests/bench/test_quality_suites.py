"""Every suite of quality, as test_suites.py has those of speed."""

from pathlib import Path
from typing import Any

import pytest

from app.ui.tabs.systems_figures import tpot_over_budgets
from bench.quality import lossy, speculating, systems
from bench.suites import suite
from core.settings.presets import PRESETS
from core.system.native.compile import supported
from tests.bench.tried import calibrated, tried


@pytest.mark.long(0.2)
def test_lossy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossy, "calibrated", calibrated)
    monkeypatch.setattr(lossy, "RESIDENCIES", (0.75,))
    one = tried("lossy", tmp_path)
    r, found = one.result, one.result["speculating"]
    assert [row["mode"] for row in r["rows"]] == ["exact", "drop", "execute_gate"]
    assert r["rows"][0]["kl"] == 0 and r["rows"][1]["saved"] == 1.0 and r["emulated"]
    by_layer = (*found["cosine"].values(), *found["recall"].values())
    assert {len(rates) for rates in by_layer} == {r["layers"] - 1}
    for row in found["tpot"].values():
        assert row["systems"].keys() == speculating.SYSTEMS.keys() and row["bound_ms"] > 0
        for of in row["systems"].values():
            assert of["tpot_ms"] == pytest.approx(of["compute_ms"] + of["stall_ms"] + of["idle_ms"])
        assert row["systems"]["on demand"]["gained_ms"] == 0
    assert all(len(row["blocks"]["exact_match"]) == 1 for row in r["rows"])
    assert all(len(of["tpot_rounds_ms"]) == 1 for row in found["tpot"].values() for of in row["systems"].values())
    assert not (tmp_path / "lossy" / "rows.jsonl").exists()


@pytest.mark.long(0.2)
def test_distance() -> None:
    one = tried("distance")
    rows = one.result["rows"]
    assert [(row["format"], row["dense"]) for row in rows] == [("int8", "checkpoint"), ("int8", "int8")]
    for row in rows if supported() else ():
        assert row["arithmetic"] == "fast" and row["distance"]["tokens"] == one.result["tokens"] == 24
        assert 0 < row["distance"]["kl"] < 0.1
    if supported():
        assert rows[0]["fp32"].keys() == {"reference", "fast", "both"} and rows[1]["fp32"] is None
        assert all(0 < kl < 0.1 for kl in rows[0]["fp32"].values())
    assert "int8" in one.text


@pytest.mark.long(0.3)
def test_invariance() -> None:
    one = tried("invariance")
    fast, reference = (one.result["arithmetics"][name] for name in ("fast", "reference"))
    assert fast["runs"] == reference["runs"] == 16 and fast["logits"] == reference["logits"] > 0
    if supported():
        assert fast["arithmetic"] == "fast" and fast["differing"] == 0 < reference["differing"]
    for values in (("budget 25%",), ("threads 1", "threads 2"), ("reuse False", "reuse True")):
        assert sum(fast["of"][value][0] for value in values) == fast["logits"], "each run is in one row"
    assert f"0 of {fast['logits']:,}" in one.text or not supported()


@pytest.mark.long(0.5)
def test_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"model": "generated", "budgets": "50%,5MB"}
    with monkeypatch.context() as broken:  # it is interrupted after some rounds, and continues
        broken.setattr(systems, "gather", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            suite("systems").run(small=True, keep=tmp_path, say=said.append, **options)
    small = [one for one in PRESETS if one.name in systems.SMALL_PRESETS]
    compared = {one.name for one in systems.systems(small)}  # each as in its paper, and some with our guard
    count = 1 + 2 * len(compared)
    measured = [line for line in said if f" of {count}: " in line]
    assert len(measured) == count
    one = tried("systems", tmp_path, **options)
    r = one.result
    assert f"{len(measured)} measurements are there already" in one.said
    assert not [line for line in one.said if f" of {count}: " in line or line.startswith("calibrating")]
    assert r["systems"].keys() == r["titles"].keys() == compared > {one.name for one in small}
    assert r["budgets"]["50%"]["share"] == 0.5 and r["link"] == "emulated"
    for name, row in r["systems"].items():
        assert row.keys() == r["budgets"].keys() == r["bounds"].keys()
        for of in row.values():
            if of["problem"]:
                assert "too small" in of["problem"] and of is row["5000000"]
                continue
            assert of["tpot_ms"] == pytest.approx(of["compute_ms"] + of["stall_ms"] + of["idle_ms"])
            assert of["tokens"] == r["tokens"] and of["ttft_ms"] > 0
            assert of["exact"] == (name != "speculating_execute") == (of["quality"] is None)
    whole = r["systems"][systems.WHOLE_MOEPIC]["50%"]
    assert len(whole["tpot_rounds_ms"]) == len(whole["ttft_rounds_ms"]) == 1 and not whole["problem"]
    assert r["resident"]["hit_rate"] == 1.0 and r["exact_quality"]["kl"] == 0.0
    judged = r["systems"]["speculating_execute"]["50%"]["quality"]
    assert judged["kl"] > 0 and judged["exact_match"] is None  # there are no questions for a generated model
    assert {"tpot_ms", "hit_rate", "kl", "demand_bytes"} <= r["units"].keys()
    assert len(tpot_over_budgets(r, True).data) > len(systems.SMALL_PRESETS)
