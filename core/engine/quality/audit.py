"""The exact model reads an answer again, a few tokens at a time, and gives its logits at each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from core.engine.quality.figures import divergence, log_probability
from core.engine.quality.saved import Shadow
from core.runtime.measurement import MeasurementSession
from core.types import StepRecord

CHUNK = 64  # tokens per pass
LOGITS_BYTES = 8 << 20  # of the logits of one pass; at most a quarter of the workspace


@dataclass(slots=True)
class PendingAnswer:
    """An answer to be scored. `rows`: index of a token of the answer (from 0) -> the logits [V] it was drawn from."""

    number: int
    prompt: Sequence[int]
    tokens: Sequence[int]
    rows: Mapping[int, torch.Tensor]
    steps: Sequence[StepRecord] = ()  # its passes
    shadow: Shadow | None = None  # the shadow cache before the answer; copy it before use
    left: int = 3  # attempts left
    broken_off: bool = False  # the last attempt was interrupted
    read: float = 0.0  # share of it that this attempt has read


@dataclass(slots=True)
class Scores:
    """`kl` and `agrees`: one per token compared; `log_p` of the exact model: one per answer token."""

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    log_p: list[float] = field(default_factory=list)


@torch.inference_mode()
def score(bench: MeasurementSession, answer: PendingAnswer) -> Scores:
    """Reads prompt and answer through the measurement session, whose model is exact. Lets errors of `bench.run`
    through.

    Logits of at most LOGITS_BYTES are alive at once, and a few of their rows in fp32.
    """
    scores, first = Scores(), len(answer.prompt) - 1
    ids = [*answer.prompt, *answer.tokens]
    last = first + max(len(answer.tokens) - 1, *answer.rows)

    def told(tokens: int) -> None:
        answer.read = tokens / (last + 1)

    told(0)
    for at, logits in _read(bench, ids, first, last, _rows(bench, answer), told):
        for i, row in enumerate(logits):
            token = at + i - first
            if token < len(answer.tokens):
                scores.log_p.append(log_probability(row, answer.tokens[token]))
            if (kept := answer.rows.get(token)) is not None:
                kl, agrees = divergence(row, kept.to(row.device))
                scores.kl.append(kl)
                scores.agrees.append(agrees)
    return scores


def _rows(bench: MeasurementSession, answer: PendingAnswer) -> int:
    row = next(iter(answer.rows.values()))
    return max(1, min(LOGITS_BYTES, bench.workspace // 4) // (row.numel() * row.itemsize))


def _read(
    bench: MeasurementSession, ids: Sequence[int], first: int, last: int, rows: int, told: Callable[[int], None]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (position, logits [n, V] from there on) for positions first..last; earlier ones are read
    without logits. `told` hears how many tokens were read."""
    cache, chunk = bench.kv.fresh(), min(CHUNK, bench.chunk) if bench.carried else bench.chunk
    rows = min(rows, chunk) if bench.carried else 1
    for at in range(0, first, chunk):
        bench.run(ids[at : min(at + chunk, first)], cache)
        told(min(at + chunk, first))
    for at in range(first, last + 1, rows):
        some = ids[at : min(at + rows, last + 1)]
        yield at, bench.run(some, cache, "prefill" if len(some) > 1 else "decode", keep=len(some))
        told(at + len(some))
