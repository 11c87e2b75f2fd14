"""The suites of speed: their arithmetic, and that what is left out is left out."""

from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness.paired import CONFIDENCE, difference, pseudo_values, ratios, stretches, student
from bench.harness.run import Run
from bench.models import fixtures
from bench.papers import moepic
from bench.papers.document import StoredResults
from bench.papers.parts import HOLDS, NO, PART
from bench.papers.verdicts import answer
from bench.speed import prefill
from bench.speed.dispatch import stubbed
from bench.speed.prefill import Seen
from bench.speed.split import judged
from bench.speed.tiers_result import Runs, goals
from core.policy.allocation.cache_plan import CachePlan
from core.runtime.product import Product, by_expert
from tests.selection import layered


def test_experts_are_constants_inside_and_what_they_were_afterwards() -> None:
    own = Product(lambda slots, x, counts=None, places=None: x + 1, by_expert)
    math = SimpleNamespace(token=own)
    with stubbed([math]):  # type: ignore[list-item]
        state = torch.ones(1, 4)
        assert math.token.multiply([1, 2, 3], state) is state and math.combine(state, None, None) is state
        assert math.token.batches is by_expert
    assert math.token is own and "combine" not in vars(math), "the class's own is seen again"


def rows(times: dict[str, float]) -> dict[str, dict[str, Any]]:
    return {name: {"tpot_ms": ms} for name, ms in times.items()}


def test_what_pays_is_judged_against_the_best_plain_cache() -> None:
    times = {"lru": 9.0, "lru_gate": 6.0, "lcp_gate": 8.0, "theta 0.00": 20.0, "theta 0.50": 4.0, "theta 1.00": 7.0}
    plan = CachePlan((4.0,), (8,), (0.5,), (1.0,), 4.0)
    found = judged(rows({**times, "moepic_split": 3.0}), {"moepic_split": plan, "theta 0.25": plan})
    assert found["best_plain"] == "lru_gate" and found["gain"] == 2.0 and found["gain_of_best_theta"] == 1.5
    assert found["best_theta"] == 0.5 and found["inner_optimum"] is True
    assert found["predicted_over_measured"] == {"moepic_split": pytest.approx(5 / 3)}
    nothing = judged({name: {"problem": "no room"} for name in times}, {})
    assert nothing["gain"] is None and nothing["best_theta"] is None and nothing["predicted_over_measured"] == {}


def link(best: str, full: float) -> dict[str, Any]:
    times = {"theta 0.00": 9.0, "theta 0.50": 6.0, "theta 1.00": 7.0, "moepic_split": full, best: 3.0}
    rows = {name: {"tpot_rounds_ms": [ms + drift for drift in (0.0, 2.0, 0.5)]} for name, ms in times.items()}
    return {"rows": rows, "load_ms": 1.0}


def test_the_papers_claims_are_read_off_it() -> None:
    good, bad = link("theta 0.50", 2.5), link("theta 1.00", 8.0)
    by_name = {row.where: row for row in moepic.PAPER.rows}
    for links, split, plan in (
        ({"a": good}, HOLDS, HOLDS),
        ({"a": bad}, PART, NO),
        ({"a": good, "b": bad}, PART, PART),
    ):
        sizes = {"top_k": 2, "layers": 4, "resident_ms": {"whole": 4.0}}
        result = {"links": links, "budget": "20%", "model": "demo", "date": "2026-11-26T00:00:00+00:00", **sizes}
        results = StoredResults()
        results.newest = lambda bench, result=result: [("split.json", result)]  # type: ignore[method-assign,misc]
        for where, wanted in (("Figure 4b", split), ("Table 3, without its configurator", plan)):
            found = answer(by_name[where], results)
            assert found.verdict == wanted and "copy/compute a 2" in found.text


def test_the_best_variant_is_compared_round_by_round() -> None:
    runs = Runs()
    assert runs.best("llama.cpp", "bf16", "50%") is None and runs.rounds("llama.cpp", "bf16", "50%") == []
    for ours, one, two in ((8.0, 1.0, 3.0), (6.0, 9.0, 2.0), (8.0, 1.0, 2.0)):
        runs.add("moestro", "bf16", "50%", "", ours, {"hit_rate": ours / 10, "limit_bytes": None})
        runs.add("llama.cpp", "bf16", "50%", "1 thread", one, {})
        runs.add("llama.cpp", "bf16", "50%", "2 threads", two, {})
    assert runs.best("llama.cpp", "bf16", "50%") == "2 threads"
    assert runs.ratio(("moestro", "bf16", "50%"), ("llama.cpp", "bf16", "50%")) == 3.0  # of 8/3, 3, 4
    assert runs.ratio(("moestro", "bf16", "50%"), ("llama.cpp", "int4", "50%")) is None
    assert runs.middle("moestro", "bf16", "50%", "hit_rate") == 0.8
    assert runs.middle("moestro", "bf16", "50%", "limit_bytes") is None


@pytest.mark.parametrize(("read", "kept"), [(104.0, True), (106.0, False), (94.0, False)])
def test_bytes_off_by_more_than_five_percent_miss_the_goal(read: float, kept: bool) -> None:
    runs = Runs()
    for name in ("bf16", "int4"):
        runs.add("moestro", name, "50%", "", 1.0, {"disk_bytes_per_token": 100.0, "read_bytes_per_token": read})
    details = {name: {"50%": {"misses_x_blob": 100.0}} for name in ("bf16", "int4")}
    imports = {"bf16": {"rss_mb": 1200.0, "dense_mb": 100.0}, "int4": {"rss_mb": 900.0, "dense_mb": 100.0}}
    found = {goal["goal"].split(",")[0]: goal["kept"] for goal in goals(runs, details, imports)}
    assert found["bytes read / (misses x blob)"] is kept
    assert found["all resident"] is None
    assert [g["kept"] for g in goals(runs, details, imports)[-2:]] == [False, True]


def test_the_generated_model_is_used_again(tmp_path: Path) -> None:
    said: list[str] = []
    with Run(said.append, True, tmp_path, lambda found: None) as run:
        assert fixtures.build(run, "none").model == fixtures.build(run, "none").model
    assert len(said) == 1


def seen_by(**seconds: list[float]) -> prefill.Systems:
    """Three rounds of every system, of 2 s each unless given; at 50 %, 3 GB were missing and 3 GB read."""
    found: prefill.Systems = {}
    for name in ("transformers", *(f"{name} {budget}" for name in prefill.FORMATS for budget in prefill.BUDGETS)):
        took = seconds.get(name.replace(" ", "_").replace("%", ""), [2.0, 2.0, 2.0])
        missing = [3_000_000_000] * 3 if "50" in name else [0] * 3
        found[name] = {100: Seen(took, [0.0] * 3, missing, list(missing), [torch.tensor([1.0, 2.0])] * 3)}
    return found


def test_ratios_are_medians_of_the_rounds_own() -> None:
    found = prefill.result(seen_by(transformers=[1.0, 4.0, 9.0], bf16_100=[2.0, 2.0, 3.0]), 1.0)
    assert found["prefill_ratio"]["bf16"]["100%"]["100"] == 2.0  # of 0.5, 2 and 3
    assert found["int4_over_bf16"]["100%"]["100"] == 1.0  # of 1, 1 and 1.5
    assert found["tok_s"]["bf16 100%"]["100"] == 50.0
    assert found["over_bound"]["bf16"]["50%"]["100"] == pytest.approx(2 / 3)  # 3 s to read, whatever computing takes
    assert found["over_bound"]["bf16"]["100%"]["100"] == 1.0


def test_other_programs_have_ratios_of_the_same_rounds() -> None:
    seen = seen_by(bf16_100=[2.0, 2.0, 3.0])
    assert prefill.result(seen, 1.0)["over"] == {}
    seen["llama.cpp bf16"] = {100: Seen([1.0, 4.0, 3.0])}
    found = prefill.result(seen, 1.0)
    assert found["over"]["bf16 at 100% over llama.cpp"]["100"]["ratio"] == pytest.approx(1.0)  # of .5, 2 and 1
    assert found["tok_s"]["llama.cpp bf16"]["100"] == pytest.approx(100 / 3)


def test_what_is_read_twice_misses_its_goal() -> None:
    seen = seen_by()
    seen["int4 50%"][100].read_bytes = [6_000_000_000, 3_000_000_000, 6_000_000_000]
    found = prefill.result(seen, 1.0)
    assert found["read_over_missing"]["int4"]["50%"]["100"] == 2.0
    assert found["read_over_missing"]["bf16"]["50%"]["100"] == 1.0
    assert found["read_over_missing"]["bf16"]["100%"]["100"] is None  # nothing was missing
    assert [goal["kept"] for goal in found["goals"]] == [True, False, True]


def test_one_other_bit_is_found() -> None:
    seen = seen_by()
    seen["bf16 50%"][100].logits[1] = torch.nextafter(torch.tensor([1.0, 2.0]), torch.tensor([9.0, 9.0]))
    found = prefill.result(seen, 1.0)
    assert found["same_bits"] == {"100%": {"100": True}, "50%": {"100": False}}


def test_slower_than_transformers_at_one_length_misses_the_goal() -> None:
    seen = seen_by()
    for name in seen:
        seen[name][200] = Seen([1.0] * 3, [0.0] * 3, [0] * 3, [0] * 3, [])
    seen["int4 100%"][200].seconds = [1.5] * 3
    ratio, read, int4 = prefill.result(seen, 1.0)["goals"]
    assert (ratio["kept"], read["kept"], int4["kept"]) == (False, True, False)
    assert ratio["found"] == int4["found"] == pytest.approx(1 / 1.5)


TRIALS = 1000


def drifting(random: np.random.Generator, tokens: int) -> np.ndarray:
    """Noise [tokens] whose neighbours are alike (AR(1), correlation .6)."""
    noise = random.normal(size=tokens)
    for at in range(1, tokens):
        noise[at] += 0.6 * noise[at - 1]
    return noise


@pytest.mark.parametrize("blocks", layered([3, 5, 20], quick=lambda blocks: blocks == 5))
def test_rounds_hold_a_known_difference_as_often_as_they_say(blocks: int) -> None:
    """Both sides share what the machine did in a round, which is ten times their own noise."""
    random, held = np.random.default_rng(blocks), 0
    for _ in range(TRIALS):
        machine = random.normal(0, 10, blocks)
        found = difference(list(machine + random.normal(2, 1, blocks)), list(machine + random.normal(0, 1, blocks)))
        assert found is not None
        held += found.low <= 2 <= found.high
    assert held / TRIALS == pytest.approx(CONFIDENCE, abs=0.02)


@pytest.mark.long(0.1)
def test_stretches_of_tokens_hold_it_where_tokens_alone_would_not() -> None:
    random, held, alone = np.random.default_rng(1), 0, 0
    for _ in range(150):
        some, others = 1 + drifting(random, 480), drifting(random, 480)
        for values, blocks in ((stretches(list(some)), stretches(list(others))), (list(some), list(others))):
            found = difference(values, blocks)
            assert found is not None
            inside = found.low <= 1 <= found.high
            held, alone = held + (inside and len(values) == 30), alone + (inside and len(values) == 480)
    assert held / 150 >= 0.9 and alone / 150 < 0.8


def test_a_ratio_of_sums_holds_it_with_blocks_of_unequal_size() -> None:
    """Hit rates .7 and .6 of the same requests, of which a block has 4 to 60."""
    random, held = np.random.default_rng(2), 0
    for _ in range(200):
        asked = random.integers(4, 60, 24)
        some, others = (ratios(random.binomial(asked, rate), asked) for rate in (0.7, 0.6))
        found = difference(some, others)
        assert found is not None
        held += found.low <= 0.1 <= found.high
    assert held / 200 == pytest.approx(CONFIDENCE, abs=0.035)
    assert fmean(ratios([1, 3], [4, 4])) == pytest.approx(0.5)


@pytest.mark.long(0.1)
def test_several_comparisons_are_right_together() -> None:
    """Twelve differences of nothing: with one interval each 46 of 100 answers would name one, together 5."""
    random, alone, together = np.random.default_rng(3), 0, 0
    for _ in range(150):
        drawn = [difference(list(random.normal(size=6)), 0.0, count) for count in (1, 12) for _ in range(12)]
        apart = [one is not None and abs(one.mean) > one.half for one in drawn]
        alone, together = alone + any(apart[:12]), together + any(apart[12:])
    assert alone / 150 > 0.3 and together / 150 < 0.1


def test_there_is_no_interval_without_enough_blocks_of_the_same_things() -> None:
    assert difference([1.0, 2.0], [0.0, 0.0]) is None and difference([1.0, 2.0, 3.0], [1.0, 2.0]) is None
    same = difference([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert same is not None and (same.low, same.high, same.blocks) == (1.0, 1.0, 3)


def test_pseudo_values_of_a_mean_are_its_blocks_and_students_t_is_the_table() -> None:
    values = [1.0, 4.0, 2.0, 9.0]
    assert pseudo_values(values, fmean) == pytest.approx(values) and pseudo_values(values[:1], fmean) == []
    found = [student(freedom, 0.95) for freedom in (1, 2, 3, 4, 10, 30)]
    assert found == pytest.approx([12.7062, 4.3027, 3.1824, 2.7764, 2.2281, 2.0423], abs=1e-4)
    assert student(5, 0.99) == pytest.approx(4.0321, abs=1e-4)
