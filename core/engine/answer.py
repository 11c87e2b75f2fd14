"""One answer: turns token ids into text, and computes the statistics shown under it."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import fields

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from core.engine.arithmetic import REFERENCE, Arithmetic
from core.engine.sampler import Logprobs
from core.engine.sequence import Sequence
from core.engine.stop_text import StopText
from core.metrics import reduced, share
from core.types import AnswerStats, Memory, Piece, StepRecord


class AnswerBuilder:
    """Collects the text and the counts of what `sequence` generates, up to the first of the texts `stop`. Times are
    perf_counter seconds."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sequence: Sequence,
        submitted_s: float,
        stop: tuple[str, ...] = (),
        logprobs: Logprobs | None = None,
    ) -> None:
        self._tokenizer, self._sequence, self._submitted_s = tokenizer, sequence, submitted_s
        self._stop, self._logprobs = StopText(stop), logprobs
        self._decoder = DecodeStream(skip_special_tokens=True)
        for token in sequence.ids[sequence.prompt - sequence.begun_tokens :]:
            self._decoder.step(tokenizer._tokenizer, token)  # the rest of a character may follow
        self._text = ""
        self._first_s = 0.0
        self.steps: list[StepRecord] = []
        self._told = 0  # of the passes, those that were sent

    def count(self, step: StepRecord) -> None:
        """Add the record of a forward pass made for this answer."""
        self.steps.append(step)

    def taken(self, tokens: Iterable[int]) -> Iterator[Piece]:
        """Add the tokens that a pass has drawn, one after the other, until the answer is over."""
        try:
            for token in tokens:
                if not self.take(token):
                    return
                yield self.piece()
                if self._sequence.over:
                    return
        finally:
            self._sequence.take_back()

    def take(self, token: int) -> bool:
        """Add a drawn token; False for an end token, which ends the answer and is not part of it."""
        self._first_s = self._first_s or time.perf_counter()
        if not self._sequence.take(token):
            return False
        self._text = self._stop.feed(self._decoder.step(self._tokenizer._tokenizer, token) or "")
        self._sequence.stopped = bool(self._stop.found)
        return True

    def piece(self) -> Piece:
        """The newest token for streaming; its text may be empty while a character is incomplete, or while a text that
        may end the answer is. The first token of a decode pass comes with its record."""
        logprob = self._logprobs.take() if self._logprobs is not None else None
        return Piece("token", text=self._text, token=self._sequence.ids[-1], step=self._untold(), logprob=logprob)

    def _untold(self) -> StepRecord | None:
        """The latest pass, if it is a decode pass that was not sent yet."""
        fresh, self._told = self.steps[self._told :], len(self.steps)
        return fresh[-1] if fresh and fresh[-1].phase == "decode" else None

    def rest(self) -> str:
        """The end of the text, which was withheld because it might have been the beginning of a stop text."""
        return self._stop.rest()

    @property
    def last_step(self) -> StepRecord | None:
        """The decode pass that ended the answer without a token to show; None when every pass was sent with its
        token."""
        return self._untold() if self._sequence.ended else None

    def stats(
        self,
        memory: Memory,
        seed: int,
        audit: int = 0,
        closeness: float = 0.0,
        weights: str = "",
        arithmetic: Arithmetic = REFERENCE,
    ) -> AnswerStats:
        """The statistics of the line under the answer. `audit` = the number under which its quality will be reported;
        `closeness` (of the reference arithmetic) and `weights` as in core.capacity.plan.Plan."""
        decode = [s for s in self.steps if s.phase == "decode"]
        written = sum(count for s in decode for request, count in s.rows if request == self._sequence.request)
        tpot_ms = sum(s.total_ms for s in decode) / written if written else 0.0
        figures = {
            **reduced(self.steps),
            "cached_tokens": self._sequence.cached,
        }  # a pass may be of others' prompts, too
        named = {one.name for one in fields(AnswerStats)}
        return AnswerStats(
            prompt_tokens=self._sequence.prompt,
            begun_tokens=self._sequence.begun_tokens,
            new_tokens=self._sequence.drawn,
            ttft_ms=(self._first_s - self._submitted_s) * 1e3 if self._first_s else 0.0,
            tpot_ms=tpot_ms,
            tok_s=1e3 / tpot_ms if tpot_ms else 0.0,
            prefill_hit_rate=share([s for s in self.steps if s.phase == "prefill"], "hits", "requests"),
            budget_bytes=memory.budget,
            device_bytes_peak=memory.peak,
            kept_bytes=memory.kept,
            reason=self._sequence.reason,
            seed=seed,
            stop=self._stop.found,
            audit=audit,
            closeness=arithmetic.closeness(closeness),
            **arithmetic.stats(),
            weights=weights,
            more={name: value for name, value in figures.items() if name not in named},
            **{name: value for name, value in figures.items() if name in named},
        )
