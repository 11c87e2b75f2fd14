"""Guesses tokens with a model's head (`core.hf.head`), whose experts are cached as those of one more layer.

The head's keys and values of a position are made of the model's last state there and of the token after it. They follow
what is computed for a text: states are kept until a guess is wanted, about MOST of them, and then computed in one
pass. What a text has no states for, such as what was taken over from another request, the head does not see.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from core.cache.expert_cache import ExpertCache
from core.hf.head import MtpHead
from core.memory.transfer import TransferEngine
from core.runtime.batch import Batch, Share
from core.runtime.head_passes import Guessed, HeadPasses
from core.runtime.moe_step import MoEStep
from core.runtime.pipeline import StepDispatch
from core.runtime.step_sink import NullSink, Requests
from core.types import Outcome

MOST = 512  # states that wait, and half as many more before what is too old is dropped
TRIED = 6  # random ones, of a trial


class HeadUse(NamedTuple):
    """What the experts of a head were asked for."""

    requests: int
    hits: int
    bytes: int  # copied into slots for them


class HeadSink(NullSink):
    """Counts what is computed for guesses apart from what is computed for tokens."""

    def __init__(self, expert_cache: ExpertCache, transfers: TransferEngine) -> None:
        super().__init__(expert_cache, transfers)
        self._requests = self._hits = self._bytes = 0

    def layer(self, layer: int, ids: list[list[int]], requests: Requests | None) -> None:
        made = len({expert for row in ids for expert in row}) if requests is None else len(requests)
        self._requests += made
        self._hits += made if requests is None else sum(one.outcome == Outcome.HIT for one in requests)

    def copied(self) -> None:
        """A pass of the head is over: discards what the cache counted, except the bytes."""
        self._bytes += self._expert_cache.take_counts().demand_bytes
        self._transfers.forget()

    def take(self) -> HeadUse:
        """Since the last call."""
        found = HeadUse(self._requests, self._hits, self._bytes)
        self._requests = self._hits = self._bytes = 0
        return found


class DraftHead:
    """Of one loaded model, for one text at a time. Between two passes of the model, on the computing thread."""

    def __init__(
        self, head: MtpHead, passes: HeadPasses, dispatch: StepDispatch, step: MoEStep, sink: HeadSink
    ) -> None:
        """`step`: computes its experts in the `passes`, and reports them to `sink`."""
        self._head, self.passes, self._dispatch, self._step, self._sink = head, passes, dispatch, step, sink
        self.forget()

    @property
    def bytes(self) -> int:
        """What its keys and values take."""
        return self.passes.bytes

    def prefer(self, other: HeadPasses, close: float) -> float:
        """Compute by others, if the logits of some random states differ from those of the present ones by no more than
        this share of their size -> by how much they do. Nothing is kept of a text."""
        draw, width = torch.Generator().manual_seed(0), self._head.config.hidden_size
        hidden, tokens = torch.randn(TRIED, width, generator=draw), list(range(1, 1 + TRIED))
        normed, both = self._head.normed(hidden), (self.passes, other)
        wanted, found = (self._computed(one, normed, tokens, 0).logits for one in both)
        off = float((found.float() - wanted.float()).norm() / wanted.float().norm())
        self.passes.cut(0)
        other.cut(0)
        if off <= close:
            self.passes = other
        self._sink.take()
        return off

    def forget(self) -> None:
        """What comes next belongs to no text that is known."""
        self._text: Sequence[int] = []
        self._first = self._done = self._end = 0  # positions: of the first key, after the last, and after all states
        self._waiting: list[torch.Tensor] = []  # states [t, H] before their norm, at positions from `_done` to `_end`
        self._last: Guessed | None = None  # at the last of its positions
        self.passes.cut(0)

    def seen(self, ids: Sequence[int], first: int, states: torch.Tensor) -> None:
        """The model has computed its last states [t, H], before their norm, of the tokens of `ids` from number `first`
        on."""
        self._follow(ids, first)
        self._waiting.append(states)
        self._end = first + len(states)
        self._text = [*ids]
        if self._end - self._done > MOST + MOST // 2:
            kept = torch.cat(self._waiting)[-MOST:].clone()
            self.passes.cut(0)
            self._first = self._done = self._end - MOST
            self._waiting = [kept]

    def _follow(self, ids: Sequence[int], at: int) -> None:
        """Keep what was made of the tokens before number `at` of this text. Where not all of it is there, nothing is
        of use."""
        same = common(self._text, ids)
        done, end = min(self._done, max(0, same - 1), at), min(self._end, same, at)
        if done < self._done:  # other tokens follow there, and the states are gone
            self._waiting, end = [], done
            self.passes.cut(max(0, done - self._first))
        elif end < self._end:
            self._waiting = [torch.cat(self._waiting)[: end - done]] if end > done else []
        self._done, self._end = done, end
        if end != at or done < self._first:
            self.forget()
            self._first = self._done = self._end = at

    def ready(self, ids: Sequence[int]) -> bool:
        """Whether it can guess what follows `ids`: the states of all tokens but the last one are known."""
        return self._end == len(ids) - 1 and self._text == ids

    def first_ms(self, ids: Sequence[int]) -> float | None:
        """It is never to read first, but where it is not `ready`, it cannot guess."""
        return 0.0 if self.ready(ids) else None

    def read(self, ids: Sequence[int]) -> None:
        """Compute the states that wait. `ready(ids)`."""
        if self._waiting:
            states, self._waiting = self._head.normed(torch.cat(self._waiting)), []
            self._last = self._computed(self.passes, states, ids[self._done + 1 : self._end + 1], self._done)
            self._done = self._end

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that are likeliest to follow `ids`, each after the one before. `ready(ids)`."""
        self.read(ids)
        found, tokens = self._last, list[int]()
        assert found is not None
        for at in range(self._end, self._end + count):
            if tokens:
                found = self._computed(self.passes, found.state, tokens[-1:], at - 1)
            tokens.append(int(found.logits.argmax()))
        self.passes.cut(self._done - self._first)  # of those of guesses, nothing stays
        return tokens

    def _computed(self, by: HeadPasses, states: torch.Tensor, tokens: Sequence[int], first: int) -> Guessed:
        step = self._step
        step.begin(Batch("decode", (Share(tokens),)))
        try:
            with self._dispatch.to(step):
                return by.compute(states, tokens, first, self._dispatch, step)
        except BaseException:
            step.expert_cache.abandon()
            self.forget()
            raise
        finally:
            step.end()
            self._sink.copied()

    def take_use(self) -> HeadUse:
        """What its experts were asked for since the last call."""
        return self._sink.take()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(at for at in range(most) if one[at] != other[at])
