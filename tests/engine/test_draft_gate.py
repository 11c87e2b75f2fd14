"""Guesses follow the longest match in the text, and the gate that decides how many are worth a pass."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.engine import drafter
from core.engine.draft_gate import CREDIT, LEAST, LOSS, MOST, DraftGate
from core.engine.draft_lookup import LONGEST, PLACES, SHORTEST, Lookup
from core.settings.drafts import DraftSettings
from tests.selection import layered


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 9), st.integers(1, 5))
def test_a_guess_is_what_followed_the_longest_match(ids: list[int], most: int, step: int) -> None:
    lookup = Lookup()
    for end in [*range(0, len(ids), step), len(ids)]:
        found = lookup.guess(ids[:end], most)
    places = [at for at in range(SHORTEST, len(ids)) if ids[at - SHORTEST : at] == ids[-SHORTEST:]][-PLACES:]

    def same(at: int) -> int:
        return next((n for n in range(min(at, LONGEST)) if ids[at - 1 - n] != ids[-1 - n]), min(at, LONGEST))

    if not places or not most:
        assert found is None
        return
    assert found is not None
    best = max(same(at) for at in places)
    assert found.matched == best
    at, known = max(at for at in places if same(at) == best), list(ids)
    while len(known) < at + most:
        known.append(known[at + len(known) - len(ids)])
    assert found.tokens == known[at : at + most]


def simulated(gate: DraftGate, share: float, took: Sequence[float], tokens: int, seed: int = 0) -> tuple[float, int]:
    """Write so many tokens, of each of which a guess is right with probability `share`; a pass of n rows takes
    `took[n - 1]` ms, more or less -> its time, and the tokens."""
    draw, spent, written = random.Random(seed), 0.0, 0
    while written < tokens:
        count = gate.choose(40, 8).guesses
        right = next((n for n in range(count) if draw.random() >= share), count)
        ms = took[count] * draw.uniform(0.7, 1.3)
        gate.judged(40, right if count else int(draw.random() < share), min(count, right + 1) or 1)
        gate.took(count, right, ms)
        spent, written = spent + ms, written + 1 + right
    return spent, written


@pytest.mark.parametrize(
    "slope", layered([0.02, 0.2, 0.5, 0.9, 1.3], quick=(0.02, 0.5, 1.3).__contains__, minutes=0.01)
)
@pytest.mark.parametrize(
    "share", layered([0.0, 0.2, 0.5, 0.8, 0.95], quick=(0.0, 0.5, 0.95).__contains__, minutes=0.01)
)
def test_the_gate_is_never_much_slower_and_near_the_best(share: float, slope: float) -> None:
    took = [10.0 * (1 + slope * extra) for extra in range(9)]
    expected = [sum(share**n for n in range(count + 1)) / took[count] for count in range(9)]
    speeds = []
    for seed in range(3):
        spent, written = simulated(DraftGate(), share, took, 1000, seed)
        speeds.append(written / spent)
    speed = sorted(speeds)[1]
    assert speed >= 0.97 / 10.0
    assert speed >= 0.88 * max(expected)


def test_what_trials_may_cost_is_bounded() -> None:
    """A gate that knows nothing tries no more than its credit, and what it takes back is a share of the time."""
    gate, took = DraftGate(), [10.0, *[1000.0] * 8]
    spent, written = simulated(gate, 0.9, took, 400)
    assert spent <= 13.0 * written * (1 + LOSS) + 1300.0 + CREDIT * 13.0
    assert LEAST > 1
    assert MOST > CREDIT


class Memory:
    """Of states that a pass has left as they were: bringing them up to date takes 5 ms of a clock."""

    def __init__(self, clock: list[float]) -> None:
        self.unsettled, self._clock = False, clock

    def settle(self) -> None:
        self.unsettled = False
        self._clock[0] += 0.005


def drafting(source: str, model: Any = None) -> drafter.Drafter:
    made = drafter.Drafter(SimpleNamespace(built_s=0.0), 8, model=model)  # type: ignore[arg-type]
    made.configure(None, DraftSettings(source))
    return made


def sequence(ids: Sequence[int], memory: Any = None) -> Any:
    kv = SimpleNamespace(memory=memory or SimpleNamespace(unsettled=False))
    return SimpleNamespace(kv=kv, ids=[*ids], drawn=0, stop=SimpleNamespace(limit=999), lookup=Lookup())


def step(total_ms: float) -> Any:
    return SimpleNamespace(total_ms=total_ms)


def test_what_states_take_is_the_time_of_the_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, took = [0.0], list[tuple[int, float]]()
    monkeypatch.setattr(drafter.time, "perf_counter", lambda: clock[0])
    drafts, memory = drafting("lookup"), Memory(clock)
    monkeypatch.setattr(drafts.gate, "took", lambda rows, kept, ms, *more: took.append((rows, ms)) or 0.0)
    one = sequence([1, 2, 3] * 4, memory)
    for guesses in (0, 2, 0, 0, 2):
        drafts.gate.fixed = guesses
        began_s = clock[0]
        drafts.draft(one, True)
        assert len(one.draft) == guesses
        clock[0] += 0.010
        drafts.passed(one, [1], step(1e3 * (clock[0] - began_s)))
        memory.unsettled, drafts._rest = guesses > 0, 0
    assert [(rows, round(ms, 6)) for rows, ms in took] == [(0, 10), (2, 10), (0, 10), (0, 10), (2, 15)]


def test_passes_in_which_something_else_is_compared_teach_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    took, judged = list[int](), list[int]()
    drafts, one = drafting("lookup"), sequence([1, 2, 3] * 4)
    monkeypatch.setattr(drafts.gate, "took", lambda rows, *more: took.append(rows) or 0.0)
    monkeypatch.setattr(drafts.gate, "judged", lambda *about: judged.append(1))
    for allowed in (False, True):
        drafts.draft(one, allowed)
        drafts.passed(one, [1], step(9.0))
        drafts._rest = 0
    assert len(took) == 1 and len(judged) == 2


def test_while_nothing_is_guessed_few_passes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guessing by computing does not pay: its gate is told of some passes, and counts all of them."""
    told, asked = list[int](), list[int]()
    model: Any = SimpleNamespace(token_ms=1.0, forget=lambda: None, first_ms=lambda ids: asked.append(1), guess=None)
    drafts, one = drafting("model", model), sequence(range(9))
    gate, took = drafts.model_gate, drafts.model_gate.took
    monkeypatch.setattr(gate, "took", lambda *about: (told.append(1), took(*about))[1])
    for _ in range(200):
        drafts.draft(one, True)
        assert not one.draft
        drafts.passed(one, [1], step(9.0))
    assert 200 - drafter.SELDOM <= gate._passes <= 200
    assert len(told) < 25 and len(asked) < len(told)
    assert gate.ready and gate.took_ms(1) is not None
    guesses = [7, 7]
    model.first_ms, model.guess = lambda ids: 0.0, lambda ids, count: guesses[:count]
    gate.fixed = 2
    drafts._asks_in = 0
    drafts.draft(one, True)
    assert one.draft == guesses
