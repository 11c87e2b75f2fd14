"""A tiny chat model that is computed lossily, and transformers' own one beside it."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import AnswerStats, StepRecord
from tests.checkpoints import random_model
from tests.tiny_tokenizer import save_tokenizer

DROPPING = {"budget": "50%", "miss": "drop", "quality_rate": 1.0}
PROMPT = "a prompt of some length, so that it is read in several passes: " * 2


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of sixteen experts a token, whose outputs are large: leaving one out shows."""
    model, folder = random_model("qwen3_moe", num_experts=16, num_experts_per_tok=2), tmp_path_factory.mktemp("quality")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.fixture(scope="session")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def load(model: Path, **settings: object) -> Engine:
    return Engine.load(LoadSpec.checked(str(model), Settings(DROPPING | settings), context=256, threads=1))


@pytest.fixture(scope="session")
def loaded(model: Path) -> Iterator[Engine]:
    engine = load(model)
    yield engine
    engine.unload()


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    """The same one for every test, with the first settings and a meter that has kept nothing."""
    loaded.change(dict(Settings(DROPPING)))
    loaded.wiring.meter.__init__(loaded.device, loaded.expert_cache, lambda: 1.0)  # type: ignore[misc]
    return loaded


def say(engine: Engine, tokens: int = 24, prompt: str = PROMPT) -> tuple[list[int], AnswerStats, list[StepRecord]]:
    pieces = list(engine.generate(prompt, Sampling(max_new_tokens=tokens)))
    stats = pieces[-1].stats
    assert stats is not None
    said = [p.token for p in pieces if p.token is not None]
    return said, stats, [p.step for p in pieces if p.step is not None]


def kept_of(engine: Engine) -> dict[int, torch.Tensor]:
    return {token: row.clone() for token, row in engine.wiring.meter._waiting[-1].rows.items()}


@torch.inference_mode()
def by_hand(
    reference: Any, prompt: Sequence[int], said: Sequence[int], lossy: dict[int, torch.Tensor]
) -> tuple[float, float, float]:
    """KL, agreement and perplexity by transformers' model in one pass, and torch's own losses in fp64."""
    logits = reference(input_ids=torch.tensor([[*prompt, *said]])).logits[0].double()[len(prompt) - 1 :]
    exact = torch.stack([logits[token] for token in lossy])
    other = torch.stack([*lossy.values()]).double()
    kl = F.kl_div(other.log_softmax(-1), exact.log_softmax(-1), reduction="batchmean", log_target=True)
    agreement = (exact.argmax(-1) == other.argmax(-1)).double().mean()
    return float(kl), float(agreement), math.exp(F.cross_entropy(logits[: len(said)], torch.tensor(said)))
