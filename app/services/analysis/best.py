"""What is best here, in one sentence: by how much, and which settings that means.

One is only called best where the difference exceeds its noise (core.engine.quality.interval), and only things measured
on the same tokens, or on the same questions, are compared."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from app.services.analysis.lab import Lab, named
from app.services.analysis.quality import QualityResult, accuracy_of
from app.services.analysis.whatif import NONE, Row, Table, title
from core.engine.quality.interval import surely_more
from core.measure.evaluate.modes import BASE
from core.measure.evaluate.rows import EvaluationRow
from core.profile import Profile
from core.settings.lossy import EXACT
from core.settings.param import Value
from core.settings.registry import variant
from core.simulate.blocks import gain
from core.simulate.prefetchers import ORACLE

OF = "Of the experts that the next layer needs,"
CERTAIN_TOKENS = 200  # read for a profile, below which no recall is compared


@dataclass(frozen=True, slots=True)
class Best:
    """`text` is the sentence, `changes` the settings that apply it ({} = there is nothing to change)."""

    text: str
    changes: Mapping[str, Value] = field(default_factory=dict)


def of_table(table: Table) -> Best | None:
    """Of a comparison of caches: at the budget in use, the fastest policy and prefetcher other than those in use. None
    without a comparable result."""
    policy, predictor, now = table.about.chosen
    sizes = sorted({row.slots for row in table.rows})
    if not sizes:
        return None
    slots = min(sizes, key=lambda n: abs(n - now)) if now else sizes[len(sizes) // 2]
    rows = [row for row in table.rows if row.slots == slots and cost(row) is not None]
    mine = next((row for row in rows if (row.policy, row.predictor) == (policy, predictor)), None)
    mine = mine or next((row for row in rows if (row.policy, row.predictor) == (policy, NONE)), None)
    others = [(row, gap) for row in rows if row is not mine and mine and (gap := gain(row.blocks, mine.blocks))]
    if mine is None or not others:
        return None
    unit, share = ("ms a token", table.resident_ms) if table.resident_ms is not None else ("misses a token", None)
    place = f"With {100 * slots / table.total:.3g} % of the experts in slots"
    row, (less, error) = max(others, key=lambda one: one[1][0])
    if not surely_more(less, error, len(others)):
        return Best(
            f"{place}, nothing compared is faster than {combination(mine)} beyond noise: the best of the others, "
            f"{combination(row)}, differs by {amount(less, error)} {unit}."
        )
    whole = cost(mine) if share is not None else None
    part = f" ({100 * less / whole:.0f} %)" if whole else ""
    changes: dict[str, Value] = {"scope": table.about.scope, "eviction": row.policy}
    if row.predictor != NONE or mine.predictor == predictor:  # else the prefetcher in use was not compared
        changes["predictor"] = row.predictor
    return Best(
        f"{place}, {combination(row)} is best: {amount(less, error)} {unit} less{part} than {combination(mine)}.",
        changes,
    )


def cost(row: Row) -> float | None:
    """Milliseconds per token; misses where no times are known."""
    return row.tpot_ms if row.tpot_ms is not None else row.misses


def of_lab(lab: Lab) -> Best | None:
    """Of a test of prefetchers: the one that saves most time, if one does. None where no times are known."""
    runs = {run.predictor: run for run in lab.ran()}
    plain = runs.get(NONE)
    tried = [run for run in runs.values() if run.predictor not in (NONE, ORACLE)]
    found = [(run, gap) for run in tried if plain is not None and (gap := gain(run.blocks, plain.blocks))]
    if plain is None or not found:
        return None
    run, (less, error) = max(found, key=lambda one: one[1][0])
    if not surely_more(less, error, len(found)):
        text = (
            f"No prefetcher that was tested makes a token faster beyond noise here: the best of them, "
            f"{named(run.predictor)}, by {amount(less, error)} ms."
        )
        used = next((gap for one, gap in found if one.predictor == lab.about.chosen[1]), None)
        costs = used is not None and surely_more(-used[0], used[1])
        return (
            Best(f"{text} Without one it is faster than with the one in use.", {"predictor": NONE})
            if costs
            else Best(text)
        )
    part = f" ({100 * less / plain.tpot_ms:.0f} %)" if plain.tpot_ms else ""
    rest = [(other, gain(run.blocks, other.blocks)) for other, _ in found if other is not run]
    ties = [named(other.predictor) for other, gap in rest if gap and not surely_more(*gap)]
    tied = f" {' and '.join(ties[:2])} {'is' if len(ties) == 1 else 'are'} no worse beyond noise." if ties else ""
    return Best(
        f"{named(run.predictor)} saves most: {amount(less, error)} ms a token{part} less than without a prefetcher."
        f"{tied}",
        {"predictor": run.predictor},
    )


Faster = tuple[EvaluationRow, tuple[float, float], tuple[float, float]]
"""A mode, the milliseconds a token that it saves and the accuracy that it loses, each with its standard error."""


def without_loss(answer: QualityResult) -> tuple[EvaluationRow, Faster | None] | None:
    """At the smallest share of resident experts: exact mode, and the fastest mode that is faster beyond noise and not
    worse beyond noise. None without exact mode, or without another."""
    ran = [row for row in answer.rows if not row.problem and row.tpot_ms is not None]
    exact = min((row for row in ran if row.mode == "exact"), key=lambda row: row.residency, default=None)
    others = [row for row in ran if exact is not None and row.residency == exact.residency and row is not exact]
    if exact is None or not others:
        return None
    figure = accuracy_of(answer.rows)
    questions = int(answer.about["questions"]["seen"]) if figure == "exact_match" else 0
    faster = list[Faster]()
    for row in others:
        saved, lost = _saved(row, exact), _lost(row, exact, figure, questions)
        if saved and lost and surely_more(*saved, len(others)) and not surely_more(*lost):
            faster.append((row, saved, lost))
    return exact, max(faster, key=lambda one: one[1][0], default=None)


def of_quality(answer: QualityResult) -> Best | None:
    """Of an evaluation: the mode `without_loss`. None where there is nothing to compare."""
    if (found := without_loss(answer)) is None:
        return None
    exact, faster = found
    named_figure = "exact match" if accuracy_of(answer.rows) == "exact_match" else "agreement"
    place = f"With {100 * exact.residency:.3g} % of the experts resident"
    if faster is None:
        text = f"{place}, no mode is faster than exact mode beyond noise without being worse: exact mode is best."
        return Best(text, EXACT)
    row, (less, error), (worse, unsure) = faster
    part = f" ({100 * less / exact.tpot_ms:.0f} %)" if exact.tpot_ms else ""
    return Best(
        f"{place}, {row.title} is best: {amount(less, error)} ms a token{part} less than exact mode, and no loss "
        f"beyond noise ({named_figure} {-100 * worse:+.1f} ± {100 * unsure:.1f} points). It may change answers.",
        {name: value for name, value in {**BASE, **row.settings}.items() if name != "quality_rate"},
    )


def _saved(row: EvaluationRow, exact: EvaluationRow) -> tuple[float, float] | None:
    if row.tpot_ms is None or exact.tpot_ms is None or row.tpot_ms_se is None or exact.tpot_ms_se is None:
        return None
    return exact.tpot_ms - row.tpot_ms, math.hypot(row.tpot_ms_se, exact.tpot_ms_se)


def _lost(row: EvaluationRow, exact: EvaluationRow, figure: str, questions: int) -> tuple[float, float] | None:
    was, now = getattr(exact, figure), getattr(row, figure)
    n = questions or row.positions
    if was is None or now is None or not n:
        return None
    return was - now, math.hypot(share_error(was, n), share_error(now, n))


def share_error(share: float, n: int) -> float:
    """The standard error of a share of n, which is not 0 where all or none were counted: of two more, one of each kind
    (Agresti and Caffo 2000)."""
    p = (share * n + 1) / (n + 2)
    return math.sqrt(p * (1 - p) / (n + 2))


def of_profile(profile: Profile) -> Best | None:
    """Of a calibration: whether the trained estimator or the router itself, run one layer early, names more of the next
    layer's experts. None where no router was run early."""
    gate = profile.gate_recall
    if gate is None or profile.tokens < CERTAIN_TOKENS:
        return None
    own, network = variant("predictor", "gate"), variant("predictor", "estimator")
    router = f"the next layer's router, run one layer early, names {100 * float(np.nanmean(gate)):.1f} % of them"
    kept = profile.settings.get("recall")
    trained = kept.get("estimator", ()) if isinstance(kept, Mapping) else ()
    pairs = _paired(trained, gate.tolist())
    if len(pairs) < 2 or not profile.has("estimator"):
        return Best(f"{OF} {router}: the prefetcher “{own.title}” does that.", {"predictor": own.name})
    differences = np.array([net - router for net, router in pairs])
    more, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(len(pairs))
    points = f"{100 * abs(more):.1f} ± {100 * error:.1f} points"
    if surely_more(more, error):
        text = f"{OF} {router}; the trained estimator, on what it was not trained on, {points} more, and is best at it."
        return Best(text, {"predictor": network.name})
    than = f"names {points} less" if surely_more(-more, error) else f"is not better beyond noise ({points} apart)"
    return Best(f"{OF} {router}; the trained estimator {than}.", {"predictor": own.name})


def _paired(trained: Sequence[float | None], early: Sequence[float]) -> list[tuple[float, float]]:
    """(recall of the network, of the router) of the layers that both have; a network's list ends with the last."""
    return [
        (float(net), one)
        for net, one in zip(trained, early[len(early) - len(trained) :], strict=True)
        if net is not None and one == one
    ]


def combination(row: Row) -> str:
    """A policy, and its prefetcher if it has one."""
    policy = title("eviction", row.policy)
    return policy if row.predictor == NONE else f"{policy} with {title('predictor', row.predictor)}"


def amount(value: float, error: float) -> str:
    """A difference with its standard error, with as many digits as that allows."""
    digits = 2 if error < 0.05 else 1 if error < 1 else 0
    return f"{value:.{digits}f} ± {error:.{digits}f}"
