"""One text under two settings, A beside B: the same tokens, decoded by turns.

What A answers greedily to a prompt is the text. Both then read it token by token, in rounds of A, B and B, A in turn,
so that whatever else the machine does meets both. Each reading begins with the cache as after a load. Guessed tokens
have no part in it: the tokens are given."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from core.engine import Engine
from core.errors import SettingError
from core.measure.evaluate.follow import follow
from core.measure.evaluate.run import Progress, restored, start_mode
from core.measure.evaluate.sides import FEWEST, ROUNDS, TOKENS, Side, Sides, check
from core.measure.evaluate.tally import ModeTotals
from core.memory.store import Cancelled
from core.settings.config import Settings
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord


def beside(
    engine: Engine,
    prompt: str,
    a: Settings,
    b: Settings,
    *,
    names: tuple[str, str] = ("A", "B"),
    tokens: int = TOKENS,
    rounds: int = ROUNDS,
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
) -> Sides:
    """Compare two settings on a question, or on a text to continue where the model takes no chats. The engine's own
    settings are restored in any case. Raises SettingError, ContextError, BusyError, Cancelled."""
    check(prompt, tokens, rounds)
    cancel = cancel or threading.Event()
    ids = engine.prompt.encode([{"role": "user", "content": prompt}] if engine.takes_chats else prompt, engine.context)
    if engine.text_to_text:
        raise SettingError("A text-to-text model reads no text token by token, so that two settings are not compared.")
    found = _Reading(), _Reading()
    a, b = (one.with_({"drafts": "off"}) for one in (a, b))  # the tokens are given: each pass reads one
    with restored(engine):
        progress("A answers", 0.0)
        start_mode(engine, a)
        answer = _answer(engine, ids, min(tokens, engine.context - len(ids)) + 1, cancel)
        whole = [*ids, *answer]
        turns = [at for number in range(rounds) for at in ((0, 1) if number % 2 == 0 else (1, 0))]
        for turn, at in enumerate(turns):
            progress(f"Round {turn // 2 + 1} of {rounds}: {'AB'[at]}", (turn + 1) / (len(turns) + 1))
            start_mode(engine, (a, b)[at])
            found[at].read(engine, whole, len(ids), cancel)
    progress("Compared", 1.0)
    equal, agreed, kl = _compared(found[0].logits, found[1].logits)
    text = engine.prompt.tokenizer.decode(answer)
    differing = {name: (a[name], b[name]) for name in a if a[name] != b[name]}
    first, second = (one.side() for one in found)
    about = engine.model_name, names, prompt, text, len(ids), rounds
    return Sides(*about, differing, first, second, equal, agreed, kl)


def _answer(engine: Engine, ids: Sequence[int], most: int, cancel: threading.Event) -> list[int]:
    """What the model answers greedily, without an end. Raises SettingError where that is too short to be compared."""

    def draw(so_far: Sequence[int], logits: torch.Tensor) -> int:
        row = logits[0].clone()
        row[[*engine.prompt.ends]] = -math.inf
        return int(row.argmax())

    pieces = engine.generate(Ids(ids), Sampling(max_new_tokens=most), cancel, draw)
    answer = [piece.token for piece in pieces if piece.kind == "token" and piece.token is not None]
    if cancel.is_set():
        raise Cancelled
    if len(answer) <= FEWEST:
        raise SettingError(f"The context has room for {len(answer)} more tokens: ask a shorter question.")
    return answer


@dataclass(slots=True)
class _Reading:
    """What was measured under one of the settings, round by round."""

    first_ms: list[float] = field(default_factory=list)
    token_ms: list[list[float]] = field(default_factory=list)
    totals: ModeTotals = field(default_factory=ModeTotals)
    logits: list[torch.Tensor] = field(default_factory=list)  # [V] of each decode pass, in the first round

    def read(self, engine: Engine, ids: Sequence[int], start: int, cancel: threading.Event) -> None:
        """Read one round."""
        prompt_ms, decoded, first = 0.0, list[float](), not self.logits

        def heard(step: StepRecord) -> None:
            nonlocal prompt_ms
            self.totals(step)
            if step.phase == "decode":
                decoded.append(step.total_ms)
            else:
                prompt_ms += step.total_ms

        for at, logits in follow(engine, ids, start, cancel, heard):
            if first and at > start:
                self.logits.append(logits.float().cpu().clone())
        self.first_ms.append(prompt_ms)
        self.token_ms.append(decoded)

    def side(self) -> Side:
        """All rounds together."""
        of, times = self.totals, tuple(median(one) for one in zip(*self.token_ms, strict=True))
        return Side(
            median(self.first_ms),
            times,
            of.rate("hits", "requests"),
            (of.total("requests") - of.total("hits")) / of.tokens,
            of.total("stall_ms") / of.tokens,
            of.total("link_bytes") / of.tokens,
            of.rate("changed", "assignments"),
            of.emulated,
        )


def _compared(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[int, int, float]:
    """Of each token's logits: how many are equal, how many have the same maximum, and the mean divergence."""
    equal = agreed = 0
    kl = 0.0
    for one, other in zip(a, b, strict=True):
        equal += torch.equal(one, other)
        agreed += int(one.argmax()) == int(other.argmax())
        mine, its = one.log_softmax(-1), other.log_softmax(-1)
        p = mine.exp()
        kl += float(torch.where(p > 0, p * (mine - its), 0.0).sum())
    return equal, agreed, kl / len(a)
