"""What an answer came to, for any API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.server.errors import TOO_LONG, ApiError
from app.server.v1.parts import Call, Part
from app.services.progress import Answer
from core.types import TokenLogprob

STOPPED = "Moestro was stopped before the answer was complete. Ask again when it has been started again."
Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, those of them whose KV was there already, tokens of the answer, and about how many of these
    are reasoning."""

    prompt: int
    cached: int
    answer: int
    reasoning: int = 0

    @classmethod
    def of(cls, answer: Answer) -> Usage:
        stats = answer.stats
        if stats is None:
            return cls(answer.prefill_total, answer.prefill_cached, answer.n_tokens)
        return cls(stats.prompt_tokens, stats.cached_tokens, answer.n_tokens)

    def openai(self) -> dict[str, Any]:
        """As in chat completions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass(frozen=True, slots=True)
class Result:
    """An ended answer. `seed` draws it again (None: it was stopped before it began), `stop` = the text that ended it,
    `facts` = what Moestro says of how it was computed."""

    content: str
    reasoning: str
    calls: Sequence[Call]
    finish: Finish
    usage: Usage
    seed: int | None
    stop: str
    logprobs: Sequence[TokenLogprob]
    facts: dict[str, Any]


def result(answer: Answer, parts: Sequence[Part], count: Callable[[str], int | None]) -> Result:
    """Of an answer that ended without an error, and its parts. `count` = of a text's tokens."""
    stats, usage = answer.stats, Usage.of(answer)
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    if reasoning:  # which may end within a token: its text is counted
        usage = replace(usage, reasoning=min(usage.answer, count(reasoning) or 0))
    calls = [part.call for part in parts if part.call is not None]
    cut = stats is not None and stats.reason in ("length", "context")
    return Result(
        content="".join(part.text for part in parts if part.kind == "content"),
        reasoning=reasoning,
        calls=calls,
        finish="length" if cut else "tool_calls" if calls else "stop",
        usage=usage,
        seed=stats.seed if stats is not None else None,
        stop=stats.stop if stats is not None else "",
        logprobs=answer.logprobs,
        facts=facts(answer),
    )


def facts(answer: Answer) -> dict[str, Any]:
    """The field `moestro`: whether the answer is the exact model's, and what it took. `closeness` = the largest
    deviation of an exact answer's logits from transformers', as a share of the largest one; null: not measured.
    `distance_kl`, over `distance_tokens` of a text, is that of the fast arithmetic from the reference."""
    stats = answer.stats
    if stats is None:
        return {}
    own = "exact arithmetic closeness distance_kl distance_tokens changed assignments hit_rate ttft_ms".split()
    return {
        **{name: getattr(stats, name) for name in own},
        **{name: stats.more.get(name, 0) for name in ("drafted", "accepted")},
        "tokens_per_second": stats.tok_s,
        "queued_ms": answer.queued_ms,
    }


def failed(answer: Answer) -> bool:
    """Whether it ended with an error, or was cut off because the server ends."""
    cut = answer.interrupted and (answer.stats is None or answer.stats.reason == "cancelled")
    return bool(answer.error) or cut


def failure(answer: Answer) -> ApiError:
    """Of an answer that failed: the client's fault, the server's, or that of the server's end."""
    status = 400 if answer.refused else 500 if answer.error else 503
    return ApiError(answer.error or STOPPED, code=TOO_LONG if answer.too_long else None, status=status)
