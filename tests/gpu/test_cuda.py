"""The CUDA path: pinned copies on their own stream, the same tokens as transformers, bytes within the budget.

Run with `pytest -m gpu` on a machine with a GPU; elsewhere these are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.hf.quantized_linear import QuantizedLinear
from core.memory.link import measure_gbps
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.checkpoints import make_checkpoint
from tests.equality.passes import PROMPT
from tests.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("cuda_model")))


@torch.inference_mode()
def logits(model: object, cache: object, steps: int = 12) -> torch.Tensor:
    ids, out = torch.tensor([PROMPT], device=DEVICE), []
    for _ in range(steps + 1):
        last = cached_pass(model, ids, cache).logits[0]  # type: ignore[operator]
        out.append(last)
        ids = last[-1:].argmax(-1)[None]
    return torch.cat(out)


@pytest.mark.parametrize("predictor", ["none", "gate"])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "none"])
def test_logits_agree_with_transformers(model: Path, eviction: str, predictor: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="grouped_mm")
    plain = plain.to(DEVICE).eval()
    want = logits(plain, DynamicCache(config=plain.config))
    settings = Settings({"budget": "50%", "eviction": eviction, "predictor": predictor})
    engine = Engine.load(LoadSpec.checked(str(model), settings, dtype="float32", device="cuda"))
    try:
        got = logits(engine.model, engine.fresh_cache())
        engine.expert_cache.check_integrity()
        # another kernel computes the grouped product on CUDA: equal up to its rounding, not bit for bit
        assert (got - want).abs().max().item() <= 1e-4
        assert (got.argmax(-1) == want.argmax(-1)).all()
    finally:
        engine.unload()


def test_memory_stays_within_the_budget_and_figures_add_up(model: Path) -> None:
    engine = Engine.load(LoadSpec.checked(str(model), Settings({"budget": "50%"}), device="cuda"))
    try:
        pieces = list(engine.generate("hello", Sampling(max_new_tokens=32)))
        steps = [p.step for p in pieces if p.step is not None]
        assert all(s.device_bytes <= s.budget_bytes for s in steps)
        assert all(abs(s.compute_ms + s.stall_ms + s.idle_ms - s.total_ms) < 1e-6 for s in steps)
        copies = [t for s in steps for t in s.transfers]
        assert copies
        assert all(t.ended_s > t.started_s for t in copies)
        engine.change({"budget": "all"})
        list(engine.generate("hello", Sampling(max_new_tokens=8)))
        engine.expert_cache.check_integrity()
    finally:
        engine.unload()


def test_pinned_copies_have_a_speed() -> None:
    assert measure_gbps(DEVICE) > 0.5


@pytest.mark.parametrize("format", ["int4-g32", "int8-g32"])
def test_rounded_dense_layers_compute_with_what_their_codes_stand_for(model: Path, format: str) -> None:
    engine = Engine.load(
        LoadSpec.checked(str(model), Settings({"budget": "50%"}), dtype="float32", device="cuda", dense=format)
    )
    try:
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="grouped_mm")
        for name, module in engine.model.named_modules():
            if isinstance(module, QuantizedLinear):
                plain.get_submodule(name).weight.data.copy_(module.weight)
        want = logits(plain.to(DEVICE).eval(), DynamicCache(config=plain.config))
        assert (logits(engine.model, engine.fresh_cache()) - want).abs().max().item() <= 1e-3
    finally:
        engine.unload()
