"""Prompts answered alone and together."""

from core.engine import Engine
from core.engine.batch_request import BatchPiece, BatchRequest
from core.policy.batching import Scheduler
from core.settings.sampling import Sampling
from core.types import AnswerStats, Ids, StepRecord

TEXTS = [
    f"{what} keep what is {how}" * (1 + n % 3)
    for n, (what, how) in enumerate(
        [("caches", "hot"), ("slots", "used"), ("links", "slow"), ("routers", "known"), ("experts", "near"), ("x", "y")]
    )
]
GREEDY = Sampling(max_new_tokens=9, temperature=0.0)


def alone(engine: Engine, text: str | Ids, sampling: Sampling) -> list[int]:
    return [p.token for p in engine.generate(text, sampling) if p.kind == "token" and p.token is not None]


class Answers:
    def __init__(self) -> None:
        self.tokens: dict[object, list[int]] = {}
        self.text: dict[object, str] = {}
        self.stats: dict[object, AnswerStats] = {}
        self.errors: dict[object, str] = {}
        self.steps: dict[int, StepRecord] = {}

    def take(self, one: BatchPiece) -> None:
        if one.error:
            self.errors[one.key] = one.error
        if (piece := one.piece) is None:
            return
        if piece.step is not None:
            self.steps[piece.step.index] = piece.step
        if piece.kind == "token":
            assert one.key not in self.stats, "nothing follows the end"
            self.tokens.setdefault(one.key, []).append(piece.token or 0)
        if piece.kind in ("token", "end"):
            self.text[one.key] = self.text.get(one.key, "") + piece.text
        if piece.stats is not None:
            self.stats[one.key] = piece.stats


def together(engine: Engine, requests: list[BatchRequest], limit: int, scheduler: Scheduler | None = None) -> Answers:
    found = Answers()
    for one in engine.generate_many(requests, limit, scheduler=scheduler):
        found.take(one)
        assert engine.memory().used <= engine.memory().budget
    engine.expert_cache.check_integrity()
    return found
