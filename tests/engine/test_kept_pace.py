"""The demo model's emulated link has one speed on a machine, however long a load's timed passes take."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.capacity.plan import plan
from core.engine import Engine, kept_pace, wiring
from core.settings.config import Settings
from core.settings.loading import LoadSpec


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(kept_pace, "_of_process", {})
    kept_pace.keep_in(file := tmp_path / "not there yet" / "paces.json")
    yield file
    kept_pace.keep_in(None)


def gbps(**how: object) -> float:
    """Of the link of a load of the demo model."""
    engine = Engine.load(LoadSpec.checked("demo", Settings({"predictor": "none"}), context=64, **how))
    try:
        return engine.transfers.pace.gbps
    finally:
        engine.unload()


def test_every_load_has_the_link_of_the_first_until_its_file_is_gone(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([9.0, 6.0, 8.0, *[5.0] * 3, *[36.0] * 3, *[36.0] * 3, *[18.0] * 3])
    monkeypatch.setattr(wiring, "time_pass", lambda *about: next(times))
    monkeypatch.setattr(wiring, "choose_threads", lambda *about, ours=False, own=False: (wiring.Threads(own=own), 1.0))
    first = gbps()
    assert gbps() == gbps() == first, "whatever these took"
    (row,) = kept_pace.kept_in(kept)
    assert row["model"] == "demo" and row["gbps"] == first and row["layer_ms"] == 1.0, "the least of six layers"
    kept.unlink()
    assert gbps() == pytest.approx(first / 6, rel=0.1), "measured anew"
    assert gbps() == pytest.approx(first / 3, rel=0.1), "the machine was busy"


def kept_ms(arithmetic: str, measured: float, **how: object) -> float:
    return kept_pace.layer_ms(plan(LoadSpec.checked("demo", **how)), "hash", arithmetic, lambda: measured)


def test_without_a_file_it_is_kept_for_the_process_and_each_format_and_arithmetic_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_pace, "_of_process", {})
    assert kept_ms("fast", 1) == kept_ms("fast", 2) == 1 and kept_ms("reference", 4) == 4
    assert kept_ms("fast", 7, format="int8") == 7


@pytest.mark.parametrize("damage", ['{"layer_ms": -1}', '{"layer_ms": "2"}', '{"layer_ms": NaN}', "[]", "3"])
def test_a_damaged_row_is_measured_anew(kept: Path, damage: str) -> None:
    kept_ms("fast", 1.0)
    content = json.loads(kept.read_text())
    kept.write_text(json.dumps(dict.fromkeys(content, json.loads(damage))))
    assert kept_pace.kept_in(kept) == [] and kept_ms("fast", 2.0) == 2.0
    assert [row["layer_ms"] for row in kept_pace.kept_in(kept)] == [2.0]
