"""Types of the domain. Experts are integers: `expert` within its layer, `eid = layer * experts + expert` overall.

`layer` always counts Mixture-of-Experts layers (0 = the first one), not the model's transformer blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from core.metrics import Origin as Origin
from core.metrics import Outcome as Outcome
from core.metrics import Phase as Phase
from core.metrics import StepRecord as StepRecord
from core.metrics import Transfer as Transfer
from core.metrics.limit import SpeedLimit
from core.metrics.lossy_events import Action as Action
from core.metrics.lossy_events import LossyLook
from core.metrics.lossy_events import Why as Why

Reason = Literal["stop", "length", "context", "cancelled"]
"""Why an answer ended: by an end token, at its limit of tokens, at the end of the context, or stopped by its reader."""


class Residence(IntEnum):
    """The location of an expert, for the residency map."""

    HOST = 0
    IN_FLIGHT = 1
    RESIDENT = 2
    HIT_NOW = 3  # resident and used by the last step
    DISK = 4  # neither on the device nor in host memory
    PART = 5  # its first blocks are resident


class Segment(NamedTuple):
    """Consecutive blocks of an expert, which are copied, leased and computed together. A block is one of the equal
    parts that an expert is cached in; a slot holds one."""

    eid: int
    blocks: range


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a loaded MoE."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_bytes: int
    encoder_layers: int = 0
    """The first so many layers compute a prompt, and only that; the others the answer. 0: all compute both."""
    heads: int = 0
    """MoE layers of a head that drafts tokens. They are cached after `layers`, and no pass over the model computes
    them: routing, hit rates and maps of residents are those of `layers` alone."""

    @property
    def cached_layers(self) -> int:
        """MoE layers whose experts are cached."""
        return self.layers + self.heads

    @property
    def total(self) -> int:
        """Routed experts that are cached."""
        return self.cached_layers * self.experts


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and the tools that the model is offered: each as a chat template takes it."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """The statistics line under an answer. Hit rate is decode's; prefill's is shown beside it, never mixed in.

    What core.metrics.reduced returns stands in the field of its name, and in `more` where there is none."""

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
    reason: Reason
    passes: int = 0  # forward passes, of prompts too, that `link_gbps` and `lossy` are over: the last ones
    net_ms: float = 0.0  # mean per decoded token: time that prefetching saved less its cost; core.cache.counts
    changed: int = 0  # (token, layer, expert) assignments that were not the router's
    assignments: int = 0  # all assignments
    cached_tokens: int = 0  # of the prompt: taken over from a kept KV cache, not computed
    begun_tokens: int = 0  # of the prompt: the answer's own beginning, which it continued
    kept_bytes: int = 0  # host memory that earlier chats' KV caches took
    seed: int = 0  # of the sampler: repeats the answer
    closeness: float | None = 0.0  # how far an exact answer's logits may be from transformers'; None: not measured
    arithmetic: str = (
        "reference"  # or "fast", or "fast_experts": of which an exact answer has the bits of everything resident
    )
    distance_kl: float | None = None  # KL(reference || fast) of the model, nats per token; None: not measured
    distance_tokens: int = 0  # of the text that it was measured on
    weights: str = ""  # the format that weights were rounded to; "" = they are the checkpoint's own
    audit: int = 0  # the number under which its quality will be reported (core.engine.quality); 0 = it will not
    stop: str = ""  # the requested text before which it ended; "" = it ended otherwise
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All figures by name."""
        found = asdict(self)
        return {**found, **found.pop("more")}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token with its log probability (natural, of the model's own distribution: before temperature and
    penalties), and the likeliest tokens at its place with theirs, likeliest first."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Ids:
    """A prompt as token ids, used unchanged."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer that goes on: what was asked, and its text so far. `ids` = its tokens, of a model that wrote it; they
    are used by a tokenizer that reads this text in them."""

    asked: Sequence[Mapping[str, Any]] | str | Chat
    text: str
    ids: Sequence[int] = ()


Asked = Sequence[Mapping[str, Any]] | str | Ids | Chat | Begun
"""A chat, a text to continue, token ids, or an answer to continue."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One item of a streamed answer. `prefill` pieces report progress, `token` pieces carry text, `end` the stats and
    text that was withheld."""

    kind: Literal["prefill", "token", "end"]
    text: str = ""
    token: int | None = None
    done: int = 0  # prefill: prompt positions computed
    total: int = 0  # prefill: prompt positions in total
    cached: int = 0  # prefill: of those done, the ones taken over from a kept KV cache
    step: StepRecord | None = None
    stats: AnswerStats | None = None
    logprob: TokenLogprob | None = None  # token: where the request asked for it


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
    kept: int = 0  # host memory of earlier chats' KV caches: core.engine.prefix_cache
    unpinned: int = 0  # of `host`: what the system did not let be pinned for the GPU, and takes longer to copy

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


class Underway(NamedTuple):
    """A forward pass that is being computed, so far. A long prompt's takes seconds."""

    seconds: float
    tokens: int
    layers: int  # MoE layers that are computed
    moved_bytes: int  # payload copied into slots, on demand and ahead
    disk_bytes: int  # read from disk for it


@dataclass(slots=True)
class Frame:
    """One consistent snapshot of the engine for the live deck, cheap enough for 4 Hz."""

    version: int
    shape: ModelShape
    busy: bool
    place: npt.NDArray[np.uint8]  # [L, E] Residence
    hit_rate: npt.NDArray[np.float32]  # [L] decode hit rate over the window, NaN where none
    coactivation: npt.NDArray[np.uint32]  # [E, E] of the requested layer, since load
    window: int  # decoded tokens that `tok_s`, `tpot_ms`, hit rates and what prefetching did are over: the last ones
    columns: Mapping[str, npt.NDArray[Any]]  # [N] timelines of the last N forward passes, oldest first: `step` (their
    # index), `decode` (1; 0 = prefill), and the metrics that have `frame`; prefetch_bytes here without wasted_bytes
    marks: list[tuple[int, str]]  # (step index, "budget 50% -> 25%")
    memory: Memory
    tok_s: float  # decode, over the window
    tpot_ms: float
    hit: float  # decode hit rate over the window; NaN when none
    link_gbps: float  # payload of the last `passes` over their wall time
    link_peak_gbps: float  # the highest that this was since the model was loaded
    link_limit_gbps: float  # what the link can carry: the emulated bandwidth, or the fastest measured
    emulated: bool
    exact: bool
    underway: Underway | None = None  # the pass that is being computed, once it has taken long
    passes: int = 0  # forward passes, of prompts too, that `link_gbps` and `lossy` are over: the last ones
    net_ms: float = 0.0  # mean per decoded token over the window: time that prefetching saved less its cost
    prefetched: tuple[int, int, int, int] = (0, 0, 0, 0)  # in the window: used, late, wasted, of these evicted unused
    compared: tuple[float, float, int, bool] | None = None  # ms a token with prefetching and without, over so many
    # tokens each, taken in turns, and whether it goes on; None: not compared, or not yet
    pinned: tuple[int, ...] = ()  # eids that the user pinned
    lossy: LossyLook | None = None  # what lossy options do; None while all are off
    limit: SpeedLimit | None = None  # the share of the speed limit, with the parts of the time of each pass
