"""What a head that drafts keeps of a text: always what its own passes would, however much was accepted."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from core.runtime import draft_head
from core.runtime.draft_head import FEW, MOST, DraftHead
from core.runtime.head_passes import Guessed


class Kept:
    """What a head keeps of a text: (position, state, token) of each."""

    def __init__(self) -> None:
        self.rows = list[tuple[int, float, int]]()

    def cut(self, length: int) -> None:
        assert length <= len(self.rows)
        del self.rows[length:]


class Fake:
    """In place of a head and its passes, which keep what they are given."""

    def __init__(self) -> None:
        self.kept = Kept()

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def compute(self, hidden: torch.Tensor, tokens: list[int], first: int, *_: object) -> Guessed:
        assert len(hidden) == len(tokens)
        rows = self.kept.rows
        assert not rows or rows[-1][0] == first - 1, "without a gap"
        rows += [(first + at, float(hidden[at]), token) for at, token in enumerate(tokens)]
        return Guessed(torch.tensor([[-1.0]]), torch.tensor([0.0, 1.0]))

    def cut(self, length: int) -> None:
        self.kept.cut(length)


class Quiet:
    """A step and a sink that do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Dispatch:
    def to(self, step: object) -> Any:
        return threading.Lock()


def state_of(ids: list[int], at: int) -> float:
    """What a model's state at a position depends on: all tokens up to it."""
    return float(hash(tuple(ids[: at + 1])) % 65521)


def test_what_it_keeps_is_of_the_text() -> None:
    guesses = 0
    for seed in range(300):
        draw, fake = random.Random(seed), Fake()
        head: Any = DraftHead(fake, fake, Dispatch(), Quiet(), Quiet())  # type: ignore[arg-type]
        ids, computed = [1], 0
        for _ in range(draw.randint(1, 12)):
            if draw.random() < 0.3:  # another text, which begins as this one did, and goes on from a kept KV
                same = draw.randint(0, len(ids))
                ids = [*ids[:same], *some(draw, 9)]
                computed = min(computed, draw.randint(0, same), len(ids) - 1)
            drawn = some(draw, 4)
            rows = len(ids) - computed + len(drawn) - 1  # all but the last were guessed, and computed, too
            ids = [*ids, *drawn]
            states = torch.tensor([[state_of(ids, at)] for at in range(computed, computed + rows)])
            if draw.random() < 0.8:  # it does not see every pass
                head.seen(ids, computed, rows, states)
            computed += rows
            if head.ready(ids) and draw.random() < 0.5:
                count = draw.randint(1, 3)
                assert head.guess(ids, count) == [1] * count
                first = fake.kept.rows[0][0]
                assert fake.kept.rows == [(at, state_of(ids, at), ids[at + 1]) for at in range(first, computed)]
                guesses += 1
    assert guesses > 300


def some(draw: random.Random, most: int) -> list[int]:
    return [draw.randint(0, 1) for _ in range(draw.randint(1, most))]


def test_of_a_long_prompt_it_reads_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "MOST", 8)
    assert MOST > 8
    fake = Fake()
    head: Any = DraftHead(fake, fake, Dispatch(), Quiet(), Quiet())  # type: ignore[arg-type]
    ids = list(range(30))
    for begin in (0, 10, 20):
        states = torch.tensor([[state_of(ids, at)] for at in range(begin, begin + 10)])
        head.seen([*ids, 99] if begin == 20 else ids, begin, 10, states)
    assert head.guess([*ids, 99], 2) == [1, 1]
    assert fake.kept.rows == [(at, state_of(ids, at), [*ids, 99][at + 1]) for at in range(22, 30)]


def test_what_waits_is_paid_before_it_guesses() -> None:
    """Not a few states, which a guess reads in any case."""
    fake = Fake()
    head: Any = DraftHead(fake, fake, Dispatch(), Quiet(), Quiet())  # type: ignore[arg-type]
    ids = list(range(FEW + 2))
    head.seen(ids, 0, FEW + 1, torch.zeros(FEW + 1, 1))
    head.read(ids)  # by which it is known how long it takes
    assert head.first_ms(ids) == 0 and head.first_ms([*ids, 1]) is None
    for at in range(FEW + 1, 2 * FEW + 2):
        ids.append(at)
        head.seen(ids, at, 1, torch.zeros(1, 1))
        waiting = at - FEW
        assert (head.first_ms(ids) > 0) == (waiting > FEW)
    head.guess(ids, 1)
    assert head.first_ms(ids) == 0 and len(fake.kept.rows) == len(ids) - 1
