"""Sequences computed together: each one's logits are those of transformers reading it alone, up to the order of fp32
sums, however they are grouped from pass to pass, and whatever is resident."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.runtime.batch import Batch, Share
from core.runtime.sequence_kv import SequenceKV
from core.types import Phase
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.equality.passes import plain_transformers
from tests.equality.test_logits import KNOWN, load
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

CLOSE = 5e-6  # of the largest logit: fp32 products of other numbers of rows, through three layers
LENGTHS = (24, 7, 40, 1, 13)  # longer and shorter than windows and convolutions
STEPS = 6
QUICK = ("gpt_oss", "qwen3_next")

OTHERWISE = ("deepseek_v32",)  # the positions that its indexer selects change with the pieces


@dataclass
class Alone:
    """A sequence as transformers computes it: its greedy tokens and the logits [V] before each."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.tokens


@pytest.fixture(scope="module", params=layered([*ARCHITECTURES, *KNOWN], quick=lambda arch: arch in QUICK))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tokenizer(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
@torch.inference_mode()
def alone(path: Path) -> list[Alone]:
    model, draw, found = plain_transformers(path, torch.float32), torch.Generator().manual_seed(3), list[Alone]()
    for length in LENGTHS:
        one = Alone(torch.randint(3, 250, (length,), generator=draw).tolist())
        cache, ids = DynamicCache(config=model.config), one.prompt
        for _ in range(STEPS):
            logits = cached_pass(model, torch.tensor([ids]), cache).logits[0, -1]
            one.logits.append(logits.clone())
            ids = [int(logits.argmax())]
            one.tokens += ids
        found.append(one)
    return found


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    engine = load(path, "float32", context=128, sequences=len(LENGTHS))
    yield engine
    engine.unload()


class Together:
    """Sequences that follow what was computed alone, some of them in each pass."""

    def __init__(self, engine: Engine, alone: list[Alone]) -> None:
        self._engine, self.alone = engine, alone
        self.kvs: list[SequenceKV] = []
        for one in alone:
            kv = engine.wiring.pool.take(len(one.ids))
            assert kv is not None
            self.kvs.append(kv)

    def compute(self, phase: Phase, work: dict[int, int]) -> None:
        """The next tokens, so many of each sequence, in one pass; their logits are compared."""
        shares = []
        for at, count in work.items():
            kv = self.kvs[at]
            shares.append(Share(self.alone[at].ids[kv.length : kv.length + count], kv, at + 1))
        batch = Batch(phase, tuple(shares))
        pipeline = self._engine.wiring.measuring
        pipeline.begin(batch)
        for at, logits in zip(work, pipeline.forward(batch).split(1), strict=True):
            self._compare(at, logits[0])

    def _compare(self, at: int, logits: torch.Tensor) -> None:
        one, step = self.alone[at], self.kvs[at].length - len(self.alone[at].prompt)
        if step >= 0:
            wanted = one.logits[step]
            assert float((logits - wanted).abs().max() / wanted.abs().max()) < CLOSE, (at, step)

    def left(self, at: int) -> int:
        """Tokens whose logits are known and that are not computed yet."""
        return len(self.alone[at].prompt) + STEPS - 1 - self.kvs[at].length

    def close(self) -> None:
        self._engine.wiring.measuring.end()
        self._engine.wiring.pool.clear()
        self._engine.expert_cache.check_integrity()


@pytest.mark.parametrize(
    "settings",
    layered(
        [{"budget": "all"}, {"budget": "50%", "scope": "global", "eviction": "lfu"}],
        quick=lambda settings: "scope" in settings,
    ),
)
def test_sequences_together_are_what_they_are_alone(
    engine: Engine, alone: list[Alone], settings: dict[str, object]
) -> None:
    """All prompts in one pass; then some sequences in each, in any order, so that their rows are merged anew."""
    engine.change(settings)
    together, draw = Together(engine, alone), random.Random(1)
    together.compute("prefill", {at: len(one.prompt) for at, one in enumerate(alone)})
    while going := [at for at in range(len(alone)) if together.left(at)]:
        chosen = draw.sample(going, draw.randint(1, len(going)))
        together.compute("decode", dict.fromkeys(chosen, 1))
    together.close()


def test_prompts_in_pieces_beside_others(engine: Engine, alone: list[Alone]) -> None:
    """Where a prompt can be read in pieces; a pass may hold the end of one, a piece of another and one token more."""
    engine.change({"budget": "50%"})
    if not engine.sizes.carried:
        pytest.skip("this model reads a prompt in one pass")
    if engine.model.config.model_type in OTHERWISE:
        pytest.skip("transformers itself has other logits for a prompt that is read in pieces")
    together = Together(engine, alone)
    together.compute("prefill", {0: 10, 2: 33})
    together.compute("prefill", {2: 7, 1: 7, 0: 14, 3: 1})
    together.compute("prefill", {4: 13, 2: 1, 0: 1})
    together.compute("decode", dict.fromkeys(range(len(alone)), 1))
    together.close()
