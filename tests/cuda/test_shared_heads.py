"""Prompts of models whose heads share keys and values, on GPUs without flash attention: torch's other fused kernels
get as many heads of keys and values as of queries, as they know no groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.hf import decode_attention
from core.hf.decode_attention import DecodeAttention
from core.settings.sampling import Sampling
from tests.cuda.conftest import engine_on
from tests.fake_cuda import FakeCuda

SETTINGS = {"budget": "all", "predictor": "none"}


@pytest.mark.parametrize("flash", [False, True])
def test_torch_gets_what_its_fused_kernels_compute(
    flash: bool, model: Path, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and a token after it."""
    calls = set[tuple[int, int, int, bool]]()
    own = torch.nn.functional.scaled_dot_product_attention

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        if more.get("attn_mask") is None:
            calls.add((q.shape[1], q.shape[2], k.shape[1], bool(more.get("enable_gqa"))))
        return own(q, k, v, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: flash)
    with engine_on(model, SETTINGS) as engine:
        heads, shared = engine.model.config.num_attention_heads, engine.model.config.num_key_value_heads
        calls.clear()
        list(engine.generate("hello", Sampling(temperature=0.0, max_new_tokens=2)))
    assert heads > shared
    prompt = {one for one in calls if one[1] > 1 and one[1] != heads // shared}
    tokens = calls - prompt
    if flash:
        assert {(one[0], one[2:]) for one in calls} == {(heads, (shared, True))} and tokens and prompt
    else:
        assert {(one[0], one[2:]) for one in prompt} == {(heads, (heads, False))}
        assert tokens == {(shared, heads // shared, shared, False)}


@pytest.mark.parametrize("rows", [1, 7])
def test_the_results_are_the_formulas(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, heads, count, 16) for heads, count in ((8, rows), (2, 7), (2, 7)))
    attention, module = DecodeAttention(), SimpleNamespace(num_key_value_groups=4, is_causal=True)
    wanted, _ = attention.attend(module, q, k, v, None, scaling=0.25)
    monkeypatch.setattr(decode_attention, "_knows_groups", lambda *given: False)
    got, _ = attention.attend(module, q, k, v, None, scaling=0.25)
    assert got.shape == wanted.shape == (1, rows, 8, 16)
    torch.testing.assert_close(got, wanted)
