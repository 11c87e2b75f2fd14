"""Guesses tokens with a small dense model (`core.hf.draft`), which reads the text into keys and values of its own.

It sees a text from somewhere on: from its beginning, or of a long one the end. What it has of the text is cut to what
is still the same, so that of accepted guesses nothing is computed again. Source: speculative decoding (Leviathan et
al., arXiv 2211.17192), where the guesses are the likeliest tokens.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from core.hf.cache import reserve
from core.hf.cached_pass import ROWS as KEPT
from core.hf.cached_pass import cached_pass
from core.hf.draft import Draft
from core.hf.reserved_tensor import Allocated
from core.hf.skeleton import release_weights
from core.hf.text_to_text import empty_cache
from core.runtime.draft_head import MOST, common
from core.runtime.program.row_steps import ROWS
from core.runtime.warmup import choose_threads

PIECE = 64  # tokens of a text that are read in one pass
FEW = 8  # tokens that are read with a guess, at most
TIMED = 3  # passes for each number of threads
LATEST = 0.5  # weight of the latest time of a token that is read


class DraftModel:
    """For one loaded model of `vocab` tokens, one text at a time, between two of its passes."""

    def __init__(self, model: Any, draft: Draft, vocab: int, threads: int, ours: bool) -> None:
        """Allocates keys and values, and times its passes. `threads` and `ours` as of `choose_threads`."""
        self._model, self._known, self._vocab, self._room = model, draft.vocab, min(vocab, draft.vocab), draft.positions
        self._allocated = Allocated()
        self._cache = empty_cache(model.config)
        self._layers = reserve(self._cache, draft.positions, self._allocated)
        self.forget()
        cpu = torch.device("cpu")
        self._threads, self.token_ms = choose_threads(
            cpu, threads, lambda: min(map(self._timed, [1] * TIMED)), ours=ours
        )
        self._threads.use("prefill", PIECE)
        self._read_ms = min(map(self._timed, [PIECE] * TIMED)) / PIECE
        self._threads.rest()

    @property
    def bytes(self) -> int:
        """What its keys and values take."""
        return self._allocated.bytes

    def forget(self) -> None:
        """What comes next belongs to no text that is known."""
        self._text: list[int] = []  # the tokens that it has keys and values of
        self._first = 0  # the number of the first of them in the whole text
        for layer in self._layers:
            layer.clear()

    def close(self) -> None:
        """Free all memory, that of the weights included."""
        self.forget()
        release_weights(self._model)
        for layer in self._layers:
            layer.drop()

    def first_ms(self, ids: Sequence[int]) -> float | None:
        """How long it takes to read what comes before a guess of what follows `ids`; None where it cannot guess."""
        first, same = self._same(ids)
        unread = ids[first + same :]
        if max(unread) >= self._known:
            return None
        return len(unread) * self._read_ms if len(unread) > FEW else 0.0

    def read(self, ids: Sequence[int]) -> None:
        """Compute a piece of what comes before a guess."""
        began_s, piece = time.perf_counter(), self._unread(ids)[:PIECE]
        self._threads.use("prefill", len(piece))
        self._compute(piece)
        took_ms = 1e3 * (time.perf_counter() - began_s) / len(piece)
        self._read_ms += LATEST * (took_ms - self._read_ms)

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that are likeliest to follow `ids`, each after the one before: at most ROWS."""
        self._threads.use("decode")
        logits, tokens = self._compute(self._unread(ids)), list[int]()
        while True:
            tokens.append(int(logits[: self._vocab].argmax()))
            if len(tokens) == count:
                return tokens
            logits = self._compute(tokens[-1:])

    def _same(self, ids: Sequence[int]) -> tuple[int, int]:
        """Where in a text it sees it from, and how many tokens from there on it has. The last token is computed in any
        case."""
        first = self._first
        same = min(common(self._text, ids[first:]), len(ids) - 1 - first)
        if same < 1 or len(ids) - first - same > MOST or len(ids) - first + ROWS > self._room:
            return max(0, len(ids) - min(MOST, self._room // 2)), 0
        return first, same

    def _unread(self, ids: Sequence[int]) -> list[int]:
        """What it does not have of a text, once the rest is cut away."""
        self._first, same = self._same(ids)
        for layer in self._layers:
            layer.cut(same) if same else layer.clear()
        del self._text[same:]
        return list(ids[self._first + same :])

    @torch.inference_mode()
    def _compute(self, tokens: list[int]) -> torch.Tensor:
        """[V] logits after the tokens, which follow what it has."""
        try:
            logits: torch.Tensor = cached_pass(self._model, torch.tensor([tokens]), self._cache, **{KEPT: 1}).logits
        except BaseException:
            self.forget()
            raise
        self._text += tokens
        return logits[0, -1]

    def _timed(self, count: int) -> float:
        """Milliseconds of a pass over so many tokens."""
        self.forget()
        began_s = time.perf_counter()
        self._compute([0] * count)
        took_ms = 1e3 * (time.perf_counter() - began_s)
        self.forget()
        return took_ms
