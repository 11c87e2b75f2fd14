"""The share of the speed limit: how little time decoded tokens could have taken, and where the rest of it went.

What one pass took = its `total_ms` + its `between_ms`. Every instant of that on the computing thread is one of these,
each at most what those before it left, so that none is negative and they add up (`measured`):

    computing   `kernel_ms`, where native steps compute the model. Elsewhere (the reference arithmetic, a GPU) they are
                not told from the calls around them: `compute_ms` - `predict_ms` - `join_ms` - `record_ms`
    prefetch    `caused_ms` of waiting for copies, and `predict_ms`: prefetches that came late, or were of no use and in
                the way, and what choosing them took
    waiting     the rest of `stall_ms`: waits for copies on demand
    host        `join_ms`
    sampling    `sample_ms`
    delivery    `between_ms`
    dispatch    all else: Python between the native steps, applying settings, recording

Over a window of decoded tokens, all in sums (`speed_limit`):

    copy        seconds that a byte keeps the link busy: its busy time over the bytes that it moved, both measured
    fewest      bytes that any cache policy must copy: the misses of Belady's rule on the same tokens and slots, from
                the best first contents (core.simulate.regret), less the requests that the host computed or that a lossy
                option left out; at most those that were used
    limit       max(computing, fewest * copy): everything overlaps, nothing is copied but that

Of waiting, `copies` = the limit - computing is in the limit. The rest is

    regret      demand * copy * (1 - fewest / used): the copies on demand that the best policy would have spared, at
                most what is left. used = demanded, admitted and prefetched bytes without the wasted ones
    link        what is left: no other policy spares these copies, but the link was idle when they could have begun

Where the limit is longer than computing and waiting together, copies went on during the other parts, which are
shortened by that in proportion. So computing + copies = limit, and with all other parts the time taken. In a single
pass the parts of waiting have the proportions of the window. Without `fewest` (policies are not compared, or not yet)
the limit is computing, and `link` is all waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
PARTS = ("computing", "copies", "regret", "link", "prefetch", "host", "dispatch", "sampling", "delivery")
"""In the order of a stacked bar: the first two are the limit."""
WINDOW = 64  # decoded tokens that speed, hit rate and prefetching are over, and passes that the rate of the link is
MOVED = (
    "copy_ms",
    "requests",
    "demand_bytes",
    "prefetch_bytes",
    "wasted_bytes",
    "admitted_bytes",
    "host_computed",
    "unfetched",
)
COLUMNS = (
    "index",
    "decode",
    "tokens",
    "total_ms",
    "between_ms",
    "compute_ms",
    "stall_ms",
    "predict_ms",
    "record_ms",
    "kernel_ms",
    "caused_ms",
    "join_ms",
    "sample_ms",
    "emulated",
    *MOVED,
)
"""Metrics of passes, and `unfetched`: requests for a missing expert that a lossy option left out."""


class Fewest(NamedTuple):
    """What the best cache policy would have missed."""

    rate: float  # misses / requests
    tokens: int  # the decoded tokens that this is of: the last ones ...
    until: int  # ... up to this pass


@dataclass(frozen=True, slots=True)
class SpeedLimit:
    """Of the last decoded passes. Times in milliseconds."""

    tokens: int  # passes that the means are over
    total_ms: float  # mean time taken; NaN without a pass
    limit_ms: float  # mean
    parts: Mapping[str, float]  # mean of each of PARTS; their sum is total_ms
    known: bool  # `fewest` is known
    emulated: bool  # copies were paced to an emulated link in some of these passes
    step: npt.NDArray[np.int32]  # [N] index of each pass shown
    counted: Mask  # [N] whether the means are over it
    by_pass: npt.NDArray[np.float32]  # [PARTS, N] of passes over prompts, too, in which `copies` is all waiting

    @property
    def share(self) -> float:
        """The limit over the time taken; NaN without a pass."""
        return self.limit_ms / self.total_ms if self.total_ms else np.nan

    def csv(self) -> str:
        """A line for each pass that counts: its time and parts, and the mean limit. Milliseconds."""
        names = ["index", "total_ms", "limit_ms", *[f"{part}_ms" for part in PARTS], "policies_compared", "emulated"]
        lines = [",".join(names)]
        for step, parts in zip(self.step[self.counted], self.by_pass[:, self.counted].T.astype(float), strict=True):
            times = [f"{ms:.6g}" for ms in (parts.sum(), self.limit_ms, *parts)]
            lines.append(",".join([str(step), *times, str(self.known), str(self.emulated)]))
        return "\n".join([*lines, ""])

    def facts(self) -> dict[str, Any]:
        """As JSON; None without a pass."""
        times = {"total_ms": self.total_ms, "limit_ms": self.limit_ms, "share": self.share}
        return {
            "tokens": self.tokens,
            **{name: value if self.tokens else None for name, value in times.items()},
            "parts_ms": dict(self.parts) if self.tokens else None,
            "policies_compared": self.known,
            "emulated_link": self.emulated,
        }


def claims(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """[N] each: what was measured in passes, in the order in which time is given to it. `columns`: COLUMNS."""
    kernels, compute = columns["kernel_ms"], columns["compute_ms"].copy()
    for name in ("predict_ms", "join_ms", "record_ms"):
        compute -= columns[name]
    return {
        "computing": np.where(kernels > 0, kernels, compute),
        "caused": columns["caused_ms"],
        "waiting": columns["stall_ms"] - columns["caused_ms"],
        "predict": columns["predict_ms"],
        "host": columns["join_ms"],
        "sampling": columns["sample_ms"],
        "delivery": columns["between_ms"],
    }


def measured(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """[N] each: the parts of passes, with `waiting` in place of `copies`, `regret` and `link`; their sum is what the
    passes took."""
    found, left = dict[str, Floats](), columns["total_ms"] + columns["between_ms"]
    for name, claim in claims(columns).items():
        found[name] = np.minimum(claim.clip(0), left)
        left = left - found[name]
    found["prefetch"] = found.pop("caused") + found.pop("predict")
    return {**found, "dispatch": left}


def speed_limit(columns: Mapping[str, Floats], fewest: Fewest | None, expert_bytes: int, points: int) -> SpeedLimit:
    """`columns`: COLUMNS of passes in order, the last `points` of which are shown. The means are over the tokens of
    `fewest`, or over the last WINDOW; for batches of tokens `fewest` is not known."""
    decode, window = columns["decode"] == 1, _window(columns, fewest)
    if fewest is not None and (columns["tokens"][window] != 1).any():
        fewest = None
    parts = measured(columns)
    waiting = _waiting(
        {name: float(part[window].sum()) for name, part in parts.items()},
        {name: float(columns[name][window].sum()) for name in MOVED},
        fewest,
        expert_bytes,
    )
    rows = np.zeros((len(PARTS), decode.size))
    waits, (copies, regret, link, hidden) = parts.pop("waiting"), waiting
    for name, share in (("copies", copies), ("regret", regret), ("link", link)):
        rows[PARTS.index(name)] = np.where(decode, waits * share, waits if name == "copies" else 0.0)
    for name, part in parts.items():
        under = np.where(decode, part * hidden, 0.0) if name != "computing" else 0.0
        rows[PARTS.index(name)] = part - under
        rows[PARTS.index("copies")] += under
    tokens = int(window.sum())
    means = rows[:, window].mean(1) if tokens else np.full(len(PARTS), np.nan)
    return SpeedLimit(
        tokens=tokens,
        total_ms=float(means.sum()),
        limit_ms=float(means[0] + means[1]),
        parts=dict(zip(PARTS, means.tolist(), strict=True)),
        known=fewest is not None,
        emulated=bool(columns["emulated"][window].any()),
        step=columns["index"][-points:].astype(np.int32),
        counted=window[-points:],
        by_pass=rows[:, -points:].astype(np.float32),
    )


def _window(columns: Mapping[str, Floats], fewest: Fewest | None) -> Mask:
    """[N] the passes that the means are over."""
    counts, window = columns["decode"] == 1, np.zeros(columns["decode"].size, np.bool_)
    if fewest is not None:
        counts &= columns["index"] <= fewest.until
    window[np.flatnonzero(counts)[-(WINDOW if fewest is None else fewest.tokens) :]] = True
    return window


class _Shares(NamedTuple):
    """Of waiting: what is `copies`, `regret` and `link`; and of all other parts but computing, what is `copies`."""

    copies: float
    regret: float
    link: float
    hidden: float


def _waiting(
    parts: Mapping[str, float], moved: Mapping[str, float], fewest: Fewest | None, expert_bytes: int
) -> _Shares:
    """`parts` (as in `measured`) and `moved` (MOVED) are sums over the window."""
    fetched = moved["demand_bytes"] + moved["admitted_bytes"] + moved["prefetch_bytes"]
    used = fetched - moved["wasted_bytes"]
    if fewest is None or used <= 0:
        return _Shares(0.0, 0.0, 1.0, 0.0)
    byte_ms, waits_ms = moved["copy_ms"] / fetched, parts["waiting"]
    missed = fewest.rate * moved["requests"] - moved["unfetched"] - moved["host_computed"]
    least = min(max(0.0, missed) * expert_bytes, used)
    beyond_ms = max(0.0, least * byte_ms - parts["computing"])
    copies_ms = min(beyond_ms, waits_ms)
    regret_ms = min(moved["demand_bytes"] * byte_ms * (1.0 - least / used), waits_ms - copies_ms)
    others_ms = sum(parts.values()) - parts["computing"] - waits_ms
    hidden = min(1.0, (beyond_ms - copies_ms) / others_ms) if others_ms > 0 else 0.0
    if waits_ms <= 0:
        return _Shares(0.0, 0.0, 1.0, hidden)
    copies, regret = copies_ms / waits_ms, regret_ms / waits_ms
    return _Shares(copies, regret, max(0.0, 1.0 - copies - regret), hidden)
