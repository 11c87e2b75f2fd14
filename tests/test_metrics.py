"""The table of metrics: one entry is enough, and what follows from the table follows."""

import csv
import shutil
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.cli.metrics import reference
from app.cli.simulate_prefetch import summary
from app.server import frames
from app.services.analysis.whatif import SHOWN, prefetched
from app.services.exports import archive
from app.services.exports.tables import DEFINITIONS
from app.store import Store
from app.store.schema import MIGRATIONS, add_metrics, migrate
from core.cache.counts import FIGURES, Counts
from core.metrics import COUNTED, METRICS, Metric, reduced, share
from core.profile.trace import ArrayTrace
from core.runtime.telemetry import Telemetry
from core.simulate import Clock, Config
from core.simulate.prefetchers import ORACLE, TimedConfig, timed
from core.types import Memory, ModelShape, Outcome, StepRecord

ROOT = Path(__file__).resolve().parent.parent
OLD = ROOT / "tests" / "compatibility" / "files" / "moestro.sqlite3"
HEAT = Metric("heat", "K", float, "How warm it was.")


def step(phase: Any, *outcomes: Outcome, **values: Any) -> StepRecord:
    ids, of = np.zeros((1, 1, 1), np.int16), np.zeros(len(outcomes), np.int16)
    times = dict.fromkeys(("started_s", "total_ms", "compute_ms", "stall_ms", "idle_ms", "copy_ms"), 0.0) | values
    outcome = np.array(outcomes, np.uint8)
    return StepRecord(index=0, phase=phase, tokens=1, ids=ids, layer=of, expert=of, outcome=outcome, **times)


def test_every_metric_is_stored_exported_drawn_and_simulated(tmp_path: Path) -> None:
    """The table alone says where each goes, also in a database of an earlier version."""
    shutil.copy(OLD, tmp_path)
    store, shape = Store(tmp_path), ModelShape(layers=1, experts=2, top_k=1, hidden=4, expert_bytes=8)
    load, telemetry = store.steps.add_load("demo", {}, {}, shape, {}), Telemetry(shape)
    written = step("decode", Outcome.HIT, **{one.name: one.kind(1) for one in COUNTED if one.name != "tokens"})
    store.steps.add(load, None, None, written, {})
    telemetry.add(written)
    [read] = store.steps.records(load=load)
    assert [getattr(read, one.name) for one in COUNTED] == [1] * len(COUNTED)
    with zipfile.ZipFile(archive.write(store, tmp_path / "export.zip", load=load)) as export:
        head, row = csv.reader(export.read("tokens.csv").decode().splitlines())
    assert {one.column or one.name for one in METRICS} <= set(head)
    assert {row[head.index(one.column or one.name)] for one in COUNTED} <= {"1", "1.0", "True"}
    frame = telemetry.frame(0, 9, [0, 0], Memory(*[0] * 10), busy=False, emulated=False, link_limit_gbps=1.0)
    header, _ = frames.decode(frames.encode(frame))
    labels = {one["name"]: one.get("label", "") for one in header["arrays"]}
    assert {one.name: one.label for one in METRICS if one.frame}.items() <= labels.items()
    store.close()
    clock, trace = Clock(compute_ms=8.0, load_ms=1.0, expert_ms=1.0), ArrayTrace(np.arange(12).reshape(6, 2, 1) % 4, 4)
    [result] = timed(trace, [TimedConfig(Config("lru", 4), ORACLE)], clock, 8, processes=1)
    assert set(FIGURES) <= set(result.figures) and summary(result)["sums"] == result.figures
    assert set(FIGURES) <= {*prefetched(result, 8, None).more, *SHOWN} and result.figures["prefetch_used"] > 0


def test_a_column_is_added_once_and_only_for_what_is_new() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate(db)

        def columns() -> dict[str, str]:
            return {row[1]: row[2] for row in db.execute("PRAGMA table_info(steps)")}

        add_metrics(db)  # those that came after the tables
        before = columns()
        assert {one.name for one in COUNTED} <= before.keys()
        add_metrics(db)
        assert columns() == before
        for _ in range(2):
            add_metrics(db, [*COUNTED, HEAT])
            assert columns() == {**before, "heat": "REAL"}
        db.execute("ALTER TABLE steps DROP COLUMN disk_bytes")
        add_metrics(db)
        assert "disk_bytes" not in columns(), "a table that lacks a column of its version is damaged, not old"
        assert db.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS)


def test_over_the_passes_of_an_answer() -> None:
    hit, miss, disk = Outcome.PREFETCH_HIT, Outcome.MISS, Outcome.MISS_DISK
    steps = [
        step("prefill", miss, disk, stall_ms=4.0, net_ms=9.0, demand_bytes=7, emulated=True),
        step("decode", hit, miss, disk, hit, stall_ms=1.0, net_ms=1.0),
        step("decode", hit, stall_ms=0.5, net_ms=-4.0, exact=False),
    ]
    found = reduced(steps)
    assert list(found) == [one.name for one in METRICS if one.reduce is not None]
    assert (found["stall_ms"], found["demand_bytes"], found["disk_misses"], found["assignments"]) == (5.5, 7, 2, 3)
    assert (found["net_ms"], found["hit_rate"]) == (-1.5, 3 / 5), "of decoded tokens"
    assert (found["emulated"], found["exact"]) == (True, False)
    assert share(steps[:1], "hits", "requests") == 0.0 and share([], "hits", "requests") is None
    assert (reduced([])["stall_ms"], reduced([])["net_ms"], reduced([])["exact"]) == (0, 0.0, True)


def test_what_the_cache_counts_are_metrics_and_add_up() -> None:
    assert set(FIGURES) <= {one.name for one in COUNTED}
    total, numbers = Counts(), dict(zip(FIGURES, range(1, 99), strict=False))
    assert total.figures() == dict.fromkeys(FIGURES, 0)
    one = Counts()
    for name, number in numbers.items():
        setattr(one, name, number)
    for _ in range(3):
        total.add(one)
    assert total.figures() == {name: 3 * number for name, number in numbers.items()}


@pytest.mark.parametrize("one", METRICS, ids=lambda one: one.name)
def test_every_metric_is_described(one: Metric) -> None:
    assert one.help.endswith(".") and DEFINITIONS["tokens"][one.column or one.name] == one.help
    assert (one.unit == "") == (one.kind is bool)
    assert f"| `{one.column or one.name}` | {one.unit or 'yes or no'} |" in reference()
