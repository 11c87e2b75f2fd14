"""A tiny model whose packs are tried, and an engine over one."""

from __future__ import annotations

from pathlib import Path

import torch

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer

CHAT = [{"role": "user", "content": "the cat sat on the mat and the dog"}]


def load(path: Path, budget: str = "50%", **choices: object) -> Engine:
    return Engine.load(
        LoadSpec.checked(str(path), Settings({"budget": budget, "eviction": "lru"}), context=256, **choices)
    )


def make_model(directory: Path) -> Path:
    """A checkpoint in bfloat16 with 16 experts a layer and a tokenizer."""
    return save_tokenizer(make_checkpoint("qwen3_moe", directory, dtype=torch.bfloat16, num_experts=16))
