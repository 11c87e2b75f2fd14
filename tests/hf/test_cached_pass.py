"""Models whose forward computes the logits of all tokens compute those of chosen ones, with the same bits."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from core.errors import ModelError
from core.hf.cached_pass import ROWS, cached_pass, with_chosen_rows
from tests.architectures.trial import random_model


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
