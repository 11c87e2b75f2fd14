"""The share of the speed limit: parts that add up, whatever was measured, and what each part is by counting."""

import csv
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.metrics.limit import COLUMNS, PARTS, WINDOW, Fewest, SpeedLimit, claims, speed_limit

SIZE = 100  # bytes of an expert
OTHERS = ("prefetch", "host", "dispatch", "sampling", "delivery")
KNOWN = Fewest(0.1, 512, 10**6)


def columns(passes: int = 4, **values: Any) -> dict[str, Any]:
    """Decoded tokens of 10 requests, of 10 ms each of which 2 are computed; `values` in place of these and of 0."""
    found = {"index": np.arange(passes), "decode": 1, "tokens": 1, "total_ms": 10.0, "compute_ms": 2.0, "requests": 10}
    return {name: np.zeros(passes) + (found | values).get(name, 0.0) for name in COLUMNS}


def limit(fewest: Fewest | None = KNOWN, points: int = 512, **values: Any) -> SpeedLimit:
    return speed_limit(columns(**values), fewest, SIZE, points)


def times(found: SpeedLimit) -> dict[str, float]:
    return {name: ms for name, ms in found.parts.items() if ms > 1e-9}


def test_computing_and_what_is_left() -> None:
    found = limit(None, between_ms=1.0, sample_ms=0.5)
    assert times(found) == pytest.approx({"computing": 2.0, "dispatch": 7.5, "sampling": 0.5, "delivery": 1.0})
    assert (found.limit_ms, found.total_ms, found.tokens) == pytest.approx((2.0, 11.0, 4))
    assert found.share == pytest.approx(2 / 11)
    natively = limit(None, kernel_ms=1.5, compute_ms=6.0)
    assert times(natively) == pytest.approx({"computing": 1.5, "dispatch": 8.5}), "Python between the steps is not it"


def test_computing_without_native_steps_leaves_out_what_has_a_part_of_its_own() -> None:
    found = limit(None, compute_ms=8.0, predict_ms=1.0, join_ms=2.0, record_ms=0.5)
    expected = {"computing": 4.5, "prefetch": 1.0, "host": 2.0, "dispatch": 2.5}
    assert times(found) == pytest.approx(expected)


def test_a_link_that_is_the_limit() -> None:
    """5 copies of 1 ms a token, of which the best policy needs 3; computing takes 2 ms, .5 of them under copies."""
    moved = {"demand_bytes": 5 * SIZE, "copy_ms": 5.0, "stall_ms": 4.5}
    found = limit(Fewest(0.3, 512, 99), **moved)
    assert found.limit_ms == pytest.approx(3.0), "3 copies take longer than 2 ms of computing"
    expected = {"computing": 2.0, "copies": 1.0, "regret": 2.0, "link": 1.5, "dispatch": 3.5}
    assert times(found) == pytest.approx(expected)


def test_computing_that_is_the_limit() -> None:
    """The same link with 6 ms of computing: nothing of the waiting is in the limit."""
    moved = {"demand_bytes": 5 * SIZE, "copy_ms": 5.0, "stall_ms": 3.0, "compute_ms": 6.0}
    found = limit(Fewest(0.3, 512, 99), **moved)
    assert times(found) == pytest.approx({"computing": 6.0, "regret": 2.0, "link": 1.0, "dispatch": 1.0})
    assert limit(Fewest(0.0, 512, 99), **moved).parts["regret"] == pytest.approx(3.0), "at most what was waited for"


def test_copies_under_the_other_parts() -> None:
    """8 copies of 1 ms that no policy spares, 1 ms of waiting: 5 ms of the limit went on under 7 ms of other things."""
    moved = {"prefetch_bytes": 8 * SIZE, "copy_ms": 8.0, "stall_ms": 1.0, "sample_ms": 3.5, "compute_ms": 2.0}
    found = limit(Fewest(0.8, 512, 99), **moved)
    assert found.limit_ms == pytest.approx(8.0)
    expected = {"computing": 2.0, "copies": 6.0, "dispatch": 3.5 * 2 / 7, "sampling": 3.5 * 2 / 7}
    assert times(found) == pytest.approx(expected)


def test_late_and_useless_prefetches_are_a_part_of_their_own() -> None:
    """Half of what was prefetched was never used: it is not among what the best policy is compared with."""
    moved = {"demand_bytes": 2 * SIZE, "prefetch_bytes": 4 * SIZE, "wasted_bytes": 2 * SIZE, "copy_ms": 6.0}
    found = limit(Fewest(0.2, 512, 99), stall_ms=3.0, caused_ms=1.2, predict_ms=0.3, compute_ms=2.3, **moved)
    expected = {"computing": 2.0, "regret": 1.0, "link": 0.8, "prefetch": 1.5, "dispatch": 4.7}
    assert times(found) == pytest.approx(expected), "2 of 4 used copies are spared, and so half of the 2 on demand"


def test_what_was_not_copied_is_not_among_the_fewest() -> None:
    moved = {"demand_bytes": 5 * SIZE, "copy_ms": 5.0, "stall_ms": 5.0}
    for name in ("host_computed", "unfetched"):
        assert limit(Fewest(0.5, 512, 99), **moved, **{name: 2.0}).limit_ms == pytest.approx(3.0)
        assert limit(Fewest(0.5, 512, 99), **moved, **{name: 9.0}).limit_ms == pytest.approx(2.0)
    assert limit(Fewest(0.9, 512, 99), **moved).limit_ms == pytest.approx(5.0), "no more than were made"


def test_the_window_is_that_of_the_comparison() -> None:
    total_ms = np.arange(100.0) + 10
    assert limit(None, passes=100, total_ms=total_ms).tokens == WINDOW
    found = limit(Fewest(0.0, 8, 49), passes=100, total_ms=total_ms)
    assert (found.tokens, found.total_ms) == (8, pytest.approx(total_ms[42:50].mean()))
    assert found.step[found.counted].tolist() == list(range(42, 50))
    decode = np.arange(100) % 2
    found = limit(Fewest(0.0, 8, 49), passes=100, decode=decode, points=60)
    assert found.step[found.counted].tolist() == list(range(41, 50, 2)), "of the last 60 passes"
    assert found.by_pass.shape == (len(PARTS), 60) and found.tokens == 8


def test_batches_are_not_compared() -> None:
    moved = {"demand_bytes": 5 * SIZE, "copy_ms": 5.0, "stall_ms": 4.0}
    found = limit(tokens=2, **moved)
    assert not found.known and times(found) == pytest.approx({"computing": 2.0, "link": 4.0, "dispatch": 4.0})
    assert limit(**moved).known and limit(**moved).parts["regret"] > 0


def test_prompts_wait_for_copies() -> None:
    found = limit(decode=[0, 1, 0, 1], demand_bytes=5 * SIZE, copy_ms=5.0, stall_ms=4.0)
    waits = found.by_pass[[PARTS.index(name) for name in ("copies", "regret", "link")]]
    assert waits[:, 0].tolist() == [4.0, 0.0, 0.0] and waits[0, 1] < 4.0
    assert found.tokens == 2 and found.by_pass.sum(0) == pytest.approx([10.0] * 4)


def test_without_a_token_nothing_is_known() -> None:
    found = limit(None, decode=0)
    assert (found.tokens, found.facts()["share"], found.facts()["parts_ms"]) == (0, None, None)
    assert limit(None, passes=0).by_pass.shape == (len(PARTS), 0)


def test_the_table_of_passes() -> None:
    found = limit(demand_bytes=5 * SIZE, copy_ms=5.0, stall_ms=4.0, emulated=1.0)
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert [row["index"] for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        assert sum(float(row[f"{name}_ms"]) for name in PARTS) == pytest.approx(float(row["total_ms"]), rel=1e-4)
        assert float(row["limit_ms"]) == pytest.approx(found.limit_ms)
        assert (row["policies_compared"], row["emulated"]) == ("True", "True")


AMOUNT = st.floats(0, 100, width=32)
BYTES = st.integers(0, 50)


@settings(deadline=None)
@given(st.data())
def test_parts_are_not_negative_and_add_up_whatever_was_measured(data: st.DataObject) -> None:
    passes = data.draw(st.integers(1, 5))
    values = {
        name: np.array(data.draw(st.lists(AMOUNT if name.endswith("_ms") else BYTES, min_size=passes, max_size=passes)))
        for name in COLUMNS
        if name not in ("index", "decode", "tokens", "emulated")
    }
    decode = np.array(data.draw(st.lists(st.booleans(), min_size=passes, max_size=passes)))
    known = data.draw(st.one_of(st.none(), st.builds(Fewest, st.floats(0, 1), st.integers(1, 6), st.integers(0, 6))))
    found = limit(known, passes=passes, decode=decode, **values)
    took = values["total_ms"] + values["between_ms"]
    assert (found.by_pass >= -1e-4).all() and found.by_pass.sum(0) == pytest.approx(took, rel=1e-4, abs=1e-4)
    if found.tokens:
        assert min(found.parts.values()) >= -1e-9
        assert sum(found.parts.values()) == pytest.approx(found.total_ms)
        assert found.limit_ms <= found.total_ms * (1 + 1e-9) + 1e-9
        moved = speed_limit(columns(passes, decode=decode, **values), None, SIZE, 9)
        assert moved.tokens == decode.sum(), "all of so few"


def test_what_is_measured_of_a_pass_is_named() -> None:
    assert set(claims(columns())) == {"computing", "caused", "waiting", "predict", "host", "sampling", "delivery"}
    assert {"computing", "copies", "regret", "link", *OTHERS} == set(PARTS)
