"""Passes in the fast arithmetic, read in pieces and along with others, and how far they are from the reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from core.engine import Engine
from core.runtime.batch import Batch, Share
from core.runtime.pipeline import Pipeline
from core.runtime.sequence_kv import SequenceKV
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.equality.passes import PROMPT
from tests.loaded import unloading

CLOSE = 1e-4  # of the largest logit: fp32 sums in another order
OTHERS = [[5] * 9, [9, 8, 7], [11]]  # of a batch


def load(path: Path | str, **how: object) -> Engine:
    settings = Settings({"budget": "100%", "predictor": "none", "link": "own"})
    return Engine.load(LoadSpec.checked(str(path), settings, **{"arithmetic": "fast", "context": 128} | how))


def logits(
    engine: Engine, ids: Sequence[int], cuts: Sequence[int], others: Sequence[list[int]] = (), keep: int = 1
) -> torch.Tensor:
    """[keep, V] of the last ids, read in pieces, the last of them along with other texts."""
    wiring = engine.wiring
    pool, pipeline, at = wiring.pool, wiring.measuring, 0
    kvs = [pool.take(pool.context) for _ in range(1 + len(others))]
    try:
        for i, cut in enumerate(cuts):
            shares = [Share(ids[at : at + cut], kvs[0], 1)]
            if i == len(cuts) - 1:
                shares += [Share(one, kv, 2 + n) for n, (one, kv) in enumerate(zip(others, kvs[1:], strict=True))]
            batch = Batch("decode" if cut == 1 else "prefill", tuple(shares))
            pipeline.begin(batch)
            found = pipeline.forward(batch, keep)[:keep].clone()
            at += cut
        return found
    finally:
        pipeline.end()
        pool.clear()


def read(pipeline: Pipeline, kv: SequenceKV, ids: Sequence[int], *, breaks_off: bool = False) -> torch.Tensor:
    """The last logits of a pass, unless it breaks off in a later layer."""
    calls = itertools.count()
    pipeline.begin(batch := Batch("prefill", (Share(ids, kv, 1),)))
    try:
        return pipeline.forward(batch, 1, lambda: breaks_off and next(calls) == 2).clone()
    finally:
        pipeline.end()


def distance(path: Path, **how: object) -> float:
    """From the reference arithmetic with the same weights: the median of rows, as the choice may differ in a row with
    two experts of almost the same score."""
    found = []
    for arithmetic in ("fast", "reference"):
        settings = Settings({"predictor": "none"})
        with unloading(
            Engine.load(LoadSpec.checked(str(path), settings, arithmetic=arithmetic, dtype="bfloat16", **how))
        ) as engine:
            assert (engine.wiring.answering.hooked.program is not None) == (arithmetic == "fast")
            found.append(logits(engine, PROMPT, [len(PROMPT)], keep=len(PROMPT)).float())
    return float(((found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)).median())
