"""Passes of a model with lossy options, and the same through transformers, with the experts exchanged."""

from typing import Any

import torch

from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.hf.discover import find_experts
from core.metrics.lossy_events import Action, Lossy
from core.runtime.batch import Batch, Share
from core.settings.sampling import Sampling
from core.types import StepRecord
from tests.equality.passes import PROMPT

ANSWER = [5, 77, 130, 9, 201, 44, 18, 240]
RESIDENT = {"budget": "50%"}


@torch.inference_mode()
def run(engine: Engine, **settings: object) -> tuple[list[torch.Tensor], list[Lossy | None]]:
    """Logits and events of reading PROMPT and then ANSWER token by token."""
    engine.change(settings)
    cache, logits, events = engine.fresh_cache(), [], []
    for ids in (PROMPT, *([token] for token in ANSWER)):
        batch = Batch("prefill" if len(ids) > 1 else "decode", (Share(ids),))
        engine.parts.recorder.begin(batch)
        engine.wiring.answering.step.prefetcher.begin(batch)
        out = cached_pass(engine.model, torch.tensor([ids]), cache)
        logits.append(out.logits[0].clone())
        events.append(engine.parts.prediction.miss.take(len(ids)))
    engine.expert_cache.check_integrity()
    return logits, events


@torch.inference_mode()
def told(reference: Any, events: list[Lossy]) -> list[torch.Tensor]:
    """The same passes through transformers, with the experts exchanged that the events name."""
    sites, now = find_experts(reference), events[:1]

    def exchange(
        site: Any, original: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ids, weights = ids.clone(), weights.clone()
        rows = now[0].choices
        for row in rows[(rows["layer"] == site.index) & (rows["action"] >= Action.SUBSTITUTE)]:
            at = int((ids[row["token"]] == row["expert"]).nonzero()[0])
            if row["to"] < 0:
                weights[row["token"], at] = 0.0
            else:
                ids[row["token"], at] = int(row["to"])
        result: torch.Tensor = original(hidden, ids, weights)
        return result

    from transformers import DynamicCache

    cache, logits = DynamicCache(config=reference.config), []
    for site in sites:
        site.module.forward = lambda *args, site=site, original=site.module.forward: exchange(site, original, *args)
    try:
        for event, ids in zip(events, (PROMPT, *([token] for token in ANSWER)), strict=True):
            now[0] = event
            out = cached_pass(reference, torch.tensor([ids]), cache)
            logits.append(out.logits[0].clone())
    finally:
        for site in sites:
            del site.module.forward
    return logits


def answer(engine: Engine, turn: dict[int, dict[str, object]]) -> tuple[list[int], list[StepRecord], Any]:
    """An answer of 16 tokens; `turn` = what is set once so many tokens are there."""
    tokens, steps, stats = [], [], None
    for piece in engine.generate("What is it?", Sampling(max_new_tokens=16)):
        tokens += [piece.token] if piece.token is not None else []
        steps += [piece.step] if piece.step is not None else []
        stats = piece.stats or stats
        if piece.kind == "token" and len(tokens) in turn:
            engine.change(turn[len(tokens)])
    return tokens, steps, stats
