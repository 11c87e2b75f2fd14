"""One row of an evaluation, as data: JSON, CSV, and the Pareto front in accuracy and speed."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from core.measure.evaluate.tally import LOSSY, ModeTotals
from core.settings.param import Value

if TYPE_CHECKING:  # showing rows needs no torch
    from core.measure.evaluate.passages import Heard

# Figure -> (unit, description). Everything that shows a row takes its labels from here.
FIGURES: dict[str, tuple[str, str]] = {
    "exact_match": ("share", "questions in a phrasing that was trained, answered right to the last token"),
    "exact_match_se": ("share", "its standard error, from the number of questions"),
    "unseen_match": ("share", "the same for phrasings that were never trained"),
    "unseen_match_se": ("share", "its standard error"),
    "perplexity": ("1", "of the held-out text, decoded token by token"),
    "perplexity_se": ("1", "its standard error"),
    "agreement": ("share", "positions of that text whose likeliest next token is the exact model's"),
    "kl": ("nats", "mean divergence of the next-token distribution from the exact model's, at those positions"),
    "substituted_rate": ("share", "(token, layer, expert) choices of the routers that were not computed as chosen"),
    "substituted": ("share", "of them: another expert was computed"),
    "dropped": ("share", "of them: none was computed"),
    "predicted": ("share", "of them: the predicted routing was computed"),
    "hit_rate": ("share", "requests that found their expert resident"),
    "link_bytes": ("bytes per token", "copied to the device, on demand and ahead"),
    "prefetch_bytes": ("bytes per token", "of them: ahead"),
    "saved": ("share", "link bytes less than exact mode's at the same residency"),
    "tok_s": ("tokens per second", "decoded"),
    "tpot_ms": ("ms per token", "compute + stall + idle"),
    "tpot_ms_se": ("ms per token", "its standard error, from runs of eight tokens"),
    "compute_ms": ("ms per token", "the device was busy with the model"),
    "stall_ms": ("ms per token", "computing waited for a copy"),
    "idle_ms": ("ms per token", "neither"),
    "copy_ms": ("ms per token", "the link was busy; overlaps computing and stalls"),
    "others_cores": ("CPU cores", "that other programs used meanwhile: compare speeds only where it is small"),
}

MEANS = ("link_bytes", "prefetch_bytes", "compute_ms", "stall_ms", "idle_ms", "copy_ms")  # of a decoded token
RATES = {"substituted_rate": "changed", **{name: name for name in LOSSY}}  # figure -> what is counted, of assignments


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One mode at one residency, all figures of decoding; None = not known. `problem` = why it could not be run, "" =
    it was. Units: FIGURES."""

    mode: str
    title: str
    residency: float  # as requested: share of the routed experts
    slots: int = 0
    problem: str = ""
    exact_match: float | None = None
    exact_match_se: float | None = None
    unseen_match: float | None = None
    unseen_match_se: float | None = None
    perplexity: float | None = None
    perplexity_se: float | None = None
    agreement: float | None = None
    kl: float | None = None
    substituted_rate: float | None = None
    substituted: float | None = None
    dropped: float | None = None
    predicted: float | None = None
    hit_rate: float | None = None
    link_bytes: float | None = None
    prefetch_bytes: float | None = None
    saved: float | None = None
    tok_s: float | None = None
    tpot_ms: float | None = None
    tpot_ms_se: float | None = None
    compute_ms: float | None = None
    stall_ms: float | None = None
    idle_ms: float | None = None
    copy_ms: float | None = None
    others_cores: float | None = None
    questions: int = 0  # asked, of both kinds
    positions: int = 0  # predicted positions of the text
    decoded: int = 0  # tokens that the times and bytes are means over
    link_bytes_total: int = 0
    emulated: bool = False  # whether the link was
    settings: Mapping[str, Value] = field(default_factory=dict)  # of the mode
    blocks: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by question, or by stretch of the text

    @property
    def key(self) -> tuple[str, float]:
        return self.mode, self.residency

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> EvaluationRow:
        """From `asdict`. Raises TypeError for rows of another version."""
        return cls(**kept)


def row(
    mode: str,
    title: str,
    residency: float,
    slots: int,
    settings: Mapping[str, Value],
    verdicts: Sequence[tuple[bool, bool]],
    heard: Heard,
    tally: ModeTotals,
    others_cores: float | None = None,
) -> EvaluationRow:
    """Builds a row from measurements; `verdicts` are (trained phrasing?, answered right?)."""
    seen = [right for trained, right in verdicts if trained]
    unseen = [right for trained, right in verdicts if not trained]
    (match, match_se), (other, other_se) = rate(seen), rate(unseen)
    perplexity, perplexity_se = perplexity_of(heard)
    tpot_ms = tally.mean("total_ms")
    counted: dict[str, Any] = {name: tally.mean(name) for name in MEANS}
    counted |= {name: tally.rate(part, "assignments") for name, part in RATES.items()}
    return EvaluationRow(
        mode,
        title,
        residency,
        slots,
        exact_match=match,
        exact_match_se=match_se,
        unseen_match=other,
        unseen_match_se=other_se,
        perplexity=perplexity,
        perplexity_se=perplexity_se,
        agreement=heard.agreed / heard.tokens if heard.tokens else None,
        kl=heard.kl / heard.tokens if heard.tokens else None,
        **counted,
        hit_rate=tally.rate("hits", "requests"),
        tok_s=1e3 / tpot_ms if tpot_ms else None,
        tpot_ms=tpot_ms,
        tpot_ms_se=tally.total_ms_se,
        others_cores=others_cores,
        questions=len(verdicts),
        positions=heard.tokens,
        decoded=tally.tokens,
        link_bytes_total=int(tally.total("link_bytes")),
        emulated=tally.emulated,
        settings=dict(settings),
        blocks={"exact_match": [*map(float, seen)], "unseen_match": [*map(float, unseen)], **heard.blocks()},
    )


def rate(right: Sequence[bool]) -> tuple[float | None, float | None]:
    """Share of true values, and its standard error sqrt(p (1 - p) / n)."""
    if not right:
        return None, None
    p = sum(right) / len(right)
    return p, math.sqrt(p * (1 - p) / len(right))


def perplexity_of(heard: Heard) -> tuple[float | None, float | None]:
    """exp of the mean negative log-likelihood, and its standard error to first order."""
    if not heard.tokens:
        return None, None
    mean = heard.nll / heard.tokens
    spread = max(0.0, heard.nll_squares / heard.tokens - mean * mean) / heard.tokens
    try:
        return math.exp(mean), math.exp(mean) * math.sqrt(spread)
    except OverflowError:
        return math.inf, math.inf


def with_savings(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """The rows with the savings over the link, where exact mode was run at the same residency."""
    exact = {one.residency: one.link_bytes for one in rows if one.mode == "exact"}
    return [
        replace(one, saved=1 - one.link_bytes / whole)
        if (whole := exact.get(one.residency)) and one.link_bytes is not None
        else one
        for one in rows
    ]


def front(points: Sequence[tuple[float | None, float | None]]) -> list[int]:
    """Indices of the points on the Pareto front (larger is better in both numbers); points without a number are never
    on it."""
    known = [(at, x, y) for at, (x, y) in enumerate(points) if x is not None and y is not None]
    best, found = -math.inf, list[int]()
    for at, x, y in sorted(known, key=lambda one: (-one[1], -one[2])):
        twin = bool(found) and points[found[-1]] == (x, y)
        if y > best or twin:
            found.append(at)
            best = max(best, y)
    return sorted(found)


def pareto(rows: Sequence[EvaluationRow], accuracy: str = "exact_match") -> list[EvaluationRow]:
    """The rows that no other row dominates in accuracy and speed."""
    points = [(one.tok_s, getattr(one, accuracy)) for one in rows]
    return [rows[at] for at in front(points)]


def to_json(one: EvaluationRow) -> dict[str, Any]:
    """The row for JSON; an infinite perplexity becomes None, and so does an infinite divergence of a stretch."""
    return {
        **{name: _finite(value) for name, value in asdict(one).items()},
        "blocks": {name: [_finite(value) for value in values] for name, values in one.blocks.items()},
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_csv(rows: Sequence[EvaluationRow], about: Mapping[str, object]) -> str:
    """Comment lines with the conditions and units, then one line per row."""
    out = io.StringIO()
    for name, value in about.items():
        out.write(f"# {name}: {value}\n")
    for name, (unit, what) in FIGURES.items():
        out.write(f"# {name} [{unit}]: {what}\n")
    names = [one.name for one in fields(EvaluationRow) if one.name != "blocks"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for one in rows:
        writer.writerow([_cell(getattr(one, name)) for name in names])
    return out.getvalue()


def _cell(value: Any) -> object:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={setting}" for name, setting in value.items())
    return "" if value is None else f"{value:.10g}" if isinstance(value, float) else value
