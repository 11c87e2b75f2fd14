"""The head that guesses tokens (answers with it: test_drafts.py): its passes are the modules', its experts are counted
apart, it rests where it is not worth it, and what it keeps of a text is what its own passes would."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.capacity.plan import plan
from core.engine import Engine
from core.engine.draft_lookup import Guess, Lookup
from core.engine.drafter import HEAD_MATCHED
from core.runtime import draft_head
from core.runtime.draft_head import FEW, MOST, DraftHead
from core.runtime.head_passes import Guessed, ModulePasses
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.engine.drafted import HOW, IDS, TOKENS, Answer, guessing
from tests.loaded import loaded
from tests.mtp_checkpoint import dense, predictable, with_head

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = predictable("glm4_moe", tmp_path_factory.mktemp("model"), 0.5)
    small = dense(tmp_path_factory.mktemp("dense"))
    with loaded(model, {"budget": "50%", "drafts": "auto"}, sequences=3, draft=small, **HOW) as engine:
        yield engine


@pytest.fixture
def engine(drafting: Engine) -> Iterator[Engine]:
    yield drafting
    guessing(drafting, None)


@torch.inference_mode()
def test_native_steps_are_the_modules(engine: Engine) -> None:
    """Over a text whose beginning it does not see, in pieces, and after what was cut away."""
    head, own = engine.parts.drafter.head, engine.loaded.head
    assert isinstance(head, DraftHead) and own is not None
    draw, at, kept = torch.Generator().manual_seed(1), 5, 0
    modules, width = ModulePasses(own, 128), own.config.hidden_size
    head.forget()
    for rows, cut in ((9, 0), (1, 1), (1, 0), (40, 33), (2, 0), (1, 0)):
        hidden = torch.randn(rows, width, generator=draw)
        tokens = torch.randint(256, (rows,), generator=draw).tolist()
        steps, wanted = (head._computed(one, own.normed(hidden), tokens, at) for one in (head.passes, modules))
        for found, other in zip(steps, wanted, strict=True):
            torch.testing.assert_close(found, other, atol=2e-4, rtol=2e-4)
        at, kept = at + rows - cut, kept + rows - cut
        for one in (head.passes, modules):
            one.cut(kept)
    head.forget()


def test_its_experts_are_counted_apart(engine: Engine) -> None:
    """Records, heat map and hit rates are those of the model's own layers."""
    guessing(engine, 4, "mtp")
    found = Answer(engine, Sampling(max_new_tokens=TOKENS), IDS)
    layers, shape = engine.shape.layers, engine.shape
    assert (shape.heads, shape.cached_layers, shape.total) == (1, layers + 1, (layers + 1) * shape.experts)
    assert all(step.layer.max() < layers for step in found.steps)
    assert all(copy.layer < layers for step in found.steps for copy in step.transfers)
    assert engine.frame().place.shape == (layers, shape.experts)
    for step in found.decode:
        assert step.draft_requests >= step.draft_hits
        assert step.draft_requests >= shape.top_k * min(1, step.drafted)
        assert 0 < step.draft_ms < step.total_ms or not step.drafted
    more = found.stats.more
    missed = more["draft_requests"] - more["draft_hits"]
    assert missed > 0 and more["draft_bytes"] == missed * engine.sizes.blob
    assert found.steps[0].phase == "prefill" and found.steps[0].draft_requests, "the prompt is read by the head, too"
    guessing(engine, None)
    plain = Answer(engine, Sampling(max_new_tokens=TOKENS), IDS)
    assert not any(plain.stats.more[name] for name in more if name.startswith("draft"))


def test_the_better_source_is_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are guesses of both kinds, and the gates say that one is worth more, it is asked."""
    drafter, prompt = engine.parts.drafter, Ids([7, 8, 9, 60, 61, 62] * 6)
    monkeypatch.setattr(Lookup, "guess", lambda self, ids, most: Guess([7, 8][:most], 4) if most > 0 else None)
    for ahead, other in ((drafter.gate, drafter.head_gate), (drafter.head_gate, drafter.gate)):
        engine.change({"drafts": "auto"})
        ahead.fixed, other.fixed, drafter.model_gate.fixed = 2, None, 0
        more = Answer(engine, Sampling(max_new_tokens=9), prompt).stats.more
        assert more["drafted"]
        guesses_of_head = more["draft_requests"] > 2 * engine.shape.experts + engine.shape.top_k
        assert guesses_of_head == (ahead is drafter.head_gate)
    drafter.gate.fixed = drafter.head_gate.fixed = None


def test_a_head_that_is_not_worth_it_rests(tmp_path: Path) -> None:
    with loaded(
        with_head("glm4_moe", tmp_path), {"budget": "50%", "drafts": "mtp"}, **HOW
    ) as engine:  # of random weights
        gate = engine.parts.drafter.head_gate
        for _ in range(8):
            gate.judged(HEAD_MATCHED, 0, 1)
        for passes in range(40):
            gate.took(0, 0, 10.0 + passes % 2)
        assert gate.choose(HEAD_MATCHED, 8).guesses == 0
        Answer(engine, Sampling(max_new_tokens=4), IDS)
        for _ in range(600):  # another text may be guessed better
            gate.took(0, 0, 10.0)
        assert gate.choose(HEAD_MATCHED, 8).guesses > 0


@pytest.mark.parametrize(
    ("how", "heads"),
    [
        ({}, 1),
        ({"arch": "qwen3_next"}, 1),
        ({"arithmetic": "reference"}, 0),
        ({"blocks": 2}, 0),
        ({"drafts": "lookup"}, 0),
        ({"drafts": "auto"}, 1),
    ],
)
def test_what_a_load_is_planned_with(how: dict[str, Any], heads: int, tmp_path: Path) -> None:
    how = {"arch": "glm4_moe", "drafts": "mtp", **how}
    model, drafts = with_head(how.pop("arch"), tmp_path), how.pop("drafts")
    without, found = (
        plan(LoadSpec.checked(str(model), Settings({"budget": "50%", "drafts": one}), **HOW | how))
        for one in ("off", drafts)
    )
    assert found.outline.heads == found.sizes.shape.heads == heads
    assert ("head that predicts further tokens" in found.note) == bool(heads)
    assert found.sizes.dense - without.sizes.dense == found.outline.head_bytes
    assert found.tier.rows - without.tier.rows == heads * found.sizes.shape.experts
    assert (found.sizes.kv > without.sizes.kv) == bool(heads)


class Kept:
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
