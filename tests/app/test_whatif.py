"""What-if: sizes, bounds, the cliff, the clock of recorded passes."""

import csv
import json
from dataclasses import asdict, replace

import pytest

from app.services.analysis import analyst, tables_csv, whatif
from app.services.analysis.measured import Pass, measure
from app.services.analysis.whatif import About, Bound, Row, Table, cliff, sizes
from core.errors import SettingError
from core.simulate import BELADY, Clock, Config, Result
from core.simulate.prefetchers import TimedConfig, TimedResult

CLOCK = {"compute_ms": 10.0, "load_ms": 2.0, "expert_ms": 0.0, "miss_ms": 0.0, "head_ms": 0.0, "predict_ms": 0.0}
ABOUT = About(
    "this session",
    "demo",
    100,
    2,
    8,
    2,
    "layer",
    "filled",
    1_000_000,
    CLOCK,
    "times as entered",
    chosen=("lru", "none", 8),
    created="2026-01-01T00:00:00+00:00",
)


def row(policy: str, slots: int, hit: float, predictor: str = "none") -> Row:
    misses = 4 * (1 - hit)
    return Row(policy, predictor, slots, hit, misses, 10 + 2 * misses, misses, 0.0)


def table(hits: dict[int, float] | None = None) -> Table:
    """LRU and LFU over four budgets of 16 experts; Belady five points better."""
    hits = hits or {4: 0.1, 6: 0.2, 10: 0.8, 12: 0.85}
    rows = [row("lru", n, h) for n, h in hits.items()] + [row("lfu", n, h + 0.02) for n, h in hits.items()]
    bounds = [
        Bound(n, h + 0.05, 4 * (0.95 - h), 10 + 8 * (0.95 - h), max(10.0, 8 * (0.95 - h))) for n, h in hits.items()
    ]
    return Table(ABOUT, tuple(rows), tuple(bounds))


def test_budgets_are_shares_or_numbers_of_experts() -> None:
    assert sizes("25%, 50 %; 9", 2, 8, 2, "layer") == [4, 8, 9]
    assert sizes("100%,3", 2, 8, 2, "global") == [3, 16]
    # every tenth of 16 that holds two experts of each of two layers, the least, and the eleven in force
    assert sizes("auto", 2, 8, 2, "layer", now=11) == [4, 6, 8, 9, 11, 12, 14, 16]
    assert sizes("", 2, 8, 2, "layer", now=3) == sizes("AUTO", 2, 8, 2, "layer")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10%", "between 4 experts"),
        ("17", "all 16"),
        ("1.5", "not understood"),
        ("half", "not understood"),
        ("-5", "not understood"),
        ("0", "between 4 experts"),
    ],
)
def test_budgets_that_cannot_be_say_so(text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        sizes(text, 2, 8, 2, "layer")


def test_the_cliff_is_where_the_slope_below_exceeds_the_one_above_by_most() -> None:
    # slopes .5, 3, .25: the bend at .6 is 3 - .25; losing a tenth of the experts there costs .3 of hit rate
    assert cliff([(0.2, 0.1), (0.4, 0.2), (0.6, 0.8), (0.8, 0.85)]) == 2
    # a loop that fits from half on: nothing is hit below, everything above
    assert cliff([(0.1, 0.0), (0.3, 0.0), (0.5, 1.0), (0.7, 1.0)]) == 2
    assert cliff([(0.2, 0.2), (0.4, 0.4), (0.6, 0.6), (0.8, 0.8)]) is None  # experts chosen evenly: a line
    assert cliff([(0.2, 0.90), (0.4, 0.94), (0.6, 0.95), (0.8, 0.95)]) is None  # a bend, but nothing much is lost
    assert cliff([(0.5, 0.5), (1.0, 1.0)]) is None
    assert cliff([(0.5, 0.0), (1.0, 1.0)]) == 1, "a loop that only everything holds"
    assert cliff([]) is None


def test_bounds_by_hand() -> None:
    """6 misses a token at 2 ms each take 12 ms, more than the 10 ms of computing; 3 take 6 ms, which hide behind it."""
    results = [
        Result(Config(BELADY, slots), 400, 0, 0, 0.4, None, misses, (), 10 + 2 * misses)
        for slots, misses in ((8, 3.0), (4, 6.0))
    ]
    assert whatif.bounds(results, Clock(10.0, 2.0, 0.0)) == [
        Bound(4, 0.4, 6.0, 22.0, 12.0),
        Bound(8, 0.4, 3.0, 16.0, 10.0),
    ]
    assert [bound.perfect_ms for bound in whatif.bounds(results, None)] == [None, None]


def test_a_prefetcher_s_row_counts_every_copy_and_what_it_saved() -> None:
    plain = row("lru", 8, 0.5)
    found = TimedResult(
        TimedConfig(Config("lru", 8), "recent"),
        {
            "tokens": 10,
            "total_ms": 125.0,
            "stall_ms": 25.0,
            "requests": 40,
            "hits": 28,
            "demand_bytes": 12_000,
            "prefetch_bytes": 30_000,
            "wasted_bytes": 5_000,
            "prefetch_issued": 30,
        },
        (0.5, 0.5),
    )
    made = whatif.prefetched(found, 1000, plain)
    assert (made.misses, made.copies, made.wasted) == (1.2, 4.2, 0.5)
    assert made.saved_ms == pytest.approx(plain.tpot_ms - 12.5 if plain.tpot_ms else None)
    assert (made.hit_rate, made.stall_ms) == (0.7, 2.5)
    rest = {"requests": 4.0, "hits": 2.8, "prefetch_issued": 3.0}
    assert made.more == {**rest, "demand_bytes": 1200.0, "prefetch_bytes": 3000.0}
    assert whatif.prefetched(found, 1000, plain, sized=False).more == rest
    of_both = Table(ABOUT, (plain, made), (Bound(8, None, None, None, None),))
    lines = [line for line in tables_csv.whatif(of_both).splitlines() if not line.startswith("#")]
    one, other = csv.DictReader(lines)
    assert (one["hits_per_token"], other["hits_per_token"]) == ("", "2.8")


def test_a_table_survives_being_kept() -> None:
    made = table()
    assert analyst.TABLE.validate_python(json.loads(json.dumps(asdict(made)))) == made
    with pytest.raises(ValueError, match="Field required"):
        analyst.TABLE.validate_python({"about": {"name": "of another version"}})


def test_csv_has_every_row_with_its_bounds() -> None:
    made = replace(table(), about=replace(ABOUT, name="two\nlines, one, name"))
    lines = tables_csv.whatif(made).splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert "# name: two lines, one, name" in head
    assert any("simulated" in line for line in head)
    rows = list(csv.DictReader(lines[len(head) :]))
    assert len(rows) == 8
    first = rows[0]
    assert (first["policy"], first["slots"], first["share"]) == ("lru", "4", "0.25")
    assert float(first["hit_rate_to_belady"]) == pytest.approx(0.05)
    assert float(first["bytes_per_token"]) == pytest.approx(3.6e6)
    assert float(first["tpot_to_everything_resident_ms"]) == pytest.approx(7.2)
    unknown = tables_csv.whatif(replace(made, about=replace(ABOUT, expert_bytes=0, clock=None)))
    first = next(csv.DictReader(line for line in unknown.splitlines() if not line.startswith("#")))
    assert (first["bytes_per_token"], first["everything_resident_tpot_ms"]) == ("", "")


def passes(clock: Clock, missed: list[tuple[int, ...]], prefetched: bool = False) -> list[Pass]:
    """As an engine that behaves just like the clock would record them, top-2."""
    found = []
    for one in missed:
        stall = sum(clock.stall_ms(2, count) for count in one)
        busy = clock.compute_ms + clock.miss_ms * sum(one)
        found.append(Pass(busy + stall, stall, one, (clock.load_ms,) * sum(one), prefetched))
    return found


MISSED: list[tuple[int, ...]] = [(0, 1), (2, 2), (1, 1), (0, 0), (2, 0), (1, 2), (0, 2), (1, 0), (2, 1), (0, 0)]


def test_the_clock_of_recorded_passes_is_found_again() -> None:
    true = Clock(10.0, 2.0, 0.5, 0.25)
    found = measure(passes(true, MISSED), 2)
    assert (found.passes, found.error) == (10, pytest.approx(0.0, abs=1e-6))
    for name in ("compute_ms", "load_ms", "expert_ms", "miss_ms"):
        assert getattr(found.clock, name) == pytest.approx(getattr(true, name), abs=1e-6), name


def test_passes_that_were_disturbed_or_helped_do_not_count() -> None:
    true = Clock(10.0, 2.0, 0.5, 0.25)
    disturbed = [replace(one, total_ms=one.total_ms + 90, stall_ms=one.stall_ms + 60) for one in passes(true, MISSED)]
    helped = [replace(one, stall_ms=0.0) for one in passes(true, MISSED, prefetched=True)]
    found = measure([*passes(true, MISSED), *disturbed[:3], *helped], 2)
    assert found.passes == 10
    assert found.clock.compute_ms == pytest.approx(10.0)
    only_helped = measure(helped, 2)
    assert only_helped.passes == 10


def test_too_little_says_nothing() -> None:
    true = Clock(10.0, 2.0, 0.5)
    assert measure(passes(true, MISSED[:7]), 2) is None
    assert measure([], 2) is None
    hits = passes(true, [(0, 0)] * 10)
    assert measure(hits, 2) is None
    assert measure(hits, 2, copy_ms=3.0) == measure([replace(one, copies_ms=(3.0,)) for one in hits], 2)
