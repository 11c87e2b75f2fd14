"""What-if: sizes, bounds, the cliff, the clock of recorded passes; and what is best of it, beyond noise."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from app.services.analysis import whatif, whatif_csv
from app.services.analysis.best import Best, amount, of_lab, of_profile, of_quality, of_table, share_error
from app.services.analysis.lab import Lab, Run
from app.services.analysis.measured import Pass, measure
from app.services.analysis.quality import QualityResult
from app.services.analysis.whatif import About, Bound, Row, Table, cliff, lru_cliff, sizes
from app.services.host import Host
from app.ui.best import BestLine, mark
from app.ui.event_data import BestPicked
from core.errors import SettingError
from core.measure.evaluate.rows import EvaluationRow
from core.settings.lossy import EXACT
from core.simulate import BELADY, Clock, Config, Result
from core.simulate.blocks import Block
from core.simulate.prefetchers import TimedConfig, TimedResult
from tests.app.conftest import page
from tests.fake_profiles import fake_profile

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


def test_lru_s_cliff_is_found_in_a_table() -> None:
    edge = lru_cliff(table())
    assert edge.slots == 10
    assert lru_cliff(table({4: 0.25, 8: 0.5, 12: 0.75, 16: 1.0})) is None


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
    lines = [line for line in whatif_csv.to_csv(of_both).splitlines() if not line.startswith("#")]
    one, other = csv.DictReader(lines)
    assert (one["hits_per_token"], other["hits_per_token"]) == ("", "2.8")


def test_a_table_survives_being_kept() -> None:
    made = table()
    assert Table.read(json.loads(json.dumps(made.dump()))) == made
    with pytest.raises((TypeError, KeyError)):
        Table.read({"about": {"name": "of another version"}})


def test_csv_has_every_row_with_its_bounds() -> None:
    made = replace(table(), about=replace(ABOUT, name="two\nlines, one, name"))
    lines = whatif_csv.to_csv(made).splitlines()
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
    unknown = whatif_csv.to_csv(replace(made, about=replace(ABOUT, expert_bytes=0, clock=None)))
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


NOISE = (0.0, 0.1, -0.1, 0.05, -0.05)  # of a token's cost in five parts
BASE = 14.0


def parts(mean: float, sizes: Sequence[float] = NOISE, scale: float = 1.0) -> tuple[Block, ...]:
    return tuple(Block(20, mean + scale * one) for one in sizes)


def compared(costs: Mapping[tuple[str, str], tuple[Block, ...]], chosen: tuple[str, str] = ("lru", "none")) -> Table:
    """Policies and prefetchers at the 8 slots in use, with what a token costs in parts of the routing."""
    rows = tuple(
        replace(row(policy, 8, 0.5, predictor), blocks=some, tpot_ms=sum(one.cost for one in some) / max(1, len(some)))
        for (policy, predictor), some in costs.items()
    )
    return Table(replace(ABOUT, chosen=(*chosen, 8)), rows, ())


def test_the_fastest_of_a_comparison_is_named_with_what_it_saves_and_how_sure_that_is() -> None:
    costs = {("lru", "none"): parts(BASE), ("lfu", "none"): parts(BASE - 2, NOISE[::-1]), ("lfu", "recent"): parts(20)}
    best = of_table(compared(costs))
    assert best is not None and best.text == (
        "With 50 % of the experts in slots, LFU is best: 2.00 ± 0.02 ms a token less (14 %) than LRU."
    )
    assert best.changes == {"scope": "layer", "eviction": "lfu", "predictor": "none"}
    ahead = of_table(compared({**costs, ("lfu", "recent"): parts(BASE - 5)}))
    assert ahead is not None and ahead.changes["predictor"] == "recent"
    unheard = of_table(compared(costs, ("lru", "gate")))  # the prefetcher in use could not be replayed
    assert unheard is not None and "predictor" not in unheard.changes, "what was not compared is not turned off"


def test_what_is_within_noise_is_not_called_best() -> None:
    loud = (2.0, -2.0, 3.0, -3.0, 0.0)
    best = of_table(compared({("lru", "none"): parts(BASE), ("lfu", "none"): parts(BASE - 0.5, loud)}))
    assert best is not None and not best.changes
    assert "nothing compared is faster than LRU beyond noise: the best of the others, LFU, differs" in best.text
    assert of_table(compared({("lru", "none"): parts(BASE)})) is None
    assert of_table(compared({("lru", "none"): (), ("lfu", "none"): ()})) is None, (
        "of an earlier version, without parts"
    )
    assert of_table(compared({("lfu", "none"): parts(1.0), ("plec", "none"): parts(0.5)}, ("gone", "none"))) is None


def lab_of(costs: Mapping[str, tuple[Block, ...]], chosen: str = "none") -> Lab:
    runs = tuple(
        Run(name, tpot_ms=sum(one.cost for one in blocks) / len(blocks), blocks=blocks)
        for name, blocks in costs.items()
    )
    return Lab(replace(ABOUT, chosen=("lru", chosen, 8)), 4, (*runs, Run("stride", problem="It was not recorded.")))


def test_the_prefetcher_that_saves_most_and_those_that_are_no_worse() -> None:
    costs = {
        "none": parts(BASE),
        "gate": parts(BASE - 4),
        "recent": parts(BASE - 3.98, NOISE[::-1]),
        "oracle": parts(1),
    }
    best = of_lab(lab_of(costs))
    assert best is not None and best.changes == {"predictor": "gate"}
    assert best.text.startswith("Next-layer gate saves most: 4.00 ± 0.00 ms a token (29 %) less than without")
    assert "is no worse beyond noise" in best.text
    slower = of_lab(lab_of({"none": parts(BASE), "gate": parts(BASE + 1, NOISE[::-1])}, "gate"))
    assert slower is not None and slower.changes == {"predictor": "none"}, "the one in use does not pay"
    nothing = of_lab(lab_of({"none": parts(BASE), "gate": parts(BASE + 1)}))
    assert nothing is not None and not nothing.changes
    assert of_lab(lab_of({"none": parts(BASE)})) is None and of_lab(lab_of({"gate": parts(BASE)})) is None


def mode(name: str, tpot_ms: float, agreement: float, residency: float = 0.5, **more: object) -> EvaluationRow:
    settings = {"miss": "drop", "rho": 1} if name != "exact" else {}
    plain = EvaluationRow(name, name.title(), residency, 8)
    figures = {"tpot_ms": tpot_ms, "tpot_ms_se": 0.1, "agreement": agreement, "positions": 1000, "settings": settings}
    return replace(plain, **{**figures, **more})  # type: ignore[arg-type]


def judged(*rows: EvaluationRow) -> Best | None:
    return of_quality(QualityResult({"questions": {"seen": 0}}, rows, True))


def test_a_lossy_mode_is_best_only_where_it_is_faster_and_not_worse() -> None:
    exact = mode("exact", 10.0, 1.0)
    best = judged(exact, mode("drop", 8.0, 0.999), mode("bad", 5.0, 0.7), mode("other", 1.0, 1.0, 0.25))
    assert best is not None and "Drop is best: 2.0 ± 0.1 ms a token (20 %) less than exact mode" in best.text
    assert best.changes["miss"] == "drop" and "quality_rate" not in best.changes and "may change answers" in best.text
    for other in (mode("bad", 5.0, 0.7), mode("drop", 9.95, 1.0), mode("drop", 8.0, 1.0, tpot_ms_se=None)):
        best = judged(exact, other)
        assert best is not None and best.changes == EXACT and "exact mode is best" in best.text
    assert judged(exact) is None and judged(mode("drop", 8.0, 1.0)) is None


def test_a_share_that_was_never_missed_is_not_certain() -> None:
    assert share_error(1.0, 10) > share_error(1.0, 1000) > 0
    assert (amount(2.04, 0.3), amount(12.6, 3.0), amount(0.123, 0.01)) == ("2.0 ± 0.3", "13 ± 3", "0.12 ± 0.01")


def test_a_profile_says_whether_its_network_beats_the_router_asked_early() -> None:
    assert of_profile(fake_profile()) is None, "no router was asked"
    asked = fake_profile(parts=("gate_recall",))
    best = of_profile(asked)
    assert best is not None and best.changes == {"predictor": "gate"} and "is not better" not in best.text
    assert of_profile(replace(asked, tokens=10)) is None, "too few"
    higher = [None, *(asked.gate_recall[1:] + 0.2).tolist()]
    same = [None, *(asked.gate_recall[1:] + np.resize([0.01, -0.01], len(higher) - 1)).tolist()]
    for recall, chosen, said in ((higher, "estimator", "best at it"), (same, "gate", "not better beyond noise")):
        trained = replace(asked, settings={"recall": {"estimator": recall}}, nets={"estimator.x": np.zeros(1)})
        found = of_profile(trained)
        assert found is not None and (found.changes["predictor"], said in found.text) == (chosen, True), found


def test_its_button_applies_it_once_it_is_still_what_is_best(host: Host) -> None:
    found: list[Best | None] = [Best("LFU <is> best.", {"eviction": "lfu"})]
    with page():
        line = BestLine(host, "best", lambda: found[0])
    text = line.value()
    assert "LFU &lt;is&gt; best." in text and f"data-best='{mark(found[0])}'" in text and "Cache policy LFU" in text  # type: ignore[arg-type]
    old = BestPicked(None, {"best": mark(Best("Another.", {"eviction": "random"}))})
    line._use(old)
    assert host.models.settings["eviction"] != "lfu", "the result was another when the button was drawn"
    shown = line._use(BestPicked(None, {"best": mark(found[0])}))  # type: ignore[arg-type]
    assert host.models.settings["eviction"] == "lfu" and "It is in use." in shown and "<button" not in shown
    found[0] = Best("Similar is best.", {"substitute": "similar", "miss": "substitute"})
    assert "needs a profile" in line._use(BestPicked(None, {"best": mark(found[0])}))
    found[0] = Best("None is.")
    assert "None is." in line.value() and "<button" not in line.value()
    found[0] = None
    assert line.value() == ""


@pytest.mark.parametrize("value", ["", "x"])
def test_a_mark_of_nothing_changes_nothing(host: Host, value: str) -> None:
    with page():
        line = BestLine(host, "best", lambda: Best("LFU.", {"eviction": "lfu"}))
    before = host.models.settings
    line._use(BestPicked(None, {"best": value}))
    assert host.models.settings is before
