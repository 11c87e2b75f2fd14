"""What a pass over guesses visits is foretold from what the same tokens have visited before: as recorded, and nearer to
what it then is than the passes before it; and the gate prices it."""

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from core.engine import Engine
from core.engine.draft_gate import DraftGate
from core.engine.draft_lookup import Lookup
from core.engine.draft_trace import NOTHING, RoutingTrace
from core.engine.pass_price import Load, PassPrice
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids, ModelShape
from tests.engine.drafted import Answer
from tests.loaded import loaded

SHAPE = ModelShape(layers=3, experts=16, top_k=2, hidden=8, expert_bytes=1)
DEMO: dict[str, Any] = dict(arithmetic="fast", context=512)
PASSAGE, WRITTEN, EDITED = 40, 80, 12  # tokens


class Recorded:
    """A recorder of passes, and a cache, that are told what they have."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.resident = set[int]()

    def without_slots(self, eids: Iterable[int]) -> list[int]:
        return [eid for eid in eids if eid not in self.resident]

    def ran(self, rows: Sequence[Sequence[Sequence[int]]]) -> None:
        """A pass whose rows [T] chose these experts [L][k]."""
        chosen = array("h", [expert for layer in range(SHAPE.layers) for row in rows for expert in row[layer]])
        self.latest = SimpleNamespace(layers=[*range(SHAPE.layers)], chosen=chosen, requests=None)


def routing(draw: random.Random) -> list[list[int]]:
    return [draw.sample(range(SHAPE.experts), SHAPE.top_k) for _ in range(SHAPE.layers)]


@pytest.mark.parametrize("seed", range(20))
def test_it_foretells_what_the_same_tokens_visited(seed: int) -> None:
    """Through random histories: pieces of prompts, passes with guesses that are refused, texts that begin alike, and
    tokens that were computed elsewhere."""
    draw, recorded = random.Random(seed), Recorded()
    trace = RoutingTrace(SHAPE, recorded, recorded)  # type: ignore[arg-type]
    known: dict[int, list[list[int]]] = {}  # position -> what its token visited
    ids, computed = [draw.randrange(5) for _ in range(9)], 0
    for _ in range(60):
        what = draw.random()
        if what < 0.1:  # another text, from somewhere on
            same = draw.randrange(len(ids))
            ids = [*ids[:same], *(draw.randrange(5) for _ in range(9))]
            known, computed = {at: one for at, one in known.items() if at < same}, same
        elif what < 0.15:  # of which a piece is computed where nothing is recorded
            computed = len(ids) - 1
        rows, kept = [routing(draw) for _ in range(len(ids) - computed + draw.randrange(4))], len(ids) - computed
        recorded.ran(rows)
        if computed not in known and computed - 1 not in known:
            known.clear()
        trace.passed(ids, computed, kept)
        known |= dict(zip(range(computed, computed + kept), rows, strict=False))
        computed += kept
        ids.append(draw.randrange(5))

        recorded.resident = {eid for eid in range(SHAPE.layers * SHAPE.experts) if draw.random() < 0.5}
        guess = Lookup().guess(ids, draw.randrange(1, 9))
        if guess is None:
            continue
        for place in (guess.place, -1):
            found = trace.foretell(ids, guess.tokens, place)
            assert [*found.loads] == expected(ids, guess.tokens, place, known, recorded.resident)
            visited = {eid for row in found.rows for eid in row} - recorded.resident
            assert {*found.missing} == visited and len(found.missing) == len(visited)


def expected(
    ids: list[int], tokens: list[int], place: int, known: dict[int, list[list[int]]], resident: set[int]
) -> list[Load]:
    whole, found, union = [*ids, *tokens], list[Load](), set[int]()
    for row, token in enumerate(whole[len(ids) - 1 :]):
        at = place + row - 1 if place > 0 else max((n for n in range(len(ids) - 1) if ids[n] == token), default=-1)
        while place > 0 and at >= len(ids) - 1:  # the text goes on as it has since the place
            at = place - 1 if at == len(ids) - 1 else at - (len(ids) - place)
        if at not in known:
            break
        union |= {layer * SHAPE.experts + one for layer, of in enumerate(known[at]) for one in of}
        found.append(Load(len(union), len(union - resident)))
    return found


def test_old_routing_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.draft_trace.MOST_BYTES", 40 * 2 * SHAPE.layers * SHAPE.top_k)
    recorded, ids = Recorded(), list[int]()
    trace = RoutingTrace(SHAPE, recorded, recorded)  # type: ignore[arg-type]
    for at in range(100):
        ids.append(at)
        recorded.ran([[[at % SHAPE.experts, (at + 1) % SHAPE.experts]] * SHAPE.layers])
        trace.passed(ids, at, 1)
    assert len(trace.foretell([*ids, 99], [95, 96]).loads) == 3
    assert not trace.foretell([*ids, 5], [5]).loads
    trace.forget()
    assert trace.foretell([*ids, 99], [95]) is NOTHING


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    if not supported():
        pytest.skip("no kernels for this CPU")
    with loaded("demo", {"budget": "50%", "link": "own", "drafts": "lookup"}, **DEMO) as engine:
        engine.prompt.ends = set()
        yield engine


@pytest.mark.parametrize("edited", [False, True])
def test_it_is_nearer_than_the_passes_before(demo: Engine, edited: bool) -> None:
    drafter, trace = demo.parts.drafter, demo.parts.drafter._trace
    assert trace is not None
    passage = demo.prompt.encode("The old man went down to the sea, and there he saw that the ship was gone. " * 3, 512)
    whole = (passage[:PASSAGE] * 4)[: PASSAGE + WRITTEN]
    text = [
        (one * 7) % demo.model.config.vocab_size if edited and n > PASSAGE and not n % EDITED else one
        for n, one in enumerate(whole)
    ]
    seen, passed = list[tuple[int, Load, Load]](), drafter.passed

    def noted(sequence: Any, drawn: list[int], step: Any) -> None:
        foretold, had = drafter._load(len(sequence.draft)), trace.load()
        if sequence.draft and foretold is not None and had is not None:
            seen.append((len(sequence.draft), foretold, had))
        passed(sequence, drawn, step)

    drafter.passed = noted  # type: ignore[method-assign]
    try:
        for count in (2, 4, 8):
            drafter.gate.fixed = count
            demo.expert_cache.start_over()
            Answer(demo, Sampling(max_new_tokens=WRITTEN), Ids(text[:PASSAGE]), draw=lambda ids, _: text[len(ids)])
    finally:
        del drafter.passed  # type: ignore[method-assign]
        drafter.gate.fixed = None
    for of in ("experts", "missing"):
        by_trace, by_mean = list[float](), list[float]()
        for count in (2, 4, 8):
            had = [getattr(one, of) for rows, _, one in seen if rows == count]
            foretold = [getattr(one, of) for rows, one, _ in seen if rows == count]
            by_trace += [abs(one - other) for one, other in zip(foretold, had, strict=True)]
            by_mean += [abs(fmean(had[:at] or had[:1]) - one) for at, one in enumerate(had)]
        assert len(by_trace) >= 40
        assert fmean(by_trace) < 0.7 * fmean(by_mean), of


def test_the_price_is_what_experts_take() -> None:
    price, draw, usual = PassPrice(), random.Random(2), Load(100, 40)
    assert not price.more(Load(150, 70), usual)
    for _ in range(300):
        load = Load(draw.randrange(80, 120), draw.randrange(20, 60))
        times = 3 + 0.01 * (load.experts - 100) + 0.03 * (load.missing - 40) + draw.gauss(0, 0.1)
        price.note(load, times, usual, 3)
    assert price.more(Load(110, 60), usual) == pytest.approx(0.7, abs=0.15)
    price.restart()
    for _ in range(300):  # what has nothing to do with them
        price.note(Load(draw.randrange(80, 120), draw.randrange(20, 60)), draw.gauss(3, 0.3), usual, 3)
    assert abs(price.more(Load(110, 60), usual)) < 0.15


def written(seed: int, tells: bool, share: float = 0.9) -> float:
    """Tokens a second where every other guess needs few experts that are missing, and the others many."""
    draw, gate, spent, tokens = random.Random(seed), DraftGate(), 0.0, 0
    while tokens < 600:
        missing = draw.choice([2, 30])
        loads = [Load(24, 4), *(Load(24 + 8 * n, 4 + missing * n) for n in range(1, 9))]
        count = gate.choose(40, 8, loads if tells else ()).guesses
        right = next((n for n in range(count) if draw.random() >= share), count)
        ms = (1 + 0.1 * count + 0.04 * (loads[count].missing - 4)) * draw.uniform(0.9, 1.1)
        gate.judged(40, right if count else int(draw.random() < share), min(count, right + 1) or 1)
        gate.took(count, right, ms, 0.0, loads[count] if tells else None)
        spent, tokens = spent + ms, tokens + 1 + right
    return tokens / spent


def test_a_gate_that_is_told_the_experts_is_faster() -> None:
    told, untold = (fmean(written(seed, tells) for seed in range(5)) for tells in (True, False))
    assert told > 1.15 * untold
    assert told > 1.0  # of one token a pass


def test_what_is_told_wrongly_costs_little() -> None:
    speeds = []
    for tells in (True, False):
        draw, gate, spent, tokens = random.Random(5), DraftGate(), 0.0, 0
        while tokens < 1500:
            loads = [Load(24, draw.randrange(20)), *(Load(24 + 8 * n, draw.randrange(60)) for n in range(1, 9))]
            count = gate.choose(40, 8, loads if tells else ()).guesses
            right = next((n for n in range(count) if draw.random() >= 0.8), count)
            ms = (1 + 0.3 * count) * draw.uniform(0.7, 1.3)
            gate.judged(40, right if count else int(draw.random() < 0.8), min(count, right + 1) or 1)
            gate.took(count, right, ms, 0.0, loads[count] if tells else None)
            spent, tokens = spent + ms, tokens + 1 + right
        speeds.append(tokens / spent)
    assert speeds[0] > 0.95 * speeds[1]


def test_a_dear_first_pass_is_not_tried() -> None:
    """What a missing expert costs is known from tokens alone."""
    gate, draw = DraftGate(), random.Random(1)
    for _ in range(20):
        missing = draw.randrange(12)
        gate.took(0, 0, 10 + 2.0 * missing, 0.0, Load(24, missing))
    for _ in range(9):
        gate.judged(40, 1, 1)
    cheap = [Load(24 + 4 * n, 6) for n in range(9)]
    dear = [Load(24 + 12 * n, 6 + 12 * n) for n in range(9)]
    assert gate.choose(40, 8, cheap).guesses and gate.choose(40, 8).guesses
    assert not gate.choose(40, 8, dear).guesses
