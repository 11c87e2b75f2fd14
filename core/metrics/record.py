"""One forward pass: everything that is counted and measured of it, each figure with its description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from core.metrics.lossy_events import Lossy
from core.metrics.metric import Outcome, metric

Phase = Literal["prefill", "decode"]
Origin = Literal["host", "disk"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One finished copy into a device slot. Times are seconds on the session's clock."""

    layer: int
    expert: int
    bytes: int
    demand: bool  # False: a prefetch, or a copy of an expert that the host had computed
    submitted_s: float
    started_s: float
    ended_s: float
    phase: Phase
    origin: Origin = "host"


class ShadowPredictions(NamedTuple):
    """What shadow predictors predicted in a pass: nothing of it was fetched."""

    predictors: tuple[tuple[str, Mapping[str, Any]], ...]  # name and parameters of each
    ranked: npt.NDArray[Any]  # core.profile.trace.chunk.BESIDE
    maps: npt.NDArray[Any]  # core.profile.trace.chunk.beside_map_type


@dataclass(slots=True)
class StepRecord:
    """Everything about one forward pass: a prefill chunk or one decoded token. compute + stall + idle = total."""

    index: int  # counts forward passes since the model was loaded
    phase: Phase
    tokens: int = field(
        metadata=metric("tokens", "Positions computed in the pass, without guessed tokens that were wrong.", frame=True)
    )
    started_s: float = field(
        metadata=metric(
            "s", "When it began: seconds since the model was loaded.", frame=True, column="start_s", level=True
        )
    )
    total_ms: float = field(metadata=metric("ms", "Its wall time in milliseconds: compute + stall + idle.", frame=True))
    compute_ms: float = field(
        metadata=metric("ms", "The device was busy with the model, in milliseconds.", reduce="sum")
    )
    stall_ms: float = field(
        metadata=metric("ms", "Compute waited for a copy, in milliseconds.", reduce="sum", frame=True)
    )
    idle_ms: float = field(metadata=metric("ms", "Neither: Python and sampling, in milliseconds.", reduce="sum"))
    copy_ms: float = field(metadata=metric("ms", "The link was busy, in milliseconds; overlaps compute and stall."))
    ids: npt.NDArray[np.int16]  # [L, tokens, k] experts chosen by the router
    layer: npt.NDArray[np.int16]  # [R] requests: the layer of each; one per distinct expert of a layer
    expert: npt.NDArray[np.int16]  # [R]
    outcome: npt.NDArray[np.uint8]  # [R] Outcome of each request
    cached_tokens: int = field(
        default=0,
        metadata=metric(
            "tokens",
            "Positions of the prompt that were taken over from a kept KV cache and not computed; counted in the first "
            "pass of an answer.",
            reduce="sum",
        ),
    )
    predict_ms: float = field(
        default=0.0,
        metadata=metric(
            "ms",
            "The prefetcher's own time on the computing thread, in milliseconds: part of compute, and of idle what it "
            "takes before the pass, a wait for its answer included.",
        ),
    )
    record_ms: float = field(
        default=0.0,
        metadata=metric(
            "ms",
            "Asking other prefetchers for the lab, in milliseconds: part of compute, and of idle what it takes before "
            "the pass.",
        ),
    )
    net_ms: float = field(  # core.cache.counts
        default=0.0,
        metadata=metric(
            "ms",
            "What prefetching saved at most less what it cost, in milliseconds. Saved: the copies of prefetched "
            "experts that were asked for, less the waits for late ones. Cost: its own time, and the waits of "
            "demands that it held up or caused.",
            reduce="mean",
            level=True,
        ),
    )
    kernel_ms: float = field(
        default=0.0,
        metadata=metric(
            "ms",
            "Native code of the fast arithmetic ran on the computing thread, in milliseconds: part of compute. 0 where "
            "the model is computed otherwise.",
        ),
    )
    caused_ms: float = field(
        default=0.0,
        metadata=metric(
            "ms",
            "Of stall, what prefetching caused, in milliseconds: waits for late prefetches, and for demands that "
            "prefetches held up or caused.",
        ),
    )
    join_ms: float = field(
        default=0.0,
        metadata=metric(
            "ms",
            "The computing thread waited for missing experts that threads of the host computed, or took part, in "
            "milliseconds: part of compute.",
        ),
    )
    sample_ms: float = field(default=0.0, metadata=metric("ms", "Drawing tokens, in milliseconds: part of idle."))
    between_ms: float = field(
        default=0.0,
        metadata=metric(
            "ms",
            "From the end of the pass before to the begin of this one, where both are of one answer, in milliseconds: "
            "the token's text, what ends an answer, and whatever takes the token. Not in total.",
        ),
    )
    drafted: int = field(
        default=0, metadata=metric("tokens", "Guessed tokens that the pass verified beside the next one.", reduce="sum")
    )
    accepted: int = field(
        default=0,
        metadata=metric("tokens", "Of these, the ones that were right, and that the answer has.", reduce="sum"),
    )
    draft_saved_ms: float = field(
        default=0.0,
        metadata=metric(
            "ms",
            "What guessing saved, in milliseconds: what the tokens that the pass has written would have taken one by "
            "one, by the latest passes without guesses, less what it took.",
            reduce="sum",
        ),
    )
    draft_ms: float = field(
        default=0.0,
        metadata=metric(
            "ms",
            "Guessing took so long, in milliseconds: the search in the text, the model's head with its experts, and "
            "the draft model, which reads the text first. In total, before the pass that verifies, or after one over a "
            "prompt.",
            reduce="sum",
        ),
    )
    draft_requests: int = field(
        default=0,
        metadata=metric("requests", "Requests of the head that guesses for its experts; in no other.", reduce="sum"),
    )
    draft_hits: int = field(default=0, metadata=metric("requests", "Of these, the hits.", reduce="sum"))
    draft_bytes: int = field(
        default=0,
        metadata=metric("bytes", "Copied into slots for the head's experts; in no other count.", reduce="sum"),
    )
    prefetch_issued: int = field(default=0, metadata=metric("experts", "Experts whose prefetch was begun."))
    prefetch_used: int = field(default=0, metadata=metric("experts", "Prefetched experts that were then used."))
    prefetch_late: int = field(
        default=0, metadata=metric("experts", "Prefetched experts asked for before their copy had ended.")
    )
    prefetch_wasted: int = field(
        default=0, metadata=metric("experts", "Prefetched experts evicted or passed over without use.")
    )
    prefetch_evicted: int = field(
        default=0, metadata=metric("experts", "Of those, the ones evicted before their layer was reached.")
    )
    draft_prefetch_issued: int = field(default=0, metadata=metric("experts", "Of those begun, the ones for guesses."))
    draft_prefetch_hits: int = field(default=0, metadata=metric("experts", "Of these, those used or late."))
    draft_prefetch_wasted: int = field(default=0, metadata=metric("experts", "Of these, those not used."))
    bypassed: int = field(
        default=0,
        metadata=metric(
            "experts", "Experts fetched on demand and not kept after their use, being worth less than all others."
        ),
    )
    host_computed: int = field(
        default=0,
        metadata=metric(
            "requests",
            "Requests for a missing expert that the host computed where it lay, while nothing was copied for it. They "
            "count as misses.",
            reduce="sum",
        ),
    )
    host_admitted: int = field(
        default=0,
        metadata=metric(
            "experts", "Of their experts, those that were then copied into a slot, for later.", reduce="sum"
        ),
    )
    host_ms: float = field(
        default=0.0,
        metadata=metric(
            "ms",
            "Threads of the host computed missing experts, in milliseconds; overlaps compute. What the computing "
            "thread did of it is not in it.",
            reduce="sum",
        ),
    )
    top_hits: int = field(
        default=0,
        metadata=metric(
            "requests",
            "Requests for an expert of which a part was resident and could be computed while the rest was fetched. "
            "They count as misses, or as late, by what became of the rest.",
            reduce="sum",
        ),
    )
    demand_bytes: int = field(
        default=0, metadata=metric("bytes", "Payload copied on demand.", reduce="sum", frame=True)
    )
    prefetch_bytes: int = field(
        default=0, metadata=metric("bytes", "Payload copied by prefetches.", reduce="sum", frame=True)
    )
    admitted_bytes: int = field(
        default=0, metadata=metric("bytes", "Payload copied of experts that the host had computed.", reduce="sum")
    )
    late_bytes: int = field(default=0, metadata=metric("bytes", "Payload of prefetches that were late."))
    wasted_bytes: int = field(
        default=0, metadata=metric("bytes", "Payload of wasted prefetches.", reduce="sum", frame=True)
    )
    evicted_bytes: int = field(
        default=0, metadata=metric("bytes", "Payload of prefetches that were evicted before their layer was reached.")
    )
    disk_bytes: int = field(
        default=0,
        metadata=metric(
            "bytes",
            "Bytes read from disk for the copies that ended in the pass, padding included.",
            reduce="sum",
            frame=True,
        ),
    )
    slots: int = field(default=0, metadata=metric("experts", "Experts that the device had room for.", level=True))
    device_bytes: int = field(default=0, metadata=metric("bytes", "Device memory in use after the pass.", level=True))
    budget_bytes: int = field(default=0, metadata=metric("bytes", "Device memory that was allowed.", level=True))
    emulated: bool = field(
        default=False, metadata=metric("", "The link was paced to an emulated bandwidth.", reduce="any")
    )
    exact: bool = field(default=True, metadata=metric("", "No lossy option changed the result.", reduce="all"))
    rows: tuple[tuple[int, int], ...] = ()  # whose its tokens are, in their order: (request, how many)
    transfers: tuple[Transfer, ...] = ()
    changes: dict[str, object] = field(default_factory=dict)  # settings that took effect just before this pass
    probs: npt.NDArray[np.float16] | None = None  # [L, tokens, E] of the router, if captured
    ranked: npt.NDArray[Any] | None = None  # the predictions, if captured: core.profile.trace.chunk.RANKED
    maps: Sequence[tuple[int, int, npt.NDArray[np.float32]]] | None = None  # the maps that the predictor found, if
    # captured and it finds any: the layer in which each was there, its layer, and its distribution [E]
    tok: npt.NDArray[np.int32] | None = None  # [tokens] their ids, if captured
    beside: ShadowPredictions | None = None  # of shadow predictors, if there were any
    lossy: Lossy | None = None  # what lossy options did; None while all are off

    def spent(self, total_s: float) -> None:
        """Set the total time of the pass; what was neither computing nor stalling becomes idle time."""
        self.total_ms = total_s * 1e3
        self.idle_ms = self.total_ms - self.compute_ms - self.stall_ms

    @property
    def lossless(self) -> bool:
        """Whether nothing in this very pass was computed otherwise than the router chose; `exact` also asks that of the
        passes before it on which its sequences depend."""
        return self.lossy is None or self.lossy.changed + self.lossy.reweighed == 0

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
