"""Computes missing experts of a token where they lie in host memory, beside the device that computes the resident ones.

In the fast arithmetic on a CPU, and for a model on a GPU, the kernels of the fast arithmetic compute them, by threads
of their own; with no such threads, and in the reference arithmetic on a CPU, the computing thread does, with the blob
as another slot. What `core.policy.placement` decides is carried out here.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from core.cache.expert_cache import ExpertCache
from core.cache.lease import Lease, LeasedSegment
from core.errors import HostError, ModelError
from core.memory.codec.fast.background import Background, most_threads
from core.memory.codec.native.threads import lend
from core.memory.slot import Slot
from core.memory.store import ExpertStore
from core.memory.transfer import TransferEngine
from core.policy.placement import Costs, Layer
from core.policy.throttle import Throttle
from core.runtime.expert_math import ExpertMath
from core.runtime.host_steps import HostSteps, host_kernels
from core.runtime.placement import PlacementCosts
from core.runtime.placement_trials import LayerTrial, trial_costs
from core.runtime.program.experts import ExpertKernels, FastMath
from core.runtime.program.few import FewRows
from core.runtime.program.gpu.rows import GpuMath, GpuRows
from core.runtime.program.many import FastRows
from core.runtime.rows import ExpertRows
from core.settings.misses import MissSettings
from core.types import StepRecord

log = logging.getLogger("moestro.host")
Rows = ExpertRows | FastRows | FewRows | GpuRows
CLOSE = 0.05  # of the largest logit: what other sums of some experts may do to logits, and states rounded to 8 bits
_broken: list[object] = []  # what threads that failed may still write to


class HostCompute:
    """For the tokens of one model. `configure` between two passes; all else on the computing thread."""

    def __init__(
        self,
        math: Sequence[ExpertMath],
        modules: Sequence[Any],
        expert_cache: ExpertCache,
        store: ExpertStore,
        transfers: TransferEngine,
    ) -> None:
        """`math` of each layer, `modules` the model's experts modules."""
        self._math, self._modules, self._expert_cache = math, modules, expert_cache
        self._store, self._transfers = store, transfers
        self._device = math[0].codec.device
        self.settings = MissSettings()
        self.kernels: Sequence[ExpertKernels] = ()  # of each layer; of a GPU's model once `objection` has found them
        self.team: Background | None = None  # its threads; None where it has none
        self._steps: dict[tuple[ExpertKernels, int], HostSteps] = {}
        self._posted: HostSteps | None = None
        self._borrowed: dict[int, torch.Tensor] = {}
        self._slots: dict[int, Slot] = {}  # by the address of a blob
        self._began_s, self._hand_s, self._here = 0.0, 0.0, 0
        self._deciding: PlacementCosts | None = None  # costs by which the pass decides, and which follow it
        self._weighs = False  # what that saves counts
        self.say: Callable[[str], None] = lambda text: None
        self.failed = ""  # why it is not used any more
        self.computing = 1  # threads of this processor that compute for the device
        self.costs: PlacementCosts | None = None  # what decides with `measured`; None until that was chosen
        self.throttle = Throttle("computing on the host", foretells=True)  # with `measured`: whether it is used at all

    @property
    def active(self) -> bool:
        """Whether missing experts may be computed by the host."""
        return self.settings.placement != "wait" and not self.failed

    @property
    def used(self) -> bool:
        """Whether the next pass may leave missing experts to the host."""
        return self.active and not self.throttle.paused

    def begun(self) -> bool:
        """A pass begins: as `used`."""
        costs, self._weighs = self.costs, self.throttle.comparing
        self._deciding = None if costs is None or (costs.alike and not self._weighs) else costs  # without: none waits
        return self.used

    @property
    def threads(self) -> int:
        """Threads of its own."""
        return self.team.threads if self.team is not None else 0

    def objection(self) -> str:
        """Why this load cannot compute on the host; "" where it can. Finds the kernels for that."""
        codecs = [one.codec for one in self._math]
        if codecs[0].blocks > 1:
            return "experts are cached in parts; load the model with whole experts (--blocks 1)"
        if not self._store.lends:
            return "host memory holds no experts, which are read from disk into slots; load them there (--host)"
        if self._device.type == "cpu" and not all(one.verbatim for one in codecs):
            return f"experts have other bytes in host memory than in slots, as {codecs[0].dtype} is computed in"
        try:
            if self._device.type == "cpu" or not self.kernels:
                self.kernels = host_kernels(self._math, self._modules)
        except ModelError as error:
            return f"there are no kernels for its experts in host memory ({error})"
        return ""

    @property
    def closeness(self) -> float:
        """How far logits of passes in which it computed may be from those of the device alone, as a share of the
        largest; 0 = the same bits."""
        return CLOSE if self._device.type == "cuda" and not isinstance(self._math[0], GpuMath) else 0.0

    def configure(self, old: MissSettings | None, new: MissSettings) -> None:
        """Use other settings from the next pass on; the threads live as long as they are of use."""
        if new == old:
            return
        if new.placement == "auto":
            new = replace(new, placement="wait" if self.objection() or self.closeness else "measured")
        self.settings = new
        if new.placement != "wait" and not self.failed and (why := self.objection()):
            self.fail(f"miss_placement {new.placement} is not used: {why}")
        free = max(0, most_threads() + 1 - self.computing)
        wanted = min(new.host_threads, free) if self.active and self.kernels else 0
        if wanted != self.threads:
            self.close()
            self.team = Background(wanted) if wanted else None
        self.throttle.enabled = decides = self.active and new.placement == "measured"
        self.costs = PlacementCosts(self._measured()) if decides else None
        if self.costs is not None and not self.costs.costs.threads:
            self.close()
        self.throttle.free = self.costs is not None and self.costs.alike

    def _measured(self) -> Costs:
        trial = LayerTrial(self, self._math, self._expert_cache, self._store)
        try:
            return trial_costs(trial, self._transfers.copy_s(self._store.blob_bytes), self.threads)
        finally:
            self.abandon()

    def close(self) -> None:
        """End the threads."""
        if self.team is not None:
            self.team.close()
        self.team, self._steps, self._slots = None, {}, {}

    def passed(self, step: StepRecord) -> None:
        """A pass is over: one over several rows decides nothing."""
        if step.tokens == 1:
            self.throttle.note(step, costs.saved_ms() if (costs := self._deciding) is not None else 0.0)
            if costs is not None and costs.alone():
                self.close()
                self.throttle.free = True

    @property
    def takes_rows(self) -> bool:
        """Whether the computing thread may compute missing experts of several rows where they lie."""
        return self._device.type == "cpu" and self._store.lends_all and isinstance(self._math[0], FastMath)

    def choose_of_rows(self, residents: int, missing: Sequence[int]) -> Collection[int]:
        """As `choose`, where `takes_rows`: what fits into slots is copied as far as computing surely hides that."""
        if self.costs is None or not missing:
            return self.hold(missing, len(missing))
        cache = self._expert_cache
        held = residents + sum(map(cache.core.is_resident, missing))  # slots of copies that have not landed, too
        room = cache.capacity_for(missing[0] // cache.experts) - held
        hidden = self.costs.hidden(residents + len(missing), self._transfers.copy_s(self._store.blob_bytes))
        return self.hold(reversed(missing), len(missing) - max(0, min(hidden, room)))

    def in_place(self, lease: Lease) -> list[LeasedSegment]:
        """What the computing thread computes of a lease, until `end`."""
        return [*lease.segments, *map(self._in_place, lease.hosted)]

    def choose(self, residents: int, missing: Sequence[int]) -> Collection[int]:
        """Which of a layer's missing experts (eids) the host computes. Those are kept in host memory until `end`."""
        most = len(missing)
        if self._deciding is not None:
            layer = Layer(residents, most, self._transfers.backlog_s())
            copy_s = self._transfers.copy_s(self._store.blob_bytes)
            most = self._deciding.choose(layer, copy_s, weigh=self._weighs)
        return self.hold(reversed(missing), most)

    def hold(self, eids: Iterable[int], most: int) -> Collection[int]:
        """Keep up to `most` of these experts in host memory until `end` -> those that are there."""
        for eid in eids:
            if len(self._borrowed) == most:
                break
            if (blob := self._store.borrow(eid)) is not None:
                self._borrowed[eid] = blob
        return self._borrowed.keys()

    def begin(self, lease: Lease, hidden: torch.Tensor) -> list[LeasedSegment]:
        """Begin to compute what was left to the host, of a row [1, H] -> the segments that the computing thread
        computes. Raises HostError."""
        if self._deciding is None and not self._apart:
            return self.in_place(lease)
        segments, self._began_s = lease.segments if self._apart else self.in_place(lease), time.perf_counter()
        if lease.hosted and self._apart:
            self._begin_steps(lease.hosted, hidden)
        self._here = sum([one.ticket is None for one in segments])
        begun_s, self._began_s = self._began_s, time.perf_counter()
        self._hand_s = self._began_s - begun_s
        return segments

    def computed_residents(self) -> None:
        """The computing thread has computed what is ready; a GPU is told to."""
        if self._here and self._deciding is not None and self._device.type == "cpu":
            self._deciding.computed(time.perf_counter() - self._began_s, self._here, beside=self._posted is not None)

    def end(self, rows: Rows, hosted: Sequence[LeasedSegment]) -> tuple[float, float]:
        """Wait for the outputs of what was `hosted` and give them to `rows` -> the seconds that the host's threads
        took, and those that this thread took part in that or waited; 0 where it computed all by the steps of its own,
        which are counted as such. Raises HostError."""
        took_s = waited_s = 0.0
        if self._posted is not None:
            ended_s = time.perf_counter()
            out = self._end_steps(self._posted)
            waited_s = time.perf_counter() - ended_s
            assert not isinstance(rows, FastRows), "several rows are computed on the device"
            rows.join([one.expert for one in hosted], out)
            if self.team is not None:
                took_s = self.team.took_s
                if (costs := self._deciding) is not None and took_s and not self.team.assisted:
                    costs.hosted(took_s, len(hosted))
                    costs.handed(self._hand_s + self.team.late_s + time.perf_counter() - ended_s)
        self._give_back()
        return took_s, waited_s if took_s or self._device.type == "cuda" else 0.0

    def abandon(self) -> None:
        """After a pass that broke off."""
        if self._posted is not None:
            self._posted = None
            lend(0)
            try:
                if self.team is not None:
                    self.team.cancel()
            except HostError as error:
                self.lose(str(error))
        self._give_back()

    @property
    def _apart(self) -> bool:
        """Whether kernels compute for the host by themselves, not as the computing thread's product."""
        return bool(self.kernels) and (self.team is not None or self._device.type == "cuda")

    def _begin_steps(self, hosted: Sequence[LeasedSegment], hidden: torch.Tensor) -> None:
        kernels = self.kernels[hosted[0].segment.eid // self._expert_cache.experts]
        steps = self._steps.get((kernels, len(hosted)))
        if steps is None:
            with torch.inference_mode(False):
                steps = HostSteps(kernels, len(hosted), pin=self._device.type == "cuda")
            self._steps[kernels, len(hosted)] = steps
        if self._device.type == "cpu":
            lend(self.threads)
        self._posted = steps
        try:
            steps.begin(self.team, hidden, [self._borrowed[one.segment.eid] for one in hosted])
        except HostError as error:
            self.lose(str(error))
            raise

    def _end_steps(self, steps: HostSteps) -> torch.Tensor:
        lend(0)
        try:
            out = steps.end(self.team)
        except HostError as error:
            self.lose(str(error))
            raise
        self._posted = None
        return out

    def _in_place(self, one: LeasedSegment) -> LeasedSegment:
        """A segment whose slot is the blob in host memory."""
        blob = self._borrowed[one.segment.eid]
        slot = self._slots.get(blob.data_ptr())
        if slot is None:
            slot = self._slots[blob.data_ptr()] = Slot(-1, blob, blob.data_ptr())
        return LeasedSegment(one.expert, one.segment, (slot,), one.outcome, one.ticket)

    def _give_back(self) -> None:
        for eid in self._borrowed:
            self._store.give_back(eid)
        self._borrowed.clear()

    def lose(self, why: str, *more: object) -> None:
        """Threads failed: what they may still write to is kept, and nothing more is left to them."""
        _broken.append((self.team, [*self._steps.values()], [*self._borrowed.values()], more))
        self.team, self._posted, self._steps = None, None, {}
        lend(0)
        self.fail(why)

    def fail(self, why: str) -> None:
        """Leave nothing to the host any more."""
        self.failed = why
        log.warning("%s", why)
        self.say(why)
