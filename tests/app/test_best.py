"""What is best of a comparison, beyond noise, and the button that applies it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from app.services.analysis.best import Best, amount, of_lab, of_profile, of_quality, of_table, share_error
from app.services.analysis.lab import Lab, Run
from app.services.analysis.quality import QualityResult
from app.services.analysis.whatif import Table
from app.services.host import Host
from app.ui.best import BestLine, mark
from app.ui.event_data import BestPicked
from core.measure.evaluate.rows import EvaluationRow
from core.settings.lossy import EXACT
from core.simulate.blocks import Block
from tests.app.conftest import page
from tests.app.test_whatif import ABOUT, row
from tests.fake_profiles import fake_profile

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
    same = of_lab(lab_of({"none": parts(BASE), "gate": parts(BASE, NOISE[::-1])}, "gate"))
    assert same is not None and not same.changes, "nothing is gained without it, either"
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
    assert host.models.settings["eviction"] == "lfu" and "In use." in shown and "<button" not in shown
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
