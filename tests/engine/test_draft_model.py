"""A small dense model that guesses tokens: no bit of an answer depends on it, and what it guesses is what it would of
the text alone, however much of that it had before."""

import gc
import json
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.capacity.plan import plan
from core.engine import Engine, loading, pass_wiring
from core.engine.drafter import HEAD_MATCHED
from core.errors import ModelError, SettingError
from core.hf.draft import LEAST, check_draft
from core.hf.skeleton import load_skeleton
from core.runtime import draft_model
from core.runtime.draft_model import FEW, DraftModel
from core.runtime.program.row_steps import ROWS
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.engine.drafted import HOW, IDS, TOKENS, Answer, guessing
from tests.loaded import loaded
from tests.mtp_checkpoint import dense
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
LONG = Ids([*IDS.ids * 20, 9])  # of several pieces


@pytest.fixture(scope="module")
def drafting(large: Path, small: Path) -> Iterator[Engine]:
    with loaded(large, {"budget": "50%", "drafts": "model"}, draft=small, **HOW) as engine:
        yield engine


@pytest.fixture
def engine(drafting: Engine) -> Iterator[Engine]:
    yield drafting
    guessing(drafting, None)


def counted(engine: Engine, prompt: Ids = IDS, **how: Any) -> tuple[Answer, float, float]:
    found = Answer(engine, Sampling(max_new_tokens=TOKENS, **how), prompt)
    return found, found.stats.more["drafted"], found.stats.more["accepted"]


def test_a_cancelled_answer_does_not_wait_for_reading(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    guessing(engine, None)
    wanted = Answer(engine, Sampling(max_new_tokens=TOKENS), LONG).tokens
    guessing(engine, 3, "model")
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
    guessing(engine, 3, "model")
    engine.parts.drafter.model_gate.restart()
    found, _, _ = counted(engine, LONG)
    first, *others = [step for step in found.decode if step.drafted]
    assert all(0 < step.draft_ms < step.total_ms for step in (first, *others))
    taken = engine.parts.drafter.model_gate._times
    assert found.steps[0].phase == "prefill" and not found.steps[0].draft_ms
    assert sum(map(len, taken.values())) <= len(others) + 1


def test_a_model_that_is_not_worth_it_is_not_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which it is known from the load that its guesses take longer than tokens, or that reading does."""
    guessing(engine, 0, "model")
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


def spec_of(large: Path, draft: Path, **how: Any) -> LoadSpec:
    return LoadSpec.checked(str(large), Settings({"budget": "50%"}), draft=str(draft), **HOW | how)


def test_other_tokens_are_refused_before_a_weight_is_read(
    large: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_skeleton", lambda *args, **how: pytest.fail("weights are read"))
    other = dense(tmp_path)
    stated = json.loads((other / "tokenizer.json").read_text())
    vocab = stated["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError, match="has other tokens than the model: 'a' is number"):
        Engine.load(spec_of(large, other))
    (other / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        Engine.load(spec_of(large, other))


def test_a_mark_that_one_of_the_two_lacks_is_none(large: Path, small: Path, tmp_path: Path) -> None:
    """Added tokens, as those of one generation of a family and the next."""
    other = dense(tmp_path)
    tokenizer = loading.load_tokenizer(other)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.save_pretrained(other)
    with loaded(large, {"budget": "50%", "drafts": "model"}, draft=other, **HOW) as engine:
        guessing(engine, 3, "model")
        assert counted(engine)[1]


@pytest.mark.parametrize(
    ("arch", "changed", "why"),
    [
        ("qwen3_moe", {}, "Mixture-of-Experts"),
        ("mamba", {}, "keeps states"),
        ("qwen3", {"max_position_embeddings": LEAST - 1}, "sees no more than 127 tokens"),
        ("mistral", {"sliding_window": 64}, "sees no more than 63 tokens"),
        ("t5", {}, "t5"),
    ],
)
def test_what_cannot_guess_is_told(arch: str, changed: dict[str, Any], why: str, large: Path, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    if arch == "t5":
        (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
        (tmp_path / "model.safetensors").write_bytes((large / "model.safetensors").read_bytes())
    else:
        make_checkpoint(arch, tmp_path, **changed)
    with pytest.raises(ModelError, match=f"draft model cannot be used: .*{why}"):
        plan(spec_of(large, tmp_path))


def test_files_are_read_by_the_same_rules(large: Path, small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="draft model cannot be used: There is no model at"):
        plan(spec_of(large, tmp_path / "none"))
    config = json.loads((small / "config.json").read_text())
    for name, text, why in (
        ("pytorch_model.bin", config, "Python pickles"),
        ("model.safetensors", config | {"quantization_config": {"quant_method": "gptq"}}, "only MoE models are"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes((small / "model.safetensors").read_bytes())
        (folder / "config.json").write_text(json.dumps(text))
        with pytest.raises(ModelError, match=f"draft model cannot be used: .*{why}"):
            plan(spec_of(large, folder))
    with pytest.raises(SettingError, match="is not a path"):
        LoadSpec.checked(str(large), draft="a\0b")
    assert LoadSpec.checked(str(large), draft=" ").draft == ""


def test_where_nothing_verifies_guesses_it_is_refused(large: Path, small: Path) -> None:
    with pytest.raises(ModelError, match="fast arithmetic on a CPU alone"):
        plan(spec_of(large, small, arithmetic="reference"))


def test_a_model_that_is_not_known_frees_it(large: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object) -> None:
        raise ModelError("its layers are not known")

    monkeypatch.setattr(pass_wiring, "bind", unknown)
    with loaded(large, {"budget": "50%", "drafts": "model"}, draft=small, **HOW) as engine:
        assert engine.parts.drafter.model is None
        assert all(one.numel() == 0 for one in engine.loaded.draft.parameters())
        assert not counted(engine)[1]
        assert any("drafts model is not used: the model is not computed by" in text for _, text in engine.frame().marks)


@pytest.mark.parametrize("sequences", [1, 3])
def test_it_is_counted(large: Path, small: Path, sequences: int) -> None:
    spec = spec_of(large, small, sequences=sequences)
    without = plan(LoadSpec.checked(str(large), spec.settings, sequences=sequences, **HOW))
    found = plan(spec)
    draft = found.draft
    assert draft is not None and draft.positions == 256 and "With the draft model" in found.note
    assert found.sizes.dense - without.sizes.dense == draft.weights
    assert found.sizes.kv - without.sizes.kv == draft.kv > 0
    assert found.bytes_min - without.bytes_min == draft.weights + draft.kv
    with loaded(large, {"budget": "50%"}, draft=small, sequences=sequences, **HOW) as engine:
        guessing(engine, 3, "model")
        parameters = {id(one): one for one in (*engine.loaded.draft.parameters(), *engine.loaded.draft.buffers())}
        assert draft.weights == sum(one.nbytes for one in parameters.values())
        model = engine.parts.drafter.model
        assert model is not None and model.bytes == draft.kv
        counted(engine)
        memory = engine.memory()
        assert memory.dense == found.sizes.dense
        assert memory.kv == engine.wiring.kv.bytes + draft.kv
        assert memory.used <= memory.budget


def test_unloading_frees_it(large: Path, small: Path) -> None:
    with loaded(large, {"budget": "50%"}, draft=small, **HOW) as engine:
        guessing(engine, 3, "model")
        counted(engine)
        model, draft = engine.parts.drafter.model, engine.loaded.draft
        assert model is not None
    assert model.bytes == 0 and all(one.numel() == 0 for one in draft.parameters())
    gone = weakref.ref(draft)
    del engine, draft, model
    gc.collect()
    assert gone() is None
