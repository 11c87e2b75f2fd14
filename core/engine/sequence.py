"""One text that is being continued: its tokens, what of it is in the KV cache, how its next token is chosen, and what
ends it."""

from collections.abc import Callable, Set
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple, Protocol

from core.engine.draft_lookup import Lookup
from core.engine.quality.sample import Sample
from core.engine.sampler import Draw
from core.runtime.batch import Share
from core.runtime.kv_copies import StateCheckpoint
from core.runtime.sequence_kv import SequenceKV
from core.types import Piece, Reason


class Cancel(Protocol):
    """A `threading.Event`, or what is set as one is."""

    def is_set(self) -> bool:
        """Whether the sequence is to end."""


class Start(NamedTuple):
    """Where a request begins: its KV, and what of that cannot be cut, copied (None: all of it can)."""

    kv: SequenceKV
    checkpoint: StateCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """What ends a sequence: one of the tokens `ends`, `limit` new tokens, or `cancel` being set."""

    ends: Set[int]
    limit: int
    limited_by_context: bool  # that many and no more fit into the context
    cancel: Cancel


@dataclass(slots=True, eq=False)
class Sequence:
    """Everything that belongs to one request and to no other. `ids` = the tokens so far, of which `kv` holds the first;
    it may be kept for longer than the answer takes."""

    request: int
    ids: list[int]
    start: InitVar[Start]
    draw: Draw
    stop: Stop
    sample: Sample  # logits kept for scoring the answer
    prompt: int = field(init=False)  # tokens of `ids` that were given; the others were drawn
    kv: SequenceKV = field(init=False)
    ended: bool = field(init=False, default=False)  # an end token was drawn
    stopped: bool = field(init=False, default=False)  # a text was written before which it is to end
    begun_tokens: int = 0  # of `ids` that were given: the last ones, with which the answer had begun
    kept: bool = False  # its KV is to be kept after the answer
    draft: list[int] = field(init=False, default_factory=list)
    """Guessed tokens that the next pass verifies: it computes them after the last of `ids`."""
    lookup: Lookup = field(init=False, default_factory=Lookup)  # of what it has guesses from
    cached: int = field(init=False)  # tokens that the KV held from the beginning
    begun: StateCheckpoint | None = field(init=False)  # of the KV at the beginning
    reading: Callable[[Piece], None] | None = None  # gets how far its prompt is read, layer by layer
    read: list[StateCheckpoint] = field(init=False, default_factory=list)
    """Of the KV after the last two passes over the prompt."""

    def __post_init__(self, start: Start) -> None:
        self.kv, self.begun = start
        self.prompt, self.cached = len(self.ids), self.kv.length

    # ------------------------------------------------------------------ computing

    @property
    def computed(self) -> int:
        """The number of tokens that the KV cache holds."""
        return self.kv.length

    @property
    def longest(self) -> int:
        """The number of tokens that prompt and answer may have."""
        return self.prompt + self.stop.limit

    def share(self, count: int) -> Share:
        """The part in a pass that computes the next `count` tokens, and the draft."""
        return Share(self.ids[self.computed : self.computed + count] + self.draft, self.kv, self.request)

    def start_over(self, kv: SequenceKV) -> None:
        """Continue with an empty KV cache: what it held is to be computed again."""
        self.kv, self.cached, self.begun = kv, kv.length, None
        self.read.clear()

    def reached(self, layer: int, layers: int, count: int, total: int) -> None:
        """A pass over the next `count` tokens of its prompt of `total` begins to compute one of its layers."""
        if self.reading is not None:
            done = self.computed + count * layer // layers
            self.reading(Piece("prefill", done=done, total=total, cached=self.cached))

    @property
    def taken_over(self) -> int:
        """The tokens that the coming pass follows and that were computed for another request; 0 after the first
        pass."""
        return self.cached if self.computed == self.cached else 0

    def remember(self, checkpoint: StateCheckpoint | None) -> None:
        """A pass over the prompt has ended, with the KV at `checkpoint`."""
        if checkpoint is not None:
            self.read = [*self.read[-1:], checkpoint]

    @property
    def checkpoints(self) -> list[StateCheckpoint]:
        """Where a request may continue from, if its KV cannot be cut."""
        return [one for one in (self.begun, *self.read) if one is not None]

    def take_back(self) -> None:
        """What the KV holds of tokens that were guessed, or drawn, and are not taken is not to be there."""
        if self.computed > len(self.ids):
            self.kv.memory.take_back(self.kv, self.computed - len(self.ids))

    # ------------------------------------------------------------------ the answer

    @property
    def drawn(self) -> int:
        """The number of tokens of the answer so far."""
        return len(self.ids) - self.prompt

    def take(self, token: int) -> bool:
        """Add the token that was drawn; False for an end token, which is not part of the answer."""
        self.ended = token in self.stop.ends
        if not self.ended:
            self.ids.append(token)
        return not self.ended

    def continues(self, tokens: list[int]) -> bool:
        """Whether a pass that computes the last of `tokens`, just drawn and not taken yet, is to follow."""
        return tokens[-1] not in self.stop.ends and self.drawn + len(tokens) < self.stop.limit and not self.cancelled

    @property
    def cancelled(self) -> bool:
        return self.stop.cancel.is_set()

    @property
    def over(self) -> bool:
        """Whether no further token is wanted."""
        return self.ended or self.stopped or self.cancelled or self.drawn >= self.stop.limit

    @property
    def reason(self) -> Reason:
        """Why it ended, once it is `over`."""
        if self.ended or self.stopped:
            return "stop"
        return "cancelled" if self.cancelled else "context" if self.stop.limited_by_context else "length"
