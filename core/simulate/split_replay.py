"""A trace through a cache of split experts in virtual time: what MoEpic's steps take, layer by layer (section 3.2).

When a layer's routing is known, prefetching stops, and the segments that are missing are copied one after the other.
What is resident, whole experts and tops, is computed meanwhile, and each of the others when its copy lands. Then, until
the next layer's routing is known, the experts predicted for it are copied into the buffer, in the order of their
ranking. A copy that has started is finished. The cache is the engine's own core over ids (`core.cache.core`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.cache.core import CacheCore
from core.cache.lease import in_waves
from core.cache.pool import numbered_pools
from core.policy.allocation.cache_plan import LayerBlocks
from core.policy.allocation.expert_split import LayerTimes
from core.policy.eviction import MakePolicy
from core.profile.trace import Trace
from core.profile.trace.ranking import NONE, rankings


@dataclass(frozen=True, slots=True)
class SplitResult:
    """Means over `tokens` decoded tokens. `ready`: by layer, requested experts that are there when routing is known,
    parts of them counted as parts; `exposed_ms`: by layer, waiting that no computing hides."""

    tokens: int
    tpot_ms: float
    ready: tuple[float, ...]
    exposed_ms: tuple[float, ...]
    copied: float  # whole experts' worth of copies


class SplitReplay:
    """One cache over one trace, empty at first. `layers`: what each layer keeps, in blocks; `buffer`: experts beside
    it, at least top_k where any is split."""

    def __init__(
        self,
        trace: Trace,
        layers: Sequence[LayerBlocks],
        blocks: int,
        buffer: int,
        times: LayerTimes,
        make: MakePolicy,
    ) -> None:
        self.trace, self.times, self.blocks = trace, times, blocks
        pools = numbered_pools(trace.layers * trace.experts, [one.capacity for one in layers])
        self.core: CacheCore[int] = CacheCore(trace.layers, trace.experts, make, pools, blocks=blocks)
        self.core.transit = list(range(buffer * blocks))
        self.core.split([one.top for one in layers])
        self._now_ms = self._link_free_ms = 0.0
        self._computed_ms = 0.0  # when the layer before is computed
        self._held: list[int] = []  # its experts, leased until then
        self._landing_ms: dict[int, float] = {}  # of experts in the buffer
        self._copied = 0  # blocks

    def run(self, warm: int = 0) -> SplitResult:
        """Replay the whole trace; the first `warm` decoded tokens are not counted."""
        layers, token, began_ms = self.trace.layers, 0, 0.0
        ready, exposed = np.zeros(layers), np.zeros(layers)
        for chunk, ranked in rankings(self.trace):
            begin = 0
            for number, size in enumerate(chunk.sizes.tolist()):
                ids, begin = chunk.ids[begin : begin + size], begin + size
                self.core.now += size
                if size > 1 or not chunk.decode[number]:
                    self._read(ids)
                    continue
                if token == warm:
                    began_ms, self._copied = self._computed_ms, 0
                for layer in range(layers):
                    known = None if ranked is None else ranked[number, layer]
                    there, waited_ms = self._layer(layer, ids[0, layer].tolist(), known)
                    if token >= warm:
                        ready[layer] += there
                        exposed[layer] += waited_ms
                token += 1
        counted = max(1, token - warm)
        return SplitResult(
            max(0, token - warm),
            (self._computed_ms - began_ms) / counted,
            tuple((ready / counted).tolist()),
            tuple((exposed / counted).tolist()),
            self._copied / self.blocks / counted,
        )

    def _layer(self, layer: int, wanted: Sequence[int], ranked: npt.NDArray[np.int16] | None) -> tuple[float, float]:
        """Prefetch for a layer, then compute it -> experts that were ready, and milliseconds of waiting."""
        core, times, k = self.core, self.times, self.trace.top_k
        known_ms = self._computed_ms + times.att_ms + (times.head_ms if layer == 0 else 0.0)
        if ranked is not None:
            self._prefetch(layer, ranked, known_ms)
        self._release()
        self._now_ms = known_ms
        base = layer * core.experts
        eids = [base + expert for expert in dict.fromkeys(wanted)]
        late = {eid: at_ms for eid in eids if (at_ms := self._landing_ms.get(eid, 0.0)) > known_ms}
        core.arrive(layer, eids)
        self._landing_ms = {eid: at_ms for eid, at_ms in self._landing_ms.items() if eid in core.held.buffered}
        self._link_free_ms = max(self._link_free_ms, known_ms)
        landings = [(at_ms, 1 - core.held.buffered[eid] / self.blocks) for eid, at_ms in late.items()]
        for eid in core.lease(layer, eids):
            part = len(core.held.lacking(eid).blocks) / self.blocks
            slots = core.admit_requested(eid)
            assert slots is not None, "the buffer is too small for a token's experts"
            self._link_free_ms += part * times.load_ms
            self._copied += len(slots)
            landings.append((self._link_free_ms, part))
        for eid in eids:
            self._landing_ms.pop(eid, None)
        one_ms, ready = times.moe_ms / k, len(eids) - sum(part for _, part in landings)
        done_ms = known_ms + ready * one_ms
        for at_ms, part in landings:
            done_ms = max(done_ms, at_ms) + part * one_ms
        self._computed_ms, self._held = done_ms, eids
        return ready, done_ms - known_ms - len(eids) * one_ms

    def _prefetch(self, layer: int, ranked: npt.NDArray[np.int16], known_ms: float) -> None:
        """Copy the experts predicted for a layer until its routing is known, or the buffer is full."""
        core, base = self.core, layer * self.core.experts
        at_ms = max(self._link_free_ms, self._now_ms)
        for expert in ranked.tolist():
            eid = base + expert
            if expert == NONE or at_ms >= known_ms:
                break
            lacks = len(core.held.lacking(eid).blocks)
            if not lacks or eid in core.leased:
                continue
            if len(core.transit) < lacks and self._held:
                at_ms = max(at_ms, self._computed_ms)  # the slots of the layer before are free then
                self._release()
            if at_ms >= known_ms or core.buffer(eid) is None:
                break
            at_ms += lacks / self.blocks * self.times.load_ms
            self._landing_ms[eid] = at_ms
            self._copied += lacks
        self._link_free_ms = max(self._link_free_ms, at_ms)

    def _release(self) -> None:
        if self._held:
            self.core.release(self._held)
        self._held = []

    def _read(self, ids: npt.NDArray[np.integer]) -> None:
        """A prompt, which takes no time here: the cache sees it."""
        self._release()
        core = self.core
        core.empty_buffer()
        self._landing_ms.clear()
        for layer in range(self.trace.layers):
            core.chosen(layer, ids[:, layer])
            wanted = np.unique(ids[:, layer]).tolist()

            def acquire(group: Sequence[int], layer: int = layer) -> Sequence[int]:
                eids = [layer * core.experts + expert for expert in group]
                for eid in core.lease(layer, eids):
                    assert core.admit_requested(eid) is not None
                return eids

            for _ in in_waves(core, layer, wanted, acquire, core.release):
                pass
