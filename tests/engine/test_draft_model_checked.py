"""A small dense model that guesses tokens is checked before a weight is read, counted in the budget, and freed."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from core.capacity.plan import plan
from core.engine import Engine, loading, pass_wiring
from core.errors import ModelError, SettingError
from core.hf.draft import LEAST
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.system.native.compile import supported
from tests.checkpoints import make_checkpoint
from tests.engine.test_draft_model import HOW, counted, guessing
from tests.loaded import loaded
from tests.mtp_checkpoint import dense
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")


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
        guessing(engine, 3)
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
def test_a_model_that_cannot_guess_is_refused(
    arch: str, changed: dict[str, Any], why: str, large: Path, tmp_path: Path
) -> None:
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


def test_a_model_that_the_fast_arithmetic_does_not_know_frees_it(
    large: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*args: object) -> None:
        raise ModelError("its layers are not known")

    monkeypatch.setattr(pass_wiring, "bind", unknown)
    with loaded(large, {"budget": "50%", "drafts": "model"}, draft=small, **HOW) as engine:
        assert engine.parts.drafter.model is None
        assert all(one.numel() == 0 for one in engine.loaded.draft.parameters())
        assert not counted(engine)[1]
        assert any("drafts model is not used: the model is not computed by" in text for _, text in engine.frame().marks)


def test_without_one_it_says_so(large: Path) -> None:
    with loaded(large, {"budget": "50%"}, **HOW) as engine:
        engine.change({"drafts": "model"})
        assert not counted(engine)[1]
        assert any("drafts model is not used: no draft model was named" in text for _, text in engine.frame().marks)


# ---------------------------------------------------------------------- memory


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
        guessing(engine, 3)
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
        guessing(engine, 3)
        counted(engine)
        model, draft = engine.parts.drafter.model, engine.loaded.draft
        assert model is not None
    assert model.bytes == 0 and all(one.numel() == 0 for one in draft.parameters())
    gone = weakref.ref(draft)
    del engine, draft, model
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------------- reading
