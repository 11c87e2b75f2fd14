"""The regret meter: the hits of every eviction policy on the tokens just computed, beside the best possible.

Shadows are simulated caches, one per policy, fed with the routing as it happens. They do not prefetch. Over the last N
decoded tokens four figures are comparable, since all are of the same tokens: the engine's own, each policy's, the
chosen policy's without prefetching, and the bound.

The bound is Belady's MIN on the same tokens and slots, made so generous that no policy can exceed it, whatever its
cache held before the first token: at the start and at every prompt in between it may admit any expert for free (at a
prompt, those that the prompt used). It is the most hits that any cache without prefetching can have on these tokens;
among caches with bypass if the engine's has it, and else among those without."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from core.policy.eviction import GONE, NEVER, Belady
from core.policy.hints import Hints
from core.profile.trace import ArrayTrace, Chunk
from core.settings.param import Value
from core.simulate.cache import Cache, Ints
from core.simulate.replay import Replay
from core.simulate.run import Config, maker


@dataclass(frozen=True, slots=True)
class Setup:
    """What the shadows imitate. `policies`: names of eviction policies, each with its parameters.

    `shares` = slots of each layer when layers have their own, unevenly; `pinned` eids are never evicted; `usual`
    [layers * experts] = how often a profile saw each expert; () = no profile. Of the slots, `transit` are in no pool.
    """

    layers: int
    experts: int
    top_k: int
    slots: int
    scope: str = "layer"
    policies: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    shares: Sequence[int] = ()
    pinned: Sequence[int] = ()
    usual: Sequence[float] = ()
    transit: int = 0

    @property
    def sizes(self) -> list[int | Sequence[int]]:
        """The slots in the form that `Cache` takes."""
        return [self.shares if self.shares and self.scope == "layer" else self.slots - self.transit]


@dataclass(frozen=True, slots=True)
class RegretReport:
    """Hit rates of the same last `tokens` decoded tokens."""

    tokens: int
    own: float  # the engine's own count
    belady: float  # the bound: none of the rates exceeds it
    rates: dict[str, float]  # each policy's shadow
    bypass: bool  # the bound is that of caches with bypass, else of those with forced admission
    blocks: dict[str, list[float]] = field(default_factory=dict)  # each shadow's rate on every BLOCK tokens, in order


BLOCK = 8  # tokens whose hits are counted together: neighbours hit alike, blocks are nearly independent


@dataclass(frozen=True, slots=True)
class Passed:
    """One pass of the window. A decoded token keeps its ids; any other pass only which experts it used."""

    ids: npt.NDArray[Any] | None  # [layers, k], all distinct within a layer; None = not counted
    used: npt.NDArray[np.bool_] | None  # [layers, experts]
    hits: Ints  # [2 + policies] of the engine: hits, requests; then each shadow's hits


class Shadows:
    """One simulated cache per policy. `window` = decoded tokens compared. Raises SettingError when a setup has too few
    slots for a token."""

    def __init__(self, setup: Setup, window: int) -> None:
        self.setup, self.window = setup, window
        self._replays = [_replay(setup, name, params) for name, params in setup.policies.items()]
        self._passes: deque[Passed] = deque()
        self.tokens = 0  # decoded tokens in the window

    def warm(self, chunk: Chunk) -> None:
        """Earlier passes: the caches learn from them, nothing is counted."""
        for replay in self._replays:
            replay.feed(chunk)

    def feed(self, chunk: Chunk, hits: npt.ArrayLike, requests: npt.ArrayLike) -> None:
        """The next passes. `hits`, `requests` [passes] = the engine's own counts."""
        counted = [np.asarray(hits, np.int64), np.asarray(requests, np.int64)]
        for replay in self._replays:
            asked, missed = replay.feed(chunk)
            counted.append((asked - missed).sum(1))
        at = 0
        for size, decode, row in zip(chunk.sizes.tolist(), chunk.decode.tolist(), np.stack(counted, 1), strict=True):
            ids = chunk.ids[at : at + size]
            plain = decode and size == 1 and _distinct(ids[0])
            self._passes.append(Passed(ids[0].copy(), None, row) if plain else Passed(None, self._used(ids), row))
            self.tokens += plain
            at += size
        while self.tokens > self.window or (self._passes and self._passes[0].ids is None):
            self.tokens -= self._passes.popleft().ids is not None

    def forget(self) -> None:
        """Restarts counting; the caches keep their contents."""
        self._passes.clear()
        self.tokens = 0

    def report(self) -> RegretReport | None:
        """The figures of the window, or None while it is empty."""
        if not self.tokens:
            return None
        own, requests, *found = np.sum([p.hits for p in self._passes if p.ids is not None], 0).tolist()
        asked = self.tokens * self.setup.layers * self.setup.top_k
        return RegretReport(
            self.tokens,
            own / requests if requests else 0.0,
            most_hits(self.setup, self._passes) / asked,
            {name: hits / asked for name, hits in zip(self.setup.policies, found, strict=True)},
            self.setup.transit > 0,
            self._blocks(),
        )

    def _blocks(self) -> dict[str, list[float]]:
        """The hit rate of each shadow on every BLOCK counted tokens; the last few, which fill none, are left out."""
        counted = np.array([p.hits[2:] for p in self._passes if p.ids is not None])
        number, asked = self.tokens // BLOCK, BLOCK * self.setup.layers * self.setup.top_k
        rates = counted[: number * BLOCK].reshape(number, BLOCK, counted.shape[1]).sum(1) / asked
        return {name: rates[:, at].tolist() for at, name in enumerate(self.setup.policies)}

    def _used(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        used = np.zeros((self.setup.layers, self.setup.experts), np.bool_)
        used[np.arange(self.setup.layers)[:, None], ids.transpose(1, 0, 2).reshape(self.setup.layers, -1)] = True
        return used


def most_hits(setup: Setup, passes: Sequence[Passed] | deque[Passed]) -> int:
    """Hits on the decoded tokens of `passes` that no cache without prefetching can exceed, whatever it held before.

    Keeping an expert from one use to its next decode use saves one miss; the room during a pass is fixed. Most is saved
    by evicting, whenever there are too many, the expert whose next decode use is last (the largest k-colourable
    subgraph of an interval graph; Carlisle and Lloyd 1995, which is Belady's rule). Experts that an uncounted pass
    brings, and the first contents, cost nothing, so only experts whose next use is in a decode pass are worth a slot.
    """
    layers, future = setup.layers, _future(setup, passes)
    first = future.pop()
    cache = _belady(setup)
    policy = cache.policy
    assert isinstance(policy, Belady)
    _restock(cache, np.ones(cache.expert_index.size, np.bool_), first)
    misses, base = 0, np.arange(layers)[:, None] * setup.experts
    for now, (one, coming) in enumerate(zip(passes, reversed(future), strict=True), 1):
        if one.ids is None:
            assert one.used is not None
            _restock(cache, one.used.ravel(), coming)
            continue
        eids = one.ids + base
        policy.foresee(eids, coming)
        if setup.scope == "layer":
            misses += int(cache.together(eids, now, cache.expert_index.layer_of).sum())
        else:
            misses += sum(int(cache.together(eids[layer : layer + 1], now, layer).sum()) for layer in range(layers))
    return sum(one.ids is not None for one in passes) * layers * setup.top_k - misses


def _future(setup: Setup, passes: Sequence[Passed] | deque[Passed]) -> list[Any]:
    """For each pass, last to first, when its experts are next used in a decode pass: of a decoded token [layers, k], of
    another pass [size]; finally [size] of all experts before the first pass. NEVER = next used in a non-decode pass,
    where it is free, or not again. Times count layers, so that among experts of one pass a later layer has a later
    time."""
    layers, size = setup.layers, setup.layers * setup.experts
    following = np.full(size, NEVER, np.int64)
    base, steps = np.arange(layers)[:, None] * setup.experts, np.arange(layers)[:, None]
    future: list[Any] = []
    for back, one in enumerate(reversed(passes)):
        if one.ids is None:
            assert one.used is not None
            future.append(following.copy())
            following[one.used.ravel()] = NEVER
        else:
            eids = one.ids + base
            future.append(following[eids])
            following[eids] = (len(passes) - back) * layers + steps
    return [*future, following]


def _restock(cache: Cache, offered: npt.NDArray[np.bool_], coming: Ints) -> None:
    """Of its contents and the free `offered` [size] experts, each lane keeps those whose next use is soonest."""
    policy, lanes = cache.policy, cache.lanes
    assert isinstance(policy, Belady)
    eids = offered.nonzero()[0]
    policy.foresee(eids, coming[eids])
    policy.admitted(eids, eids, 0)
    held = (policy.score != GONE).reshape(lanes, -1)
    worth = np.where(held, policy.score.reshape(lanes, -1), -np.inf)
    rank = np.empty(worth.shape, np.int64)
    np.put_along_axis(rank, np.argsort(-worth, 1, kind="stable"), np.arange(worth.shape[1])[None], 1)
    policy.left((held & (rank >= cache.capacity[:, None])).ravel().nonzero()[0])
    cache.free = cache.capacity - np.minimum(held.sum(1), cache.capacity)


def _belady(setup: Setup) -> Cache:
    """A Belady cache without pins: a cache that pins experts may do no better."""
    return Cache(Belady, setup.layers, setup.experts, setup.top_k, setup.scope, setup.sizes, transit=setup.transit)


def _replay(setup: Setup, name: str, params: Mapping[str, Value]) -> Replay:
    """A shadow, filled as the engine's cache is after a load."""
    hints = Hints(setup.layers, setup.experts)
    if setup.usual or setup.pinned:
        hints.profile(setup.usual or np.zeros(setup.layers * setup.experts), setup.pinned)
    empty = ArrayTrace(np.zeros((0, setup.layers, setup.top_k), np.uint8), setup.experts)
    make = maker(Config(name, setup.slots, setup.scope, params))
    return Replay(empty, make, setup.sizes, setup.scope, "filled", hints, setup.transit)


def _distinct(ids: npt.NDArray[Any]) -> bool:
    ordered = np.sort(ids, 1)
    return bool((ordered[:, 1:] != ordered[:, :-1]).all())
