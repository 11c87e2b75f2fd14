"""The real engine on the fake GPU over random histories: every access to a slot and to a pinned row is ordered, and the
answers are those of an engine that holds everything. Planted faults show that a missing order is found.

As `long`: twenty thousand accesses to slots over predictors, policies, scopes, tiers and moving budgets.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from core.engine import Engine
from core.errors import MoestroError
from core.memory import host_memory
from core.memory.disk import HostCache
from core.memory.transfer import TransferEngine
from core.settings.sampling import Sampling
from tests.cuda.conftest import engine_on
from tests.fake_cuda import FakeCuda, installed
from tests.selection import layered

PROMPT = "hello there, how are you? " * 2
BUDGETS = ("30%", "45%", "70%", "100%")
TOKENS, LEAST, LONG = 16, 1_000, 20_000  # tokens and accesses of each of the FEW, accesses of the MANY together


class Case(NamedTuple):
    """A load, and settings to begin with."""

    eviction: str
    predictor: str
    scope: str
    host: str = "auto"  # of the pack; "" = the checkpoint
    pinned: int = 1 << 30  # bytes that the system lets be locked
    host_eviction: str = "lru"
    blocks: int = 1
    beside: bool = False

    def settings(self, budget: str) -> dict[str, object]:
        return {
            "budget": budget,
            "eviction": self.eviction,
            "predictor": self.predictor,
            "scope": self.scope,
            "host_eviction": self.host_eviction,
            **({"split": "uniform"} if self.blocks > 1 else {}),
            **({"bypass": True, "prefetch_beside": True} if self.beside else {}),
        }


FEW = (
    Case("lru", "gate", "layer", host=""),
    Case("lfu", "previous_token", "global", host="200kB"),
    Case("lru", "all_next", "layer", host="all", pinned=200 << 10),
    Case("lcp", "gate", "layer", host="", blocks=2),
    Case("lfu", "all_next", "layer", beside=True),
    Case("lru", "gate", "layer", host="200kB", pinned=100 << 10, blocks=2),
)
# of the pack ("" = the checkpoint), and bytes that the system lets be locked
TIERS = (("", 1 << 30), ("all", 200 << 10), ("200kB", 1 << 30), ("all", 1 << 30), ("200kB", 100 << 10))
MANY = tuple(
    Case(*chosen, *TIERS[(at + at // 10) % len(TIERS)])  # another tier for each time that a predictor comes
    for at, chosen in enumerate(
        itertools.product(
            ("lru", "lfu", "none"), ("none", "gate", "previous_token", "all_next", "stride"), ("layer", "global")
        )
    )
)


def played(engine: Engine, draw: random.Random, tokens: int) -> str:
    """An answer, while budget, policy, predictor and scope change and the deck looks on -> its text."""
    text = ""
    for piece in engine.generate(PROMPT, Sampling(max_new_tokens=tokens)):
        text += piece.text
        if draw.random() < 0.2:
            _change(engine, draw)
        if draw.random() < 0.2:
            engine.frame()
    engine.expert_cache.check_integrity()
    return text


def _change(engine: Engine, draw: random.Random) -> None:
    changes: dict[str, object] = {"budget": draw.choice(BUDGETS)}
    if draw.random() < 0.4:
        changes["eviction"] = draw.choice(("lru", "lfu", "none"))
    if draw.random() < 0.4:
        changes["predictor"] = draw.choice(("none", "gate", "previous_token", "all_next"))
    if draw.random() < 0.3:
        changes |= {name: draw.random() < 0.7 for name in ("bypass", "prefetch_beside")}
    if engine.spec.blocks > 1:
        changes["split.uniform.theta"] = draw.choice((0.0, 0.5, 1.0))
    if draw.random() < 0.2:
        changes["scope"] = draw.choice(("layer", "global"))
    try:
        engine.change(changes)
    except MoestroError:  # some do not go together: then nothing has changed
        pass


def run(
    case: Case, paths: tuple[Path, Path], fake: FakeCuda, tokens: int, seed: int = 0, answers: int = 1
) -> list[str]:
    """The answers of one load."""
    checkpoint, pack = paths
    choices: dict[str, object] = {"blocks": case.blocks, **({"host": case.host} if case.host else {})}
    fake.pinned.limit = case.pinned
    with engine_on(pack if case.host else checkpoint, case.settings("45%"), **choices) as engine:
        return [played(engine, random.Random(seed + at), tokens) for at in range(answers)]


@pytest.fixture
def paths(model: Path, pack: Path) -> tuple[Path, Path]:
    return model, pack


def resident(path: Path, blocks: int, tokens: int) -> str:
    """The answer of an engine that holds all experts and does nothing else."""
    with engine_on(path, {"budget": "all"}, blocks=blocks) as engine:
        return "".join(p.text for p in engine.generate(PROMPT, Sampling(max_new_tokens=tokens)))


@pytest.fixture(scope="module")
def wanted() -> dict[tuple[Path, int], str]:
    """Answers of such engines, as they become known."""
    return {}


@pytest.mark.parametrize(
    "case",
    layered(FEW, quick=lambda case: case.beside),
    ids=lambda case: f"{case.predictor}-{case.host or 'checkpoint'}-{case.blocks}",
)
def test_no_access_races_and_no_answer_changes(
    case: Case, paths: tuple[Path, Path], wanted: dict[tuple[Path, int], str], fake_cuda: FakeCuda
) -> None:
    (text,) = run(case, paths, fake_cuda, tokens=TOKENS)
    key = paths[bool(case.host)], case.blocks
    if key not in wanted:
        wanted[key] = resident(*key, tokens=TOKENS)
    assert text == wanted[key]
    print(f"{fake_cuda.accesses} accesses to slots, {len(fake_cuda.races.found)} races")
    assert fake_cuda.accesses > LEAST and fake_cuda.races.counts["row"] > 10


@pytest.mark.long(5)
def test_twenty_thousand_accesses_to_slots(paths: tuple[Path, Path]) -> None:
    accesses, seed, cases = 0, 0, itertools.cycle(MANY)
    while accesses < LONG or seed < len(MANY):
        with installed(FakeCuda(seed=seed)) as fake:
            case = next(cases)
            run(case, paths, fake, tokens=40, seed=seed, answers=2)
            assert not fake.races.found, (case, fake.races.found[:3])
            accesses, seed = accesses + fake.accesses, seed + 1
    print(f"{accesses} accesses to slots in {seed} loads, 0 races")
    assert accesses >= LONG


# ---------------------------------------------------------------------------------------------------- planted faults


def no_fence(patch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    """Copies do not wait for what still reads the slot."""
    patch.setattr(TransferEngine, "fence", lambda self: fake.functions()["Event"]())


def no_wait(patch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    """Computing does not wait for the copy."""
    patch.setattr(fake.clocks.default, "wait_event", lambda event: None)


def row_reused(patch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    """A row of the host cache is overwritten while it is copied from: where the one copied last may leave."""

    class Forgets(dict[int, Any]):
        def pop(self, *_: object) -> None:
            return None

    real = HostCache.__init__

    def init(self: HostCache, *args: Any) -> None:
        real(self, *args)
        self._placed = Forgets()

    patch.setattr(HostCache, "__init__", init)


def staging_reused(patch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    """The only staging row is overwritten while it is copied from."""
    patch.setattr(host_memory, "STAGING", 1)

    class Forgets(host_memory.SimpleQueue):  # type: ignore[misc, name-defined]
        def put(self, item: Any) -> None:
            super().put((item[0], None))

    patch.setattr(host_memory, "SimpleQueue", Forgets)


PLANTED: tuple[tuple[Callable[[pytest.MonkeyPatch, FakeCuda], None], Case], ...] = (
    (no_fence, FEW[0]),
    (no_wait, FEW[0]),
    (row_reused, Case("lru", "none", "layer", host="100kB", host_eviction="random")),
    (staging_reused, FEW[2]),
)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as found:
        yield found


@pytest.mark.long(0.1)  # it tries the fake GPU; the test above guards the engine
@pytest.mark.parametrize(
    ("fault", "case"),
    layered(PLANTED, quick=lambda case: case[0] is no_wait),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch, FakeCuda], None],
    case: Case,
    paths: tuple[Path, Path],
    patch: pytest.MonkeyPatch,
) -> None:
    with installed(FakeCuda()) as fake:
        fault(patch, fake)
        run(case, paths, fake, tokens=8)
    assert fake.races.found
