"""LCP's hits at every cache size in one reading of the routing (Mattson's stack algorithm), by native code.

A cache of C experts always holds what one of C - 1 does, because the priority of an expert does not depend on the
cache: so one ordering of a layer's experts, its stack, holds all caches, and an expert at place p is a hit of those
with more than p slots. A requested expert goes to the top; on its way down to the place that it left, the expert that
each cache evicts is the one of lowest priority so far (core/policy/eviction/lcp.py). Requested experts have the highest
priority until their token is done.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from core.profile.trace.ranking import NONE
from core.system.native.compile import Function, compiled, supported
from core.system.native.ir import Code

PIECE = 1000  # tokens read between two questions whether to go on
HIGHEST = str(2**63 - 1)  # key of what is requested
LOG2 = 1 << 20  # uses above which a priority does not grow
Ids = npt.NDArray[np.integer[Any]]


def available() -> bool:
    """Whether native code can be compiled here."""
    return supported()


class Places(NamedTuple):
    """Experts of each layer by their places in its stack: those below C are in a cache of C experts, k at least, which
    had experts 0 to C - 1 at first."""

    requested: npt.NDArray[np.int64]  # [L, E] requests by the place of the expert, the first place first
    ranked: npt.NDArray[np.int64]  # [L, Y, E] the y-th of a token's ranking, by its place before the token


def places(
    ids: Ids,
    experts: int,
    *,
    rho: float,
    omega: int,
    ranked: Ids | None = None,
    wanted: Callable[[], bool] = lambda: True,
) -> Places | None:
    """The places of what the tokens `ids` [T, L, k] request. `ranked` [R, L, Y]: the rankings of the last R of them,
    NONE after a ranking's last expert.

    `rho`, `omega`: the policy's; each token is one of time. Asks every PIECE tokens whether this is still `wanted`, and
    with every token that has a ranking; None when it is not. Raises ValueError for ids that no layer has.
    """
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < experts:
        raise ValueError(f"experts {ids.min()} to {ids.max()} of {experts}")
    tokens, layers, k = ids.shape
    shape, run = (layers, experts), _functions()["lcp_places"]
    ranked = np.zeros((0, layers, 0), np.int16) if ranked is None else ranked
    counts, plain = _RankedPlaces(layers, experts, ranked.shape[2]), tokens - len(ranked)
    order = np.tile(np.arange(experts, dtype=np.int64), (layers, 1))
    place, uses, found = order.copy(), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    key = np.zeros(shape, np.int64)  # bits of priorities, which are positive: they compare as the numbers do
    log2, fade = _logarithms(), math.log2(1.0 / rho) / omega
    for first in (*range(0, plain, PIECE), *range(plain, tokens)):
        if not wanted():
            return None
        if first >= plain:
            counts.add(ranked[first - plain], place)
        last = min(first + PIECE, plain) if first < plain else first + 1
        some = np.ascontiguousarray(ids[first:last], np.int16)
        faded = np.arange(first + 1, first + 1 + len(some), dtype=np.float64) * fade
        arrays = some, faded, log2, order, key, place, uses, found
        run(*(one.ctypes.data for one in arrays), len(some), layers, experts, k)
    return Places(found, counts.found)


class _RankedPlaces:
    """Counts the places of ranked experts, token by token."""

    def __init__(self, layers: int, experts: int, ranks: int) -> None:
        self.found = np.zeros((layers, ranks, experts), np.int64)
        self._row = np.arange(layers * ranks).reshape(layers, ranks) * experts  # of `found`, as a flat array
        self._base = np.arange(layers)[:, None] * experts

    def add(self, ranked: Ids, place: npt.NDArray[np.int64]) -> None:
        """A token's rankings [L, Y], each expert at its `place` [L, E]."""
        at = self._row + place.ravel()[self._base + np.maximum(ranked, 0)]
        self.found.ravel()[at[ranked != NONE]] += 1  # all of them distinct


@functools.cache
def _logarithms() -> npt.NDArray[np.float64]:
    return np.log2(np.maximum(np.arange(LOG2, dtype=np.float64), 1))


@functools.cache
def _functions() -> dict[str, Function]:
    return compiled(_places())


def _places() -> Code:
    """Generates @lcp_places: T tokens of L layers; the stacks, their keys (priorities), places and uses stay for the
    next call."""
    arrays = "ids faded log2 order key place uses found".split()
    named = [f"ptr noalias %{name}" for name in arrays] + [f"i64 %{name}" for name in ("tokens", "layers", "n", "k")]
    code = Code(f"void @lcp_places({', '.join(named)})")
    with code.loop(0, "%tokens") as token:
        faded = code.load("double", code.at("%faded", token.index, 8), 8)
        of_token = code.times(token.index, "%layers")
        with code.loop(0, "%layers") as layer:
            wanted = code.at("%ids", code.times(code.add(of_token, layer.index), "%k"), 2)
            base = code.times(layer.index, "%n")
            order, key, place, uses, found = (
                code.at(f"%{name}", base, 8) for name in ("order", "key", "place", "uses", "found")
            )

            def expert(index: str, wanted: str = wanted) -> str:
                return code.let(f"sext i16 {code.load('i16', code.at(wanted, index, 2), 2)} to i64")

            with code.loop(0, "%k") as each:  # where they are, before any moves; then none of them can leave
                at = code.load("i64", code.at(place, expert(each.index), 8), 8)
                count = code.at(found, at, 8)
                code.store("i64", code.add(code.load("i64", count, 8), 1), count, 8)
                code.store("i64", HIGHEST, code.at(key, at, 8), 8)
            with code.loop(0, "%k") as each:
                _raise(code, expert(each.index), order, key, place)
            with code.loop(0, "%k") as each:
                one = expert(each.index)
                count = code.at(uses, one, 8)
                used = code.add(code.load("i64", count, 8), 1)
                code.store("i64", used, count, 8)
                most = code.let(f"icmp slt i64 {used}, {LOG2 - 1}")
                known = code.let(f"select i1 {most}, i64 {used}, i64 {LOG2 - 1}")
                log2 = code.load("double", code.at("%log2", known, 8), 8)
                priority = code.let(f"bitcast double {code.let(f'fadd double {log2}, {faded}')} to i64")
                at = code.load("i64", code.at(place, one, 8), 8)
                code.store("i64", priority, code.at(key, at, 8), 8)
    return code


def _raise(code: Code, one: str, order: str, key: str, place: str) -> None:
    """An expert goes to the top; down to where it was, each place keeps the higher of what was there and what came from
    above: by key, or of equals, by id."""
    depth = code.load("i64", code.at(place, one, 8), 8)
    top_key, top = code.load("i64", code.at(key, depth, 8), 8), one
    last = code.add(depth, 1)
    first_key, first = code.load("i64", key, 8), code.load("i64", order, 8)
    code.store("i64", top_key, key, 8)
    code.store("i64", top, order, 8)
    code.store("i64", "0", code.at(place, top, 8), 8)
    with code.loop(1, last, carried=[("i64", first_key), ("i64", first)]) as down:
        carried_key, carried = down.values
        here, here_key = code.at(order, down.index, 8), code.at(key, down.index, 8)
        there, there_key = code.load("i64", here, 8), code.load("i64", here_key, 8)
        above = code.let(f"icmp sgt i64 {carried_key}, {there_key}")
        equal = code.let(f"icmp eq i64 {carried_key}, {there_key}")
        later = code.let(f"icmp sgt i64 {carried}, {there}")
        even = code.let(f"and i1 {equal}, {later}")
        ends = code.let(f"icmp eq i64 {down.index}, {depth}")  # its own old place takes whatever is left
        wins = code.let(f"or i1 {above}, {even}")
        stays = code.let(f"or i1 {wins}, {ends}")
        kept = code.let(f"select i1 {stays}, i64 {carried}, i64 {there}")
        kept_key = code.let(f"select i1 {stays}, i64 {carried_key}, i64 {there_key}")
        code.store("i64", kept, here, 8)
        code.store("i64", kept_key, here_key, 8)
        code.store("i64", down.index, code.at(place, kept, 8), 8)
        down.next = [
            code.let(f"select i1 {stays}, i64 {there_key}, i64 {carried_key}"),
            code.let(f"select i1 {stays}, i64 {there}, i64 {carried}"),
        ]
