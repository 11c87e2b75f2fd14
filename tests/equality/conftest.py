"""One tiny checkpoint and its reference logits per architecture, made once."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.equality.passes import PROMPT, STEPS, plain_transformers, run
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

EVERYWHERE = ("qwen3_moe", "gpt_oss", "deepseek_v3")  # plain; biases and a transposed layout; shared experts


@dataclass(frozen=True)
class Reference:
    """A checkpoint on disk and what plain transformers (grouped_mm, fp32) says: logits [prompt + STEPS, V]."""

    arch: str
    path: Path
    logits: torch.Tensor
    tokens: list[int]


@pytest.fixture(scope="session")
def references() -> dict[str, Reference]:
    """Those that were made: parameters that come in tuples take a fixture down after each."""
    return {}


@pytest.fixture(scope="module", params=layered(list(ARCHITECTURES), quick=lambda arch: arch in EVERYWHERE))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, references: dict[str, Reference]
) -> Reference:
    if request.param not in references:
        torch.set_num_threads(1)
        path = tmp_path_factory.mktemp(request.param)
        save_tokenizer(make_checkpoint(request.param, path))
        model = plain_transformers(path, torch.float32)
        logits, tokens = run(model, DynamicCache(config=model.config), lambda step: None)
        assert logits.shape[0] == len(PROMPT) + STEPS
        references[request.param] = Reference(request.param, path, logits, tokens)
    return references[request.param]
