"""The quality meter on CUDA: rows leave the device without holding it up, and the figures are transformers'."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.engine.quality.sample import Landing, Sample
from tests.checkpoints import make_checkpoint
from tests.engine.quality.conftest import DROPPING, PROMPT, by_hand, kept_of, say
from tests.loaded import loaded
from tests.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@torch.inference_mode()
def test_rows_arrive_as_they_were() -> None:
    kept, device = Sample(Landing()), torch.device("cuda")
    rows = torch.randn(300, 5000, device=device, dtype=torch.bfloat16)
    for token in range(300):
        scratch = rows[token].clone()
        kept.keep(token, scratch, 1.0)
        scratch.zero_()  # in the same stream: after the copy
    found = kept.finish()
    assert len(found) > 60
    assert all(row.device.type == "cpu" and torch.equal(row, rows[token].cpu()) for token, row in found.items())


def test_figures_are_those_of_transformers(tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "m"))
    with loaded(path, DROPPING, dtype="float32", device="cuda", context=256) as engine:
        said, _, _ = say(engine)
        lossy, before = kept_of(engine), engine.expert_cache.places()
        quality = engine.audit()
        assert engine.expert_cache.places() == before
        engine.expert_cache.check_integrity()
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        kl, agreement, perplexity = by_hand(reference, engine.prompt.tokens(PROMPT), said, lossy)
        assert quality.kl == pytest.approx(kl, abs=1e-4)
        assert quality.agreement == pytest.approx(agreement)
        assert quality.perplexity == pytest.approx(perplexity, rel=1e-3)
        memory = engine.memory()
        assert memory.peak <= memory.budget
