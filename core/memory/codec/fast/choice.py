"""Which way of computing a product is the fastest for how many rows: as this machine was timed.

All ways have the same bits. What was timed holds for the process, and is kept in a file, where one is named, for later
ones on the same machine.
"""

import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core import __version__
from core.system import kept_file
from core.system.native.compile import processor

log = logging.getLogger("moestro.kernels")

ROWS = (4, 16, 64)  # that are timed; between them times are taken to grow evenly
REPEATS = 3  # of which the least counts: other programs only ever add to it
HOPELESS = 3.0  # times the least: a way that is further off is not repeated, nor tried for more rows if it falls behind
VERSION = 3  # of the ways: to be raised when one of them is computed in another manner

Way = Callable[[int], object]
"""Computes the product of a number of rows."""
Clock = Callable[[], float]
CLOCK = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-6 else time.perf_counter
"""Seconds: where the system counts them well, those that the thread had the processor, whatever else runs."""


class Timed(NamedTuple):
    """Seconds of each way for the ROWS, or for the first of them where it was given up."""

    seconds: Mapping[str, tuple[float, ...]]

    def estimate(self, way: str, rows: int) -> float:
        """Seconds for any number of rows; infinite beyond those that it was given up at."""
        known = self.seconds[way]
        if rows <= ROWS[0]:
            return known[0]
        for i in range(1, len(known)):
            if rows <= ROWS[i]:
                share = (rows - ROWS[i - 1]) / (ROWS[i] - ROWS[i - 1])
                return known[i - 1] + share * (known[i] - known[i - 1])
        return known[-1] * rows / ROWS[-1] if len(known) == len(ROWS) else float("inf")

    def fastest(self, rows: int) -> str:
        """The fastest way for `rows`; of equal ones the first."""
        return min(self.seconds, key=lambda way: self.estimate(way, rows))


def measure(ways: Mapping[str, Way], clock: Clock = CLOCK) -> Timed:
    """Time the ways, interleaved. No two calls have the same number of rows, as in a prompt few experts have: what a
    library makes for each number is part of its time."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    left = list(ways)
    for way in ways.values():
        for rows in (1, ROWS[1] + 1):
            way(rows)  # compiles what is used for any few, and for any more
    for rows in ROWS:
        best = dict.fromkeys(left, float("inf"))
        for turn in range(REPEATS):
            for name in left:
                if best[name] == float("inf") or best[name] <= HOPELESS * min(best.values()):
                    began_s = clock()
                    ways[name](rows - turn)
                    best[name] = min(best[name], (clock() - began_s) * rows / (rows - turn))
        for name, seconds in best.items():
            found[name].append(seconds)
        first = min(left, key=lambda name: best[name])
        left = [name for name in left if best[name] <= HOPELESS * best[first] or not _falls_behind(found, name, first)]
    return Timed({name: tuple(seconds) for name, seconds in found.items()})


def _falls_behind(found: Mapping[str, list[float]], name: str, first: str) -> bool:
    """Whether a way also takes longer for each further row than the fastest one."""
    one, other = found[name], found[first]
    return len(one) > 1 and one[-1] - one[-2] > other[-1] - other[-2]


_timed: dict[str, Timed] = {}  # by kind
_file: Path | None = None


def timed(kind: str) -> Timed | None:
    """What was timed of a kind of product, if it was."""
    return _timed.get(kind)


def known() -> dict[str, Timed]:
    """What was timed, by kind."""
    return dict(_timed)


def kept_in(file: Path) -> dict[str, Timed]:
    """What a file has for this machine, by kind and threads."""
    return {place: timed for place, kept in _kept(file).items() if (timed := _read(kept, kept)) is not None}


def keep_in(file: Path | None) -> None:
    """Keep times in this file, and take those that are there; None = in this process only."""
    global _file
    _file = file


def choose(kind: str, ways: Mapping[str, Way], threads: int, clock: Clock = CLOCK) -> None:
    """Time the ways of a kind of product, the usual one first, unless that is known for so many `threads`."""
    if kind in _timed:
        return
    place, kept = f"{kind}, {threads} threads", _kept(_file)
    found = _read(kept.get(place), ways)
    if found is None:
        found = measure(ways, clock)
        products = {**kept, place: found.seconds}
        kept_file.replace(_file, {"machine": machine(), "products": products}, log)
    _timed[kind] = found


def machine() -> dict[str, object]:
    """All that times depend on besides a product's kind and threads."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "moestro": __version__,
        "version": VERSION,
        "rows": list(ROWS),
    }


def _kept(file: Path | None) -> dict[str, Any]:
    """What a file has for this machine, by kind and threads; nothing where it cannot be used."""
    content = kept_file.read(file, log)
    products = content.get("products") if content.get("machine") == machine() else None
    return products if isinstance(products, dict) else {}


def _read(kept: object, ways: Iterable[str]) -> Timed | None:
    """Times out of a file; None where they are not those of these ways."""
    if not isinstance(kept, dict) or list(kept) != list(ways):
        return None
    for seconds in kept.values():
        whole = isinstance(seconds, list) and 0 < len(seconds) <= len(ROWS)
        if not whole or not all(type(one) is float and 0.0 < one < float("inf") for one in seconds):
            return None
    found = Timed({name: tuple(seconds) for name, seconds in kept.items()})
    return found if any(len(seconds) == len(ROWS) for seconds in kept.values()) else None
