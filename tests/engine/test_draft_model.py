"""A small dense model that guesses tokens: no bit of an answer depends on it, and what it guesses is what it would of
the text alone, however much of that it had before."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.engine.drafter import HEAD_MATCHED
from core.hf.draft import check_draft
from core.hf.skeleton import load_skeleton
from core.importing import import_model
from core.runtime import draft_model
from core.runtime.draft_model import FEW, DraftModel
from core.runtime.program.row_steps import ROWS
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.engine.drafted import TOKENS, Answer, bits
from tests.loaded import loaded
from tests.mtp_checkpoint import counting
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
HOW: dict[str, Any] = dict(arithmetic="fast", context=256)
PROMPT = Ids([5, 9, 200, 31, 31, 7, 8, 9])
LONG = Ids([*PROMPT.ids * 20, 9])  # of several pieces


@pytest.fixture(scope="module")
def drafting(large: Path, small: Path) -> Iterator[Engine]:
    with loaded(large, {"budget": "50%", "drafts": "model"}, draft=small, **HOW) as engine:
        yield engine


@pytest.fixture
def engine(drafting: Engine) -> Iterator[Engine]:
    yield drafting
    guessing(drafting, None)


def guessing(engine: Engine, count: int | None, source: str = "model") -> None:
    """As many tokens always, or as the gate says, or None: none at all."""
    engine.change({"drafts": "off" if count is None else source})
    engine.parts.drafter.model_gate.fixed = count or None


def counted(engine: Engine, prompt: Ids = PROMPT, **how: Any) -> tuple[Answer, float, float]:
    """An answer, and how many guesses there were and were right."""
    found = Answer(engine, Sampling(max_new_tokens=TOKENS, **how), prompt)
    return found, found.stats.more["drafted"], found.stats.more["accepted"]


@pytest.mark.parametrize("arch", layered(["qwen3_moe", "mixtral", "gpt_oss"], quick=lambda arch: arch == "qwen3_moe"))
def test_no_bit_depends_on_the_draft_model(arch: str, small: Path, tmp_path: Path) -> None:
    model = counting(save_tokenizer(make_checkpoint(arch, tmp_path / "model")), 0.5)
    pack = import_model(str(model), tmp_path / "pack")
    with loaded(pack, {"budget": "50%"}, draft=small, **HOW) as engine:
        wanted, logits = bits(engine, PROMPT)
        for count in (0, 3, 8):
            guessing(engine, count)
            tokens, found = bits(engine, PROMPT)
            assert tokens == wanted
            assert torch.equal(found, logits)
        _, drafted, accepted = counted(engine)
        often = 0 if arch == "gpt_oss" else TOKENS // 4  # whose experts add biases, so that it hardly counts
        assert often < accepted < drafted, "it is often right, and not always"


def test_with_rounded_layers(large: Path, small: Path, tmp_path: Path) -> None:
    """Its own are rounded as the model's are."""
    how = HOW | {"dense": "int8", "dtype": "bfloat16"}
    with loaded(large, {"budget": "50%"}, draft=small, **how) as engine:
        wanted = Answer(engine, Sampling(max_new_tokens=TOKENS), PROMPT).tokens
        guessing(engine, 3)
        found, _, accepted = counted(engine)
        assert found.tokens == wanted and accepted > 0
        draft = engine.loaded.plan.draft
        assert draft is not None
        assert draft.weights < check_draft(small, torch.bfloat16).weights
        assert any(type(one).__name__ == "QuantizedLinear" for one in engine.loaded.draft.modules())


# ---------------------------------------------------------------------- what may guess


def test_a_cancelled_answer_does_not_wait_for_reading(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    guessing(engine, None)
    wanted = Answer(engine, Sampling(max_new_tokens=TOKENS), LONG).tokens
    guessing(engine, 3)
    cancel, pieces, read = threading.Event(), list[int](), DraftModel.read

    def reading(self: DraftModel, ids: Sequence[int]) -> None:
        pieces.append(len(ids))
        cancel.set()
        read(self, ids)

    with monkeypatch.context() as patched:
        patched.setattr(DraftModel, "read", reading)
        said = list(engine.generate(LONG, Sampling(max_new_tokens=TOKENS), cancel, reuse=True))
    assert len(pieces) == 1 and said[-1].stats is not None and said[-1].stats.reason == "cancelled"
    after = Answer(engine, Sampling(max_new_tokens=TOKENS), LONG, reuse=True)
    assert after.tokens == wanted and after.stats.cached_tokens and after.stats.more["accepted"]


def test_reading_is_told_and_priced_apart(engine: Engine) -> None:
    guessing(engine, 3)
    engine.parts.drafter.model_gate.restart()
    found, _, _ = counted(engine, LONG)
    first, *others = [step for step in found.decode if step.drafted]
    assert all(0 < step.draft_ms < step.total_ms for step in (first, *others))
    taken = engine.parts.drafter.model_gate._times
    assert found.steps[0].phase == "prefill" and not found.steps[0].draft_ms
    assert sum(map(len, taken.values())) <= len(others) + 1


def test_a_model_that_is_not_worth_it_is_not_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which it is known from the load that its guesses take longer than tokens, or that reading does."""
    guessing(engine, 0)
    gate = engine.parts.drafter.model_gate
    gate.restart()
    for _ in range(4):
        gate.took(0, 0, 10.0)
    monkeypatch.setattr(gate, "_guess_ms", 10.0)
    assert not gate.choose(HEAD_MATCHED, 8).guesses
    monkeypatch.setattr(gate, "_guess_ms", 0.1)
    worth = gate.choose(HEAD_MATCHED, 8)
    won = 64 * 10.0 * (1 - 1 / worth.faster)
    assert worth.guesses and gate.wins_back(worth, 0.9 * won, 64)
    assert not gate.wins_back(worth, 1.1 * won, 64)
    gate.took(worth.guesses, 0, 15.0, 0.9 * won)
    assert not gate.wins_back(worth, 1.0, 64), "what was read has not been won back"
    assert gate.wins_back(worth, 0.0, 64)
    gate.restart()


@torch.inference_mode()
def likeliest(model: Any, text: Sequence[int], vocab: int, count: int) -> list[int]:
    """The greedy continuation among the first `vocab` tokens, by whole passes."""
    ids = list(text)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1, :vocab].argmax()))
    return ids[len(text) :]


def test_what_it_guesses_is_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it had of others: texts that go on, that begin alike, and that are longer than it sees."""
    path, kept = save_tokenizer(make_checkpoint("qwen3", tmp_path)), 0
    draft = check_draft(path, torch.float32)
    model = load_skeleton(path, dense=True)
    own = DraftModel(model, draft, 200, 1, False)
    assert draft.positions == 512 and own.bytes == draft.kv
    monkeypatch.setattr(own, "_room", 64)
    monkeypatch.setattr(draft_model, "MOST", 24)
    draw, ids, guesses = random.Random(1), [1], list[int]()
    for _ in range(40):
        if draw.random() < 0.2:  # another text, which may begin alike
            ids = ids[: draw.randrange(1, len(ids) + 1)]
        ids = [*ids, *guesses[: draw.randint(0, 3)], *[draw.randrange(200) for _ in range(draw.randint(1, 4))]]
        had, before = list(own._text), own._first
        while first := own.first_ms(ids):
            assert first > 0
            own.read(ids)
        count = draw.randint(1, ROWS - 1)
        guesses = own.guess(ids, count)
        seen = ids[own._first :]
        assert own._text == [*seen, *guesses[:-1]] and len(own._text) <= 64
        assert guesses == likeliest(model, seen, 200, count)
        kept += own._first == before and had[: len(seen) - FEW] == seen[: len(had[: len(seen) - FEW])]
    assert kept > 12, "most of a text is not read again"
    assert own.first_ms([*ids, 256]) is None, "a token that it does not know"
