"""Simulates every cache policy, prefetcher and budget on the same tokens, and the bounds that none can beat."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from app.store import results
from core.errors import SettingError
from core.settings.registry import variant
from core.simulate import BELADY, BELADY_BYPASS, Clock, Result
from core.simulate.blocks import Block
from core.simulate.prefetchers import TimedResult

AUTO = "auto"
STEP = 10  # percent between the budgets that "auto" stands for
BEND = 2.0  # ratio of the LRU curve's slopes below and above the cliff, at least
STEEP = 0.15  # hit rate lost below the cliff for every tenth of all experts, at least
NONE = "none"
BOUNDS = {name: results.BOUNDS[name] for name in (BELADY, BELADY_BYPASS)}  # both know the future
SHOWN = ("total_ms", "stall_ms", "wasted_bytes")  # metrics that a Row has under another name or in other units


@dataclass(frozen=True, slots=True)
class About:
    """What the figures apply to: the routing, the caches, and the clock that converts misses to time."""

    name: str
    model: str
    tokens: int
    layers: int
    experts: int
    top_k: int
    scope: str
    start: str
    expert_bytes: int  # 0 = not known
    clock: dict[str, float] | None  # the fields of core.simulate.Clock; None = no times are predicted
    link: str  # description of the link and the clock
    notes: tuple[str, ...] = ()
    chosen: tuple[str, str, int] = ("", NONE, 0)  # policy, prefetcher and slots when the analysis was started
    created: str = ""  # ISO 8601
    bypass: bool = False  # the caches have slots set aside for bypass

    def head(self) -> str:
        """Header lines of a CSV file; each begins with #."""
        lines = [f"# {field.name}: {_plain(getattr(self, field.name))}\n" for field in fields(self)]
        return "".join(
            [
                *lines,
                "# all figures are simulated: the recorded routing through the same policies with a virtual clock\n",
            ]
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration. Rates are per decode request; None = unknown. `slots` is the sum over all layers."""

    policy: str
    predictor: str
    slots: int
    hit_rate: float | None
    misses: float | None  # per token
    tpot_ms: float | None
    copies: float | None  # experts over the link per token, prefetched ones included
    wasted: float | None = None  # of those, copied but not used
    stall_ms: float | None = None
    saved_ms: float | None = None  # TPOT of the same cache without a prefetcher minus this one's
    more: Mapping[str, float] = field(default_factory=dict)  # with a prefetcher: other metrics by name, per token
    blocks: tuple[Block, ...] = ()  # what tokens cost in each part of the routing (core.simulate.blocks)


@dataclass(frozen=True, slots=True)
class Bound:
    """Bounds that no policy and prefetcher can beat with this number of slots."""

    slots: int
    hit_rate: float | None  # Belady's, first requests counted as misses
    misses: float | None  # per token
    tpot_ms: float | None  # of Belady without prefetching
    perfect_ms: float | None  # every copy hidden behind computing as far as the link allows; copies as Belady's
    bypass_hit_rate: float | None = None  # Belady's with bypass; None = too few slots for it, or in one pool no better
    bypass_misses: float | None = None  # per token
    bypass_tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """The whole result."""

    about: About
    rows: tuple[Row, ...]
    bounds: tuple[Bound, ...]  # by increasing slots

    @property
    def resident_ms(self) -> float | None:
        """TPOT with everything resident."""
        return self.about.clock["compute_ms"] if self.about.clock else None

    @property
    def total(self) -> int:
        """Number of experts over all layers."""
        return self.about.layers * self.about.experts

    def bound(self, slots: int) -> Bound:
        """The bounds for this number of slots. Raises StopIteration if there are none."""
        return next(bound for bound in self.bounds if bound.slots == slots)

    def best_hit_rate(self, slots: int) -> float | None:
        """The highest hit rate that caches like these can have without a prefetcher."""
        bound = self.bound(slots)
        return bound.bypass_hit_rate if self.about.bypass and bound.bypass_hit_rate is not None else bound.hit_rate

    def curve(self, policy: str) -> list[Row]:
        """The rows of one policy without a prefetcher by increasing slots."""
        found = (row for row in self.rows if (row.policy, row.predictor) == (policy, NONE))
        return sorted(found, key=lambda row: row.slots)


def sizes(
    text: str, layers: int, experts: int, top_k: int, scope: str, now: int = 0, *, bypass: bool = False
) -> list[int]:
    """Parse budgets into slots summed over all layers, increasing. Raises SettingError.

    "25%, 50%, 400": shares of all experts, or numbers of them. "auto": every tenth that can hold one token's experts,
    and `now`, the current slots. With `bypass` one layer's more are set aside."""
    total, least = layers * experts, top_k * (layers + bypass if scope == "layer" else 1)
    if text.strip().lower() in ("", AUTO):
        found = {total * percent // 100 for percent in range(STEP, 101, STEP)} | {now, total}
        return sorted({min(slots, total) for slots in found if slots >= least} | {least})
    chosen: set[int] = set()
    for word in re.split(r"[,;\s]+", re.sub(r"\s+%", "%", text.strip())):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", word)
        if match is None or (not match[2] and "." in word):
            raise SettingError(
                f"The budget {word!r} is not understood. Write shares like 25%, 50%, or numbers of "
                "experts, with commas between them; or auto."
            )
        slots = int(float(match[1]) / 100 * total + 1e-9) if match[2] else int(match[1])
        if not least <= slots <= total:
            raise SettingError(
                f"The budget {word} does not work here: it must be between {least} experts "
                f"({100 * least / total:.3g} %), which one token needs, and all {total}."
            )
        chosen.add(slots)
    return sorted(chosen)


def rows(results: Sequence[Result]) -> list[Row]:
    """Rows of the caches without a prefetcher, Belady's left out."""
    return [
        Row(
            one.config.policy,
            NONE,
            one.config.slots,
            one.hit_rate,
            one.misses_per_token,
            one.tpot_ms,
            one.misses_per_token,
            0.0 if one.misses_per_token is not None else None,
            blocks=one.blocks,
        )
        for one in results
        if one.config.policy not in (BELADY, BELADY_BYPASS)
    ]


def bounds(results: Sequence[Result], clock: Clock | None, *, bypass: bool = False) -> list[Bound]:
    """Bounds from the results of BELADY, and of BELADY_BYPASS for as many of the sizes as have one. Perfect prefetching
    takes the longer of computing and of the fewest copies that any cache makes, one with `bypass` or one without."""
    sparing = {one.config.slots: one for one in results if one.config.policy == BELADY_BYPASS}
    found = []
    for one in sorted((one for one in results if one.config.policy == BELADY), key=lambda one: one.config.slots):
        other = sparing.get(one.config.slots)
        least = other.misses_per_token if bypass and other is not None else one.misses_per_token
        perfect = None if clock is None or least is None else max(clock.compute_ms, least * clock.load_ms)
        bound = Bound(one.config.slots, one.hit_rate, one.misses_per_token, one.tpot_ms, perfect)
        if other is not None:
            bound = replace(
                bound,
                bypass_hit_rate=other.hit_rate,
                bypass_misses=other.misses_per_token,
                bypass_tpot_ms=other.tpot_ms,
            )
        found.append(bound)
    return found


def prefetched(found: TimedResult, blob_bytes: int, plain: Row | None, *, sized: bool = True) -> Row:
    """Row of a cache with a prefetcher, simulated with experts of `blob_bytes`; `plain` = the same cache without one.
    `sized`: that is their true size."""
    config = found.timed.config
    demand, ahead, wasted = (
        (found.per_token(name) or 0.0) / blob_bytes for name in ("demand_bytes", "prefetch_bytes", "wasted_bytes")
    )
    return Row(
        config.policy,
        found.timed.predictor,
        config.slots,
        found.hit_rate,
        demand,
        found.tpot_ms,
        demand + ahead,
        wasted,
        found.per_token("stall_ms"),
        less(plain.tpot_ms if plain is not None else None, found.tpot_ms),
        found.more(SHOWN, sized=sized),
        found.blocks,
    )


def cliff(points: Sequence[tuple[float, float]]) -> int | None:
    """Index of the cliff's edge in a curve of (share of experts, hit rate) by increasing share, or None.

    The slope of a segment is hit rate per share. The edge is the point where the slope below exceeds the slope above by
    most; a curve has one only if the segment below is BEND times as steep as the one above and loses at least STEEP of
    hit rate for every tenth of all experts given up. The curve is flat once everything is resident. Below the edge LRU
    evicts experts just before they are needed again."""
    slopes = [(high[1] - low[1]) / (high[0] - low[0]) for low, high in pairwise(points)]
    slopes += [0.0] if points and points[-1][0] >= 1 else []
    bends = [
        (below - above, at)
        for at, (below, above) in enumerate(pairwise(slopes), 1)
        if below >= BEND * max(above, 0.0) and below / 10 >= STEEP
    ]
    return max(bends, key=lambda bend: (bend[0], -bend[1]))[1] if bends else None


def lru_cliff(table: Table) -> Row | None:
    """The smallest budget above LRU's cliff, or None without a cliff."""
    curve = [row for row in table.curve("lru") if row.hit_rate is not None]
    at = cliff([(row.slots / table.total, row.hit_rate or 0.0) for row in curve])
    return None if at is None else curve[at]


def title(kind: str, name: str) -> str:
    """The display title of a variant; its name if it is no longer registered."""
    if name in BOUNDS:
        return BOUNDS[name]
    try:
        return variant(kind, name).title
    except SettingError:
        return name


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the known values."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def less(left: float | None, right: float | None) -> float | None:
    """left - right; None unless both are known."""
    return None if left is None or right is None else left - right


def times(left: float | None, right: float | None) -> float | None:
    """left * right; None unless both are known."""
    return None if left is None or right is None else left * right


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.6g}" for name, number in value.items())
    return ("; ".join(str(part) for part in value) if isinstance(value, tuple) else str(value)).replace("\n", " ")
