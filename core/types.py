"""Types of the domain. Experts are integers: `expert` within its layer, `eid = layer * experts + expert` overall.

`layer` always counts Mixture-of-Experts layers (0 = the first one), not the model's transformer blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from core.choices import Action as Action
from core.choices import Lossy, LossyLook
from core.choices import Why as Why

Phase = Literal["prefill", "decode"]
Origin = Literal["host", "disk"]


class Outcome(IntEnum):
    """The outcome of one request (one distinct expert of a layer in a step); METHODS section 9."""

    HIT = 0  # resident and ready when routing was known
    PREFETCH_HIT = 1  # the same, copied by a prefetch and not used before
    LATE = 2  # its copy had started: compute waited for the rest of it
    MISS = 3  # neither, or only queued: fetched on demand from host memory
    MISS_DISK = 4  # the same, but not in host memory either: read from disk
    SUBSTITUTED = 5  # missing and not fetched: other experts were computed instead
    DROPPED = 6  # missing and not fetched: skipped
    PREDICTED = 7  # missing and not fetched: the layer used the predicted routing, which did not contain it


class Residence(IntEnum):
    """The location of an expert, for the residency map."""

    HOST = 0
    IN_FLIGHT = 1
    RESIDENT = 2
    HIT_NOW = 3  # resident and used by the last step
    DISK = 4  # neither on the device nor in host memory


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a loaded MoE."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_bytes: int

    @property
    def total(self) -> int:
        """Routed experts in the whole model."""
        return self.layers * self.experts


@dataclass(frozen=True, slots=True)
class Transfer:
    """One finished copy into a device slot. Times are seconds on the session's clock."""

    layer: int
    expert: int
    bytes: int
    demand: bool
    submitted_s: float
    started_s: float
    ended_s: float
    phase: Phase
    origin: Origin = "host"


@dataclass(slots=True)
class StepRecord:
    """Everything about one forward pass: a prefill chunk or one decoded token. compute + stall + idle = total."""

    index: int  # counts forward passes since the model was loaded
    phase: Phase
    tokens: int  # positions computed in this pass
    started_s: float  # seconds on the session's clock
    total_ms: float
    compute_ms: float  # device busy with the model
    stall_ms: float  # compute waiting for a copy
    idle_ms: float  # neither: sampling, recording
    copy_ms: float  # the link was busy (overlaps compute and stall)
    ids: npt.NDArray[np.int16]  # [L, tokens, k] experts chosen by the router
    layer: npt.NDArray[np.int16]  # [R] requests: the layer of each; one per distinct expert of a layer
    expert: npt.NDArray[np.int16]  # [R]
    outcome: npt.NDArray[np.uint8]  # [R] Outcome of each request
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    wasted_bytes: int = 0
    disk_bytes: int = 0  # read from disk for the copies that finished in this pass, padding included
    slots: int = 0
    device_bytes: int = 0
    budget_bytes: int = 0
    emulated: bool = False
    exact: bool = True
    transfers: tuple[Transfer, ...] = ()
    changes: dict[str, object] = field(default_factory=dict)  # settings that took effect just before this pass
    prefetch_evicted: int = 0  # of the wasted: evicted before their layer was reached
    late_bytes: int = 0
    evicted_bytes: int = 0
    predict_ms: float = 0.0  # the predictor's own time, part of compute_ms
    net_ms: float = 0.0  # time that prefetching saved less its cost: core.cache.prefetch_cost
    probs: npt.NDArray[np.float16] | None = None  # [L, tokens, E] of the router, if captured
    ranked: npt.NDArray[Any] | None = None  # the predictions, if captured: core.trace.chunk.RANKED
    tok: npt.NDArray[np.int32] | None = None  # [tokens] their ids, if captured
    lossy: Lossy | None = None  # what lossy options did; None while all are off

    def spent(self, total_s: float) -> None:
        """Set the total time of the pass; what was neither computing nor stalling becomes idle time."""
        self.total_ms = total_s * 1e3
        self.idle_ms = self.total_ms - self.compute_ms - self.stall_ms

    @property
    def changed(self) -> int:
        """Number of (token, layer, expert) assignments that are not the router's."""
        return self.lossy.changed if self.lossy is not None else 0

    @property
    def assignments(self) -> int:
        """Number of (token, layer, expert) assignments."""
        return int(self.ids.size)

    @property
    def requests(self) -> int:
        return int(self.outcome.size)

    @property
    def hits(self) -> int:
        return int((self.outcome <= Outcome.PREFETCH_HIT).sum())

    @property
    def disk_misses(self) -> int:
        return int((self.outcome == Outcome.MISS_DISK).sum())


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """The statistics line under an answer. Hit rate is decode's; prefill's is shown beside it, never mixed in."""

    prompt_tokens: int
    new_tokens: int
    ttft_ms: float
    tpot_ms: float
    tok_s: float
    hit_rate: float | None
    prefill_hit_rate: float | None
    demand_bytes: int
    prefetch_bytes: int
    wasted_bytes: int
    disk_misses: int
    disk_bytes: int
    compute_ms: float
    stall_ms: float
    idle_ms: float
    budget_bytes: int
    device_bytes_peak: int
    exact: bool
    emulated: bool
    reason: Literal["stop", "length", "context", "cancelled"]
    net_ms: float = 0.0  # mean per decoded token: time that prefetching saved less its cost; core.cache.prefetch_cost
    changed: int = 0  # (token, layer, expert) assignments that were not the router's
    assignments: int = 0  # all assignments
    seed: int = 0  # of the sampler: repeats the answer
    closeness: float = 0.0  # how far an exact answer's logits may be from transformers'; see core.capacity.plan.Plan
    audit: int = 0  # the number under which its quality will be reported (core.quality); 0 = it will not


@dataclass(frozen=True, slots=True)
class Piece:
    """One item of a streamed answer. `prefill` pieces report progress, `token` pieces carry text, `end` the stats."""

    kind: Literal["prefill", "token", "end"]
    text: str = ""
    token: int | None = None
    done: int = 0  # prefill: prompt positions computed
    total: int = 0  # prefill: prompt positions in total
    step: StepRecord | None = None
    stats: AnswerStats | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory in bytes by use, with the budget and the device's totals."""

    dense: int
    experts: int  # slots allocated
    kv: int  # KV cache in use
    kv_reserved: int  # size at the chosen context
    workspace: int
    budget: int
    device_total: int
    device_free: int
    host: int  # the experts' host tier
    peak: int  # most in use since load

    @property
    def used(self) -> int:
        return self.dense + self.experts + self.kv + self.workspace


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model fits, computed from config and file headers before anything is loaded. Bytes."""

    model: str
    shape: ModelShape
    format: str
    device: str
    context: int
    context_limit: int
    dense: int
    kv: int
    workspace: int
    slots: int  # slots the budget pays for
    slots_min: int
    budget: int  # total bytes of the budget
    budget_min: int
    budget_all: int  # everything resident
    device_free: int
    host: int  # host memory that the experts will use beside the budget
    host_free: int
    disk: int = 0  # bytes of the experts on disk that misses are read from; 0 = none are
    direct: bool = False  # those reads bypass the page cache
    hit_low: float = 0.0  # expected decode hit rate and tokens per second, as ranges
    hit_high: float = 1.0
    tok_s_low: float = 0.0
    tok_s_high: float = 0.0
    basis: str = ""  # what the ranges are based on, in the user's words
    suggested: str = ""  # the largest budget that is safe here, as the user would write it
    problem: str = ""  # why it cannot be loaded, in the user's words; "" = it fits
    warning: str = ""
    note: str = ""  # which parts of the model are not loaded, and whether it is exact up to rounding only

    @property
    def fits(self) -> bool:
        return not self.problem


@dataclass(slots=True)
class Frame:
    """One consistent snapshot of the engine for the live deck, cheap enough for 4 Hz."""

    version: int
    shape: ModelShape
    busy: bool
    place: npt.NDArray[np.uint8]  # [L, E] Residence
    hit_rate: npt.NDArray[np.float32]  # [L] decode hit rate over the last `window` tokens, NaN where none
    coactivation: npt.NDArray[np.uint32]  # [E, E] of the requested layer, since load
    window: int
    step: npt.NDArray[np.int32]  # [N] the last N forward passes, oldest first
    decode: npt.NDArray[np.uint8]  # [N] 1 = decode, 0 = prefill
    started_s: npt.NDArray[np.float32]  # [N]
    total_ms: npt.NDArray[np.float32]  # [N] and its parts:
    compute_ms: npt.NDArray[np.float32]
    stall_ms: npt.NDArray[np.float32]
    predict_ms: npt.NDArray[np.float32]  # [N] the predictor's own time on the compute thread: a part of compute_ms
    requests: npt.NDArray[np.int32]  # [N]
    hits: npt.NDArray[np.int32]
    demand_bytes: npt.NDArray[np.float32]
    prefetch_bytes: npt.NDArray[np.float32]  # used or not yet decided
    wasted_bytes: npt.NDArray[np.float32]
    disk_bytes: npt.NDArray[np.float32]  # the part of it all that was read from disk
    marks: list[tuple[int, str]]  # (step index, "budget 50% -> 25%")
    memory: Memory
    tok_s: float  # decode, over the window
    tpot_ms: float
    hit: float  # decode hit rate over the window; NaN when none
    link_gbps: float  # payload over the window's wall time
    link_peak_gbps: float  # the emulated bandwidth, or the fastest measured
    emulated: bool
    exact: bool
    net_ms: float = 0.0  # mean per decoded token over the window: time that prefetching saved less its cost
    prefetched: tuple[int, int, int, int] = (0, 0, 0, 0)  # in the window: used, late, wasted, of these evicted unused
    pinned: tuple[int, ...] = ()  # eids that the user pinned
    lossy: LossyLook | None = None  # what lossy options do; None while all are off
