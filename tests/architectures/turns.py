"""What an engine answers under the settings in force: a chat of two turns, of which the second continues from the kept
KV, and three texts together."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.errors import MoestroError
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord
from tests.decoded import greedy
from tests.loaded import in_layers

DRAW = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(3, 250, (length,), generator=DRAW).tolist() for length in (24, 7, 1, 40, 3, 18, 12, 30)]
STEPS = 4
PLACES = ("in the first turn", "in the second turn", "in a batch")
BATCH = PROMPTS[1], PROMPTS[2], PROMPTS[4]
REPEATED = PROMPTS[1] * 4  # of which tokens can be looked up
WAIT_S = 10.0
Logits = list[torch.Tensor]


class Said(NamedTuple):
    """Logits [n, V] of each of PLACES, the records of all passes, and whether each answer was called exact."""

    logits: list[torch.Tensor]
    steps: list[StepRecord]
    exact: list[bool]

    def differs(self, other: "Said") -> str:
        """Where first; "" = nowhere."""
        for place, own, its in zip(PLACES, self.logits, other.logits, strict=True):
            if not torch.equal(own, its):
                return f"other logits {place}"
        return ""


def said(engine: Engine, prompt: Sequence[int] = REPEATED, steps: int = 2) -> Said:
    """Nothing is kept of what was said before."""
    kept = engine.settings["kv_chats"]
    engine.change({"kv_chats": 0})
    engine.change({"kv_chats": kept})
    records, exact, turns = list[StepRecord](), list[bool](), list[torch.Tensor]()
    ids = list(prompt)
    with in_layers(engine, lambda _: _hear(engine)):
        for more in ([], PROMPTS[1]):
            logits, ids = Logits(), [*ids, *more]
            for piece in engine.generate(Ids(ids), Sampling(max_new_tokens=steps), draw=greedy(logits), reuse=True):
                records += [piece.step] if piece.step is not None else []
                exact += [piece.stats.exact] if piece.stats is not None else []
                ids += [piece.token] if piece.token is not None else []
            turns.append(torch.stack(logits))
        texts = together(engine, BATCH, records, exact, steps)
    return Said([*turns, torch.cat([torch.stack(rows) for rows in texts])], records, exact)


def _hear(engine: Engine) -> None:
    """Wait for what a predictor's process was asked: a model of this size would be done before."""
    worker, end_s = getattr(engine.predictor_host.predictor, "worker", None), time.monotonic() + WAIT_S
    while worker is not None and worker.behind and time.monotonic() < end_s:
        time.sleep(1e-3)


def together(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    records: list[StepRecord] | None = None,
    exact: list[bool] | None = None,
    steps: int = STEPS,
) -> list[Logits]:
    """The logits [V] of each token of each prompt's answer, when they are answered together. Prompts have different
    lengths. Raises MoestroError with what is said of a prompt that cannot be answered."""
    found: list[Logits] = [[] for _ in prompts]
    factory, sampling = engine.batching._requests, Sampling(max_new_tokens=steps)
    lengths = [len(engine.prompt.encode(Ids(prompt), engine.context)) for prompt in prompts]
    draw, factory.draw = factory.draw, lambda ids, *_: greedy(found[lengths.index(len(ids))])  # type: ignore[method-assign, assignment]
    try:
        requests = [BatchRequest(at, Ids(prompt), sampling) for at, prompt in enumerate(prompts)]
        for one in engine.generate_many(requests, len(prompts)):
            if one.error:
                raise MoestroError(one.error)
            if one.piece is not None and one.piece.step is not None and records is not None:
                records.append(one.piece.step)
            if one.piece is not None and one.piece.stats is not None and exact is not None:
                exact.append(one.piece.stats.exact)
    finally:
        factory.draw = draw  # type: ignore[method-assign]
    return found
