"""How far the fast arithmetic is from the reference: both read the same text with the same loaded weights.

A load measures it once, in a time that is bounded by what it sees to take here (`within`): the first piece of text is
short, each next one twice as long, and none is begun that may end late. How many tokens are read does not depend on
what is found in them.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from core.engine.arithmetic import ENOUGH, Distance
from core.engine.passages import STRETCH, WINDOW
from core.engine.quality.interval import mean_error
from core.memory.store import Cancelled
from core.runtime.batch import Batch, Share
from core.runtime.kv_cache import KVCache
from core.runtime.pipeline import Pipeline, Stop, Stopped

PIECES = 11  # of text that a load's measurement reads at most: 1,136 tokens
SECONDS = 20.0  # that it takes at most, ...
LONGEST = 120.0  # ... or this, until ENOUGH tokens were read
FIRST = 16  # tokens of the first piece
ROWS = 16  # whose logits are compared at once: float64 of a large vocabulary

Read = Callable[[Sequence[int]], torch.Tensor]
"""Token ids [n] -> logits [n, V] after each of them."""


def never() -> bool:
    """Nothing stops it."""
    return False


@torch.inference_mode()
def read(pipeline: Pipeline, kv: KVCache, ids: Sequence[int], chunk: int, stop: Stop = never) -> torch.Tensor:
    """Logits [n, V] after each of the tokens [n], read from the first one on in pieces of `chunk`. Raises Cancelled
    where `stop()`."""
    sequence, rows = kv.fresh(), []
    for at in range(0, len(ids), chunk):
        batch = Batch("prefill", (Share(ids[at : at + chunk], sequence),))
        pipeline.begin(batch)
        try:
            rows.append(pipeline.forward(batch, batch.size, stop).clone())
        except Stopped:
            raise Cancelled from None
    return torch.cat(rows)


def within(
    pieces: Sequence[Sequence[int]],
    seconds: float = SECONDS,
    longest: float = LONGEST,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Sequence[int]]:
    """The pieces in turn, the first of them cut to FIRST predicted tokens, the next to twice as many, and so on, for as
    long as the next one is over in time if it takes twice as long as the last one, or as many times as it is longer.
    In time is within `seconds`, or within `longest` while fewer tokens than ENOUGH were read."""
    began_s, tokens = clock(), 0
    for at, piece in enumerate(pieces):
        piece_s, width = clock(), min(FIRST << at, WINDOW)
        yield piece[: width + 1]
        now_s, tokens = clock(), tokens + min(width, len(piece) - 1)
        limit = seconds if tokens >= ENOUGH else max(seconds, longest)
        if (now_s - began_s) + (now_s - piece_s) * (2 if width < WINDOW else 1) > limit:
            return


def distance_of(pieces: Iterator[Sequence[int]], reference: Read, fast: Read) -> Distance:
    """What the two differ by on `pieces` [1 + n] of text, in each of which the tokens after the first are predicted."""
    compared = [compare(reference(ids[:-1]), fast(ids[:-1]), torch.tensor(ids[1:])) for ids in pieces]
    nll, nll_fast, kl, agreed, off = torch.cat(compared, 1)
    stretches = [float(part.mean()) for one in compared for part in one[2].split(STRETCH)]
    error = mean_error(stretches)[1]
    return Distance(
        tokens=len(kl),
        kl=float(kl.mean()),
        kl_error=error if math.isfinite(error) else float(kl.max()),  # of a single stretch nothing is known
        kl_most=float(kl.max()),
        agreed=int(agreed.sum()),
        perplexity=math.exp(nll_fast.mean()),
        reference_perplexity=math.exp(nll.mean()),
        closeness=float(off.max()),
    )


def compare(exact: torch.Tensor, fast: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[5, n] float64 of logits [n, V] at n places: the reference's nll of the targets, the fast one's, KL, whether the
    likeliest tokens agree, and the largest difference of logits as a share of the largest logit."""
    parts = zip(exact.split(ROWS), fast.split(ROWS), targets.split(ROWS), strict=True)
    return torch.cat([_compared(p.double(), q.double(), wanted) for p, q, wanted in parts], 1)


def _compared(exact: torch.Tensor, fast: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    p, q = exact.log_softmax(-1), fast.log_softmax(-1)
    nll, nll_fast = (-rows.gather(1, targets[:, None])[:, 0] for rows in (p, q))
    off = (exact - fast).abs().amax(1) / exact.abs().amax(1)
    return torch.stack([nll, nll_fast, divergence(p, q), (p.argmax(1) == q.argmax(1)).double(), off])


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[n] KL(p || q) in nats of log-probabilities [n, V]."""
    return torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(1).clamp(min=0.0)
