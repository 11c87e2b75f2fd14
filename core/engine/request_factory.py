"""Begins and ends every request, whether it is answered alone or together with others."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from core.engine.answer import AnswerBuilder
from core.engine.arithmetic import Arithmetic
from core.engine.batch_trial import TOGETHER
from core.engine.constraint import Constraints
from core.engine.loading import LoadedModel
from core.engine.quality.meter import Meter
from core.engine.sampler import Draw, Logprobs, Sampler
from core.engine.sequence import Cancel, Sequence, Start, Stop
from core.engine.settings_controller import EngineParts
from core.settings.sampling import Sampling
from core.types import Piece, StepRecord


class ActiveRequest(NamedTuple):
    """An answer that is being written."""

    sequence: Sequence
    answer: AnswerBuilder
    seed: int

    @property
    def unread(self) -> int:
        """Tokens to read before the next one can be drawn: of the prompt, or of all when it is read again."""
        sequence = self.sequence
        total = len(sequence.ids) - 1 if sequence.drawn else sequence.prompt
        return total - sequence.computed


class RequestFactory:
    """For one model. `number()` is the next request's; `arithmetic()` what computes."""

    def __init__(
        self,
        loaded: LoadedModel,
        meter: Meter,
        parts: EngineParts,
        number: Callable[[], int],
        arithmetic: Callable[[], Arithmetic],
    ) -> None:
        self._loaded, self._meter, self._parts, self._number = loaded, meter, parts, number
        self._arithmetic = arithmetic
        self._constraints = Constraints(loaded.prompt)

    def most(self, ids: list[int], sampling: Sampling) -> int:
        """The tokens that an answer to a prompt may have."""
        return min(sampling.max_new_tokens, self._loaded.plan.context - len(ids))

    def draw(self, ids: list[int], sampling: Sampling, begun: int = 0) -> Draw:
        """The sampler for an answer to a prompt, whose last `begun` tokens are the answer's own. Raises PromptError for
        a form that cannot be kept to."""
        constraint = self._constraints.of(sampling, len(ids)) if sampling.schema or sampling.grammar else None
        return Sampler(sampling, self._loaded.device, len(ids) - begun, constraint, begun)

    def begin(
        self,
        ids: list[int],
        sampling: Sampling,
        draw: Draw,
        start: Start,
        cancel: Cancel,
        submitted_s: float,
        *,
        begun: int = 0,
        kept: bool = False,
        reading: Callable[[Piece], None] | None = None,
    ) -> ActiveRequest:
        """An answer to a prompt, which leaves room for at least one token, that goes on from `start`. `begun` as in
        `draw`. `kept`: its KV outlives it; `reading` as in Sequence."""
        tokenizer, most = self._loaded.prompt.tokenizer, self.most(ids, sampling)
        logprobs = None if sampling.logprobs is None else Logprobs(draw, tokenizer, sampling.logprobs)
        sequence = Sequence(
            self._number(),
            list(ids),
            start,
            logprobs or draw,
            Stop(self._loaded.prompt.ends, most, sampling.max_new_tokens > most, cancel),
            self._meter.begin(),
            begun_tokens=begun,
            kept=kept,
            reading=reading,
        )
        return ActiveRequest(
            sequence, AnswerBuilder(tokenizer, sequence, submitted_s, sampling.stop, logprobs), sampling.seed
        )

    def end(self, active: ActiveRequest) -> Piece:
        """The last piece of an answer that is over: the rest of its text, and its statistics."""
        (sequence, answer, seed), loaded = active, self._loaded
        given, drawn = sequence.ids[: sequence.prompt], sequence.ids[sequence.prompt :]
        stats = answer.stats(
            self._parts.memory.ledger.memory(loaded.store.bytes, loaded.store.unpinned_bytes),
            seed,
            self._meter.end(sequence.sample, given, drawn, answer.steps),
            max(loaded.plan.closeness, TOGETHER if sequence.kv.packed else 0.0, self._two_processors(answer.steps)),
            loaded.plan.weights,
            self._arithmetic(),
        )
        return Piece("end", text=answer.rest(), step=answer.last_step, stats=stats)

    def _two_processors(self, steps: Iterable[StepRecord]) -> float:
        """How far logits may be from those of the device alone, where the host computed some experts."""
        closeness = self._parts.host.closeness  # first: to ask a step makes all its arrays
        return closeness if closeness and any(step.host_computed for step in steps) else 0.0
