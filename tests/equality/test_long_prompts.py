"""A long prompt in one pass, in a cache that holds half of what it needs, summed a part at a time: the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.equality.passes import plain_transformers
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

TOKENS = 700
QUICK = (("qwen3_moe", "bfloat16"),)
CASES = (*QUICK, ("gpt_oss", "float32"), ("mixtral", "bfloat16"), ("phimoe", "float32"), ("jamba", "bfloat16"))


@pytest.mark.parametrize(("arch", "dtype"), layered(CASES, quick=lambda case: case in QUICK))
def test_a_long_prompt_is_identical(arch: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    for module in ("core.runtime.expert_math", "core.capacity.sizes"):
        monkeypatch.setattr(f"{module}.AT_ONCE", (10_000, 10_000))
    monkeypatch.setattr("core.capacity.sizes.WORTH_SHARED", 1e6)  # of these tiny experts
    path = save_tokenizer(make_checkpoint(arch, tmp_path / arch, max_position_embeddings=1024))
    ids = torch.randint(3, 250, (TOKENS,), generator=torch.Generator().manual_seed(2)).tolist()
    plain = plain_transformers(path, getattr(torch, dtype))
    cache = DynamicCache(config=plain.config)
    with torch.inference_mode():
        want = cached_pass(plain, torch.tensor([ids]), cache, logits_to_keep=1).logits[0, -1]
    engine = Engine.load(LoadSpec.checked(str(path), Settings({"budget": "50%"}), dtype=dtype, context=800))
    found: list[torch.Tensor] = []

    def draw(_: Sequence[int], logits: torch.Tensor) -> int:
        found.append(logits[0].clone())
        return int(logits[0].argmax())

    try:
        assert engine.sizes.chunk >= TOKENS
        pieces = list(engine.generate(Ids(ids), Sampling(max_new_tokens=1), draw=draw))
        (step,) = [piece.step for piece in pieces if piece.kind == "prefill" and piece.step is not None]
        assert torch.equal(found[0], want)
        assert step.hits < step.requests
        assert step.demand_bytes == engine.sizes.blob * (step.requests - step.hits)
        engine.expert_cache.check_integrity()
    finally:
        engine.unload()
