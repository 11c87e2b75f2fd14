"""Guesses tokens with a model's head (`core.hf.head`), whose experts are cached as those of one more layer.

The head's keys and values of a position are made of the model's last state there and of the token after it. They follow
what is computed for a text: states are copied until a guess is wanted, about MOST of them, and then computed in one
pass. What a text has no states for, such as what was taken over from another request, the head does not see.
"""

import time
from collections.abc import Sequence
from ctypes import memmove
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
FEW = 16  # of them are read with a guess; what more of them take is paid before it
LATEST = 0.5  # weight of the latest time of a state that is read
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

    @property
    def used(self) -> bool:
        """Whether anything was asked for since the last `take`."""
        return self._requests > 0

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
        self._states = torch.empty(0, 0)  # [room, H] before their norm: first those that wait
        self._room = self._address = self._row_bytes = 0
        self._read_ms = 0.0  # a state
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
        self._last: Guessed | None = None  # at the last of its positions
        self.passes.cut(0)

    def seen(self, ids: Sequence[int], first: int, rows: int, states: torch.Tensor) -> None:
        """The model has computed its last states, fp32, before their norm, of `rows` tokens of `ids` from number
        `first` on: the first ones of `states` [T, H]. `ids` is the same list as long as it is the same answer, and
        grows."""
        if ids is not self._text or first != self._end:
            self._follow(ids, first)
            self._text = ids
        self._end, at = first + rows, first - self._done
        if at + rows > self._room:
            states = self._make_room(at, states[:rows])
            at, rows = self._end - self._done - len(states), len(states)
        memmove(self._address + at * self._row_bytes, states.data_ptr(), rows * self._row_bytes)

    def _make_room(self, at: int, states: torch.Tensor) -> torch.Tensor:
        """For these states after the `at` that wait -> those of them that are kept."""
        if not self._room:
            self._room, self._row_bytes = MOST + MOST // 2, 4 * states.shape[1]
            self._states = torch.empty(self._room, states.shape[1])
            self._address = self._states.data_ptr()
        if at + len(states) <= self._room:
            return states
        kept = max(0, MOST - len(states))
        self._states[:kept] = self._states[at - kept : at].clone()
        self.passes.cut(0)
        self._first = self._done = self._end - MOST
        return states[-MOST:]

    def _follow(self, ids: Sequence[int], at: int) -> None:
        """Keep what was made of the tokens before number `at` of this text. Where not all of it is there, nothing is
        of use."""
        same = common(self._text, ids)
        done, end = min(self._done, max(0, same - 1), at), min(self._end, same, at)
        if done < self._done:  # other tokens follow there, and the states are gone
            end = done
            self.passes.cut(max(0, done - self._first))
        self._done, self._end = done, end
        if end != at or done < self._first:
            self.forget()
            self._first = self._done = self._end = at

    def ready(self, ids: Sequence[int]) -> bool:
        """Whether it can guess what follows `ids`: the states of all tokens but the last one are known."""
        if self._end != len(ids) - 1:
            return False
        known = len(self._text)
        return self._text is ids or (known >= self._end and self._text == ids[:known])

    def first_ms(self, ids: Sequence[int]) -> float | None:
        """How long it takes to `read` what waits; None where it cannot guess, as it is not `ready`."""
        if not self.ready(ids):
            return None
        waiting = self._end - self._done
        return waiting * self._read_ms if waiting > FEW else 0.0

    def read(self, ids: Sequence[int]) -> None:
        """Compute the states that wait. `ready(ids)`."""
        began_s, waiting = time.perf_counter(), self._end - self._done
        if not waiting:
            return
        states = self._head.normed(self._states[:waiting])
        self._last = self._computed(self.passes, states, ids[self._done + 1 : self._end + 1], self._done)
        self._done = self._end
        if waiting > FEW:
            took_ms = 1e3 * (time.perf_counter() - began_s) / waiting
            self._read_ms += LATEST * (took_ms - self._read_ms) if self._read_ms else took_ms

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

    def take_use(self) -> HeadUse | None:
        """What its experts were asked for since the last call; None = for nothing."""
        return self._sink.take() if self._sink.used else None


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(at for at in range(most) if one[at] != other[at])
