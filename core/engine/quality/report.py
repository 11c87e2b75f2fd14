"""Results of the quality meter: of one answer, or of several combined."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from core.engine.quality.interval import Share, share_of


@dataclass(frozen=True, slots=True)
class Quality:
    """None = not available."""

    answer: int  # AnswerStats.audit of the (last) answer
    tokens: int  # tokens of the answer
    scored: int  # distributions that were compared
    kl: float | None  # mean over these of KL(exact || lossy), nats
    kl_most: float | None  # the largest of them
    agreement: float | None  # share of these whose likeliest token is the exact model's
    perplexity: float | None  # of the exact model on all answer tokens
    saved_ms: (
        float | None
    )  # waiting for copies that was saved, ms per decoded token; an estimate: core.engine.quality.saved
    changed: int  # (token, layer, expert) assignments that were not the router's ...
    assignments: int  # ... of all these
    note: str = ""  # why there are no figures, as part of a line; "" = there are figures

    @property
    def agreed(self) -> Share | None:
        """The agreement with its interval; None where it is not available."""
        return agreed(self.agreement, self.scored)


def agreed(agreement: float | None, scored: int) -> Share | None:
    """The agreement of `scored` tokens with its interval; None where it is not available."""
    return None if agreement is None else share_of(round(agreement * scored), scored)


def together(some: Sequence[Quality]) -> Quality | None:
    """Combines several answers: means weighted by tokens scored, or by answer tokens. None for no answers."""
    if not some:
        return None
    measured = [one for one in some if one.perplexity is not None and one.tokens]
    nats = sum(one.tokens * math.log(one.perplexity or 1.0) for one in measured)
    worst = [one.kl_most for one in some if one.kl_most is not None]
    return Quality(
        answer=some[-1].answer,
        tokens=sum(one.tokens for one in some),
        scored=sum(one.scored for one in some),
        kl=_mean([(one.kl, one.scored) for one in some]),
        kl_most=max(worst) if worst else None,
        agreement=_mean([(one.agreement, one.scored) for one in some]),
        perplexity=math.exp(nats / sum(one.tokens for one in measured)) if measured else None,
        saved_ms=_mean([(one.saved_ms, one.tokens) for one in some]),
        changed=sum(one.changed for one in some),
        assignments=sum(one.assignments for one in some),
    )


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    weight = sum(n for value, n in values if value is not None)
    return sum(value * n for value, n in values if value is not None) / weight if weight else None
