"""How far the fast arithmetic is from the reference: both read the same text with the same loaded weights."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from core.engine import Engine
from core.engine.arithmetic import Distance
from core.errors import SettingError
from core.measure.evaluate.passages import held_out, windows
from core.memory.store import Cancelled
from core.runtime.batch import Batch, Share
from core.runtime.measurement import MeasurementSession
from core.runtime.pipeline import Pipeline

TOKENS = 512  # by default
NOT_FAST = "The distance is that of the fast arithmetic from the reference, and the reference computes this model{}."
BECAUSE = "The distance of the fast arithmetic is being measured."

Read = Callable[[Sequence[int]], torch.Tensor]
"""Token ids [n] -> logits [n, V] float64 after each of them."""


def measured(engine: Engine, tokens: int = TOKENS) -> Distance:
    """Measure the distance, keep it for later loads, and show it with this one."""
    distance = measure(engine, tokens)
    engine.keep_distance(distance)
    return distance


def measure(engine: Engine, tokens: int = TOKENS, cancel: threading.Event | None = None) -> Distance:
    """The distance over `tokens` predicted tokens of the texts that evaluation reads. Raises SettingError where the
    reference computes the model, BusyError, Cancelled."""
    if not engine.arithmetic.fast:
        raise SettingError(NOT_FAST.format(f": {engine.arithmetic.fallback}" if engine.arithmetic.fallback else ""))
    pieces, found = windows(engine, held_out(engine.model_name), tokens), []
    with readers(engine) as (reference, fast):
        for ids in pieces:
            if cancel is not None and cancel.is_set():
                raise Cancelled
            found.append(compare(reference(ids[:-1]), fast(ids[:-1]), torch.tensor(ids[1:])))
    nll, nll_fast, kl, agreed, off = torch.cat(found, 1)
    return Distance(
        tokens=len(kl),
        kl=float(kl.mean()),
        kl_most=float(kl.max()),
        agreed=int(agreed.sum()),
        perplexity=math.exp(nll_fast.mean()),
        reference_perplexity=math.exp(nll.mean()),
        closeness=float(off.max()),
    )


@contextmanager
def readers(engine: Engine) -> Iterator[tuple[Read, Read]]:
    """What reads a text in the reference arithmetic, and in that of the load. Raises BusyError."""
    with engine.workbench(BECAUSE) as bench, bench.unpaced():
        reference = engine.wiring.reference()
        try:
            yield partial(_read, bench, reference), partial(_read, bench, bench.pipeline)
        finally:
            reference.end()


@torch.inference_mode()
def _read(bench: MeasurementSession, pipeline: Pipeline, ids: Sequence[int]) -> torch.Tensor:
    """[n, V] float64: the logits after each of the tokens, read from the first one on."""
    kv, rows = bench.kv.fresh(), []
    chunk = bench.chunk if bench.carried else len(ids)
    for at in range(0, len(ids), chunk):
        batch = Batch("prefill", (Share(ids[at : at + chunk], kv),))
        pipeline.begin(batch)
        rows.append(pipeline.forward(batch, keep=batch.size).double())
    return torch.cat(rows)


def compare(exact: torch.Tensor, fast: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[5, n] of logits [n, V] at n places: the reference's nll of the targets, the fast one's, KL, whether the
    likeliest tokens agree, and the largest difference of logits as a share of the largest logit."""
    p, q = exact.log_softmax(-1), fast.log_softmax(-1)
    nll, nll_fast = (-rows.gather(1, targets[:, None])[:, 0] for rows in (p, q))
    off = (exact - fast).abs().amax(1) / exact.abs().amax(1)
    return torch.stack([nll, nll_fast, divergence(p, q), (p.argmax(1) == q.argmax(1)).double(), off])


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[n] KL(p || q) in nats of log-probabilities [n, V]."""
    return torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(1).clamp(min=0.0)
