"""Likelihoods and continuations of texts under the settings in force, as lm-evaluation-harness requests them.

The context is read as a prompt; the continuation is decoded token by token, so that residency, misses and their
handling act as in a chat. Texts are tokenized without special tokens, a context together with its continuation, as the
harness does for causal models."""

import threading
from collections.abc import Callable, Sequence

from core.engine import Engine
from core.errors import ContextError
from core.measure.evaluate.follow import follow
from core.memory.store import Cancelled
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord


class Scorer:
    """Scores with one engine, which it has to itself. `heard` is called with every forward pass."""

    def __init__(
        self,
        engine: Engine,
        cancel: threading.Event | None = None,
        heard: Callable[[StepRecord], None] = lambda step: None,
    ) -> None:
        self.engine, self._cancel, self._heard = engine, cancel or threading.Event(), heard

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self.engine.prompt.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    @property
    def start(self) -> int:
        """The token put before a text that has no context."""
        tokenizer = self.engine.prompt.tokenizer
        found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return int(found or 0)

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-probability in nats of a continuation after a context, and whether greedy decoding would give it.

        Trailing spaces of the context count as part of the continuation. Text that is too long is cut at its beginning.
        Raises ContextError when the continuation alone does not fit, BusyError, Cancelled."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before = self.encode(context) if context else []
        ids = self.encode(context + continuation)
        return self.of(before or [self.start], ids[len(before) :])

    def of(self, before: Sequence[int], ids: Sequence[int]) -> tuple[float, bool]:
        """The same for token ids; `before` has at least one."""
        if len(ids) >= self.engine.context:
            raise ContextError(
                f"A text to be scored has {len(ids)} tokens, but the context holds "
                f"{self.engine.context}. Load the model with a longer context."
            )
        whole = [*before, *ids][-self.engine.context :]
        start, total, greedy = len(whole) - len(ids), 0.0, True
        for at, logits in follow(self.engine, whole, start, self._cancel, self._heard):
            scores = logits.float().log_softmax(-1)
            total += float(scores[whole[at]])
            greedy = greedy and int(scores.argmax()) == whole[at]
        return total, greedy

    def rolling(self, text: str) -> float:
        """Log-probability in nats of a whole text, in windows that do not overlap and fill the context."""
        ids = [self.start, *self.encode(text)]
        width = self.engine.context - 1
        return sum(self.of(ids[at : at + 1], ids[at + 1 : at + 1 + width])[0] for at in range(0, len(ids) - 1, width))

    def generate_until(self, context: str, stops: Sequence[str], most: int, sampling: Sampling | None = None) -> str:
        """Generates, greedily by default, up to the first of `stops` or `most` tokens. A context that leaves no room
        for these is cut at its beginning."""
        room = max(1, self.engine.context - most)
        ids = (self.encode(context) or [self.start])[-room:]
        drawn = sampling or Sampling()
        limited = Sampling(
            drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p, drawn.repetition_penalty, max(1, most), drawn.seed
        )
        enough, text, tokens = threading.Event(), "", list[int]()
        for piece in self.engine.generate(Ids(ids), limited, enough):
            if piece.step is not None:
                self._heard(piece.step)
            if piece.kind == "token" and piece.token is not None:
                tokens.append(piece.token)
                text += piece.text
                if self._cancel.is_set() or any(stop and stop in text for stop in stops):
                    enough.set()
        if self._cancel.is_set():
            raise Cancelled
        whole: str = self.engine.prompt.tokenizer.decode(tokens, skip_special_tokens=True)
        return whole[: min((whole.find(stop) for stop in stops if stop and stop in whole), default=len(whole))]
