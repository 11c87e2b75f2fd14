"""Of models of text and images only their text is loaded, exactly; chosen rows keep their bits."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from app.services.candidates import look
from core.capacity.plan import plan
from core.engine import Engine
from core.errors import ModelError
from core.hf.cached_pass import CACHE, ROWS, cached_pass, with_chosen_rows
from core.hf.outline import outline
from core.hf.quantization import quantization_settings
from core.hf.skeleton import load_skeleton, meta_skeleton
from core.importing.job import open_job
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.system.text_config import text_config
from tests.architectures.trial import known, random_model, save, try_type
from tests.logged import Logged
from tests.selection import layered

COMPOSITE = ["qwen3_5_moe", "qwen4_exp", "gemma4", "glm4v_moe", "qwen3_vl_moe", "kimi_k25"]
QUICK = ("kimi_k25",)  # the others nest as it does, or as those of a test below


def test_the_text_config_is_found_wherever_it_is_nested() -> None:
    inner: dict[str, Any] = {"vocab_size": 8, "quantization_config": {"quant_method": "fp8"}}
    assert text_config(inner) is inner
    assert text_config({"text_config": inner}) is inner
    assert text_config({"thinker_config": {"text_config": inner, "audio_config": {}}}) is inner
    assert text_config({"text_config": None, "vocab_size": 9}) == {"text_config": None, "vocab_size": 9}
    assert quantization_settings(Path(), {"thinker_config": {"text_config": inner}}) == {"quant_method": "fp8"}


@pytest.mark.parametrize("model_type", layered(COMPOSITE, quick=lambda name: name in QUICK))
def test_a_composite_model_is_exact(model_type: str) -> None:
    if not known(model_type):
        pytest.skip(f"the installed transformers has no {model_type}")
    outcome = try_type(model_type, steps=6)
    assert (outcome.verdict, outcome.off) == ("exact", 0.0), outcome


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model("qwen3_vl_moe"), tmp_path_factory.mktemp("vision"))


@pytest.mark.long(0.1)
def test_parts_that_are_not_text_are_neither_read_nor_counted_and_that_is_said(vision: Path, caplog: Logged) -> None:
    skeleton = load_skeleton(vision)
    assert skeleton.model.visual is None
    shape = outline(meta_skeleton(vision))
    assert shape.left_out == ("visual",)
    assert shape.dense_bytes == sum(t.nbytes for t in (*skeleton.parameters(), *skeleton.buffers()))
    spec = LoadSpec.checked(str(vision), Settings({"budget": "all"}))
    assert plan(spec).note == "Text only: visual of this model is not loaded."
    with caplog.at_level(logging.WARNING, "moestro.load"):
        Engine.load(spec).unload()
    assert [r.getMessage() for r in caplog.records] == [plan(spec).note]


def test_the_library_and_an_import_see_the_text_model(vision: Path) -> None:
    entry = look(vision, "folder")
    assert entry is not None and (entry.experts, entry.top_k, entry.problem) == (8, 4, "")
    with open_job(vision, "vision", "auto", 1) as job:
        assert job.layers == 4
        assert not any("visual" in name for name in job.dense)
        assert any(name.endswith("embed_tokens.weight") for name in job.dense)


def test_a_cache_of_its_own_is_refused_in_one_whole_sentence(tmp_path: Path) -> None:
    path = save(random_model("minimax"), tmp_path)
    with pytest.raises(ModelError) as caught:
        outline(meta_skeleton(path))
    assert str(caught.value) == (
        "'minimax' does not work the way Moestro needs: transformers' own code for it stops with \"MiniMax uses cache "
        f'of its own and is not compatible with `{CACHE}` of type DynamicCache". Choose another model.'
    )


@torch.inference_mode()
def test_logits_of_chosen_rows() -> None:
    model = random_model("qwen3_omni_moe_thinker").eval()
    ids, rows = torch.tensor([[5, 9, 200, 17]]), torch.tensor([0, 2])
    states = []
    model.lm_head.register_forward_hook(lambda head, given, logits: states.append(given[0]))

    def logits(**kept: object) -> torch.Tensor:
        found: torch.Tensor = cached_pass(model, ids, DynamicCache(config=model.config), **kept).logits[0]
        return found

    whole = logits()
    assert len(logits(**{ROWS: 1})) == 4, "transformers' own forward takes no notice of it"
    with_chosen_rows(model)
    assert torch.equal(logits(**{ROWS: 1}), model.lm_head(states[0][:, -1:])[0])
    assert torch.equal(logits(**{ROWS: rows}), model.lm_head(states[0][:, rows])[0])
    assert torch.equal(logits(), whole)


def test_a_model_that_has_the_argument_stays_as_it_is() -> None:
    model = random_model("qwen3_moe")
    with_chosen_rows(model)
    assert "forward" not in vars(model)


def test_without_a_module_that_computes_logits_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("qwen3_omni_moe_thinker")
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    with pytest.raises(ModelError, match="computes the logits of all tokens of a prompt, not of chosen ones"):
        with_chosen_rows(model)
