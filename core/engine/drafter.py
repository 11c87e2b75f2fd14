"""Decides before every decoded token how many guessed ones its pass verifies, and by whom they are guessed, and learns
from what came of it."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Protocol

from core.engine.draft_gate import DraftGate, Worth
from core.engine.draft_lookup import Guess
from core.engine.draft_prefetch import DraftPrefetch
from core.engine.draft_trace import NOTHING, Foretold, RoutingTrace
from core.engine.pass_price import Load
from core.engine.sequence import Sequence
from core.runtime.draft_head import DraftHead
from core.runtime.draft_model import DraftModel
from core.runtime.program.program import Program
from core.runtime.program.row_steps import ROWS
from core.settings.drafts import DraftSettings
from core.types import StepRecord

REST, SELDOM = 63, 15  # passes without a look at guesses, at most, after some that did not pay, unless the text repeats
# itself; and at computed ones
HEAD_SLOPE = 0.5  # of a token's time that each further row takes with a guess of the head, before any was measured
HEAD_MATCHED = 8  # guesses of head and model are expected to be as good as those after so many tokens that matched
SOON = 64  # tokens of an answer within which a model is to win back what it takes to read the text
NOT_FAST = "the model is not computed by the fast arithmetic's program on a CPU"
NO_HEAD = (
    "the model was loaded without a head for further tokens: it has none of a known kind, or this was chosen only "
    "afterwards, and the model is to be loaded again"
)
NO_MODEL = "no draft model was named when the model was loaded (draft)"


class Guesser(Protocol):
    """Guesses tokens by computing them."""

    def first_ms(self, ids: Tokens[int]) -> float | None:
        """How long it takes to `read` what comes before a guess of what follows `ids`; None where it cannot guess."""

    def read(self, ids: Tokens[int]) -> None:
        """Compute a piece of that."""

    def guess(self, ids: Tokens[int], count: int) -> list[int]:
        """The `count` tokens that are likeliest to follow `ids`."""

    def forget(self) -> None:
        """Keep nothing of the text."""


class Drafter:
    """For one loaded model, over all its answers. `say(text)` is called with why it does nothing."""

    def __init__(
        self,
        program: Program | None,
        most: int,
        head: DraftHead | None = None,
        model: DraftModel | None = None,
        trace: RoutingTrace | None = None,
        prefetch: DraftPrefetch | None = None,
    ) -> None:
        """`program`: computes tokens that are verified with the bits of those computed alone; None = nothing does.
        `most` of them may be taken back. `trace` foretells their experts, and `prefetch` fetches those that are
        missing; None = nothing does."""
        self.say: Callable[[str], None] = lambda text: None
        self.gate, self.head_gate = DraftGate(), DraftGate(HEAD_SLOPE)
        self.model_gate = DraftGate(guess_ms=0.0 if model is None else model.token_ms)
        self._objection = NOT_FAST if program is None else ""
        self._program, self._most, self.head, self.model = program, min(ROWS - 1, most), head, model
        self._trace, self.prefetch = trace, prefetch
        self._foretold = NOTHING  # of the pass that comes
        self._looks_up = self._asks_head = False  # in the text
        self._asked: list[tuple[Guesser, DraftGate]] = []  # that compute guesses
        self._built_s = self._took_s = self._first_s = 0.0
        self._settle_s = self._late_s = 0.0  # what bringing states up to date took, the last time and before this pass
        self._guess: Guess | None = None
        self._by: DraftGate | None = None  # of those asked, the gate of the one that has guessed what the pass verifies
        self._rest = self._rested = 0  # passes to come without a look, and how many there were the last time
        self._asks_in = self._asked_in = 0  # the same of those that compute guesses
        self._unseen = 0  # passes since the last look
        self._looks = False  # at the pass that comes
        self._times = False  # what that pass takes counts: nothing else is compared in it, which takes time of its own

    def configure(self, old: DraftSettings | None, new: DraftSettings) -> None:
        """Guess, or do not, from the next pass on."""
        self._looks_up = new.by_lookup and not self._objection
        self._asked.clear()
        known = (self.head, self.head_gate, new.by_head), (self.model, self.model_gate, new.by_model)
        for one, gate, wanted in known:
            if one is not None and wanted and not self._objection:
                self._asked.append((one, gate))
            elif one is not None:
                one.forget()
        self._asks_head = any(one is self.head for one, _ in self._asked)
        if self._trace is not None and not (self._looks_up or self._asked):
            self._trace.forget()
        lacks = {"mtp": (self.head, NO_HEAD), "model": (self.model, NO_MODEL)}.get(new.source)
        why = self._objection or (lacks[1] if lacks is not None and lacks[0] is None else "")
        if new != old and new.source != "off" and why:
            self.say(f"drafts {new.source} is not used: {why}")

    @property
    def guesses(self) -> bool:
        """Whether passes may verify tokens that it guesses."""
        return self._looks_up or bool(self._asked)

    def restart(self) -> None:
        """What passes took is of other settings."""
        for gate in (self.gate, self.head_gate, self.model_gate):
            gate.restart()
        if self.prefetch is not None:
            self.prefetch.restart()

    def close(self) -> None:
        """Free the model that guesses."""
        self._asked.clear()
        if self.model is not None:
            self.model.close()

    def draft(self, sequence: Sequence, allowed: bool) -> None:
        """Before the pass over the last token of a sequence: set what it verifies beside, which is nothing unless
        `allowed`."""
        began_s, memory, self._late_s = time.perf_counter(), sequence.kv.memory, 0.0
        if memory.unsettled:
            memory.settle()
            self._settle_s = self._late_s = time.perf_counter() - began_s
            began_s += self._late_s
        sequence.draft = []
        self._guess, self._by, self._took_s, self._first_s = None, None, 0.0, 0.0
        self._foretold = NOTHING
        self._rest = max(0, self._rest - 1)
        looks_up = self._looks_up and (not self._rest or sequence.lookup.repeats(sequence.ids))
        self._asks_in = max(0, self._asks_in - 1)
        asks = bool(self._asked) and not self._asks_in
        self._looks, self._times = looks_up or asks, allowed
        if not self._looks:
            self._unseen += 1
            return
        for _, gate in self._asked if self._unseen else ():
            gate.passed_by(self._unseen)
        self._unseen = 0
        most = min(self._most, sequence.stop.limit - sequence.drawn - 1)
        self._built_s = self._program.built_s if self._program is not None else 0.0
        found, asked = Worth(), None
        if looks_up:
            self._guess = guess = sequence.lookup.guess(sequence.ids, most)
            self._looks = guess is not None or asks
            self._unseen += not self._looks
            if guess is not None and allowed:
                if self.gate.ready:
                    self._foretold = self._foretell(sequence, guess.tokens, guess.place)
                found = self.gate.choose(guess.matched, len(guess.tokens), self._foretold.loads)
                self._rest = self._rested = 0 if found.guesses else min(REST, 2 * self._rested + 1)
        best, soon = found, min(SOON, sequence.stop.limit - sequence.drawn)
        asks = asks and allowed and most > 0
        for one, gate in self._asked if asks else ():
            worth = gate.choose(HEAD_MATCHED, most)
            if worth.guesses and worth.faster > best.faster:
                first_ms = one.first_ms(sequence.ids)
                if first_ms is not None and gate.wins_back(worth, first_ms, soon):
                    best, asked, self._by = worth, one, gate
        if asked is not None and self._by is not None:
            drafted = self._asked_for(asked, sequence, best.guesses)
            self._foretold = self._foretell(sequence, drafted)
            if self._foretold.loads:  # now that it is known what they are
                drafted = drafted[: self._by.choose(HEAD_MATCHED, len(drafted), self._foretold.loads).guesses]
            sequence.draft = drafted
        elif self._guess is not None:
            sequence.draft = self._guess.tokens[: found.guesses]
        if asks:
            pays = asked is not None and bool(sequence.draft)
            self._asks_in = self._asked_in = 0 if pays else min(SELDOM, 2 * self._asked_in + 1)
        self._took_s = time.perf_counter() - began_s

    def fetch(self, sequence: Sequence) -> None:
        """The pass begins: fetch what its guesses are foretold to need."""
        if self.prefetch is not None and self._foretold.missing:
            self.prefetch.fetch(self._foretold, len(sequence.draft), self._usual_ms(len(sequence.draft)))

    def _usual_ms(self, guesses: int) -> float | None:
        """What such passes take."""
        return (self._by or self.gate).took_ms(1 + guesses) if guesses else None

    def _foretell(self, sequence: Sequence, draft: Tokens[int], place: int = -1) -> Foretold:
        return self._trace.foretell(sequence.ids, draft, place) if self._trace is not None and draft else NOTHING

    def _asked_for(self, by: Guesser, sequence: Sequence, count: int) -> list[int]:
        """So many guesses, or none where the sequence is cancelled meanwhile."""
        began_s, first = time.perf_counter(), False
        while by.first_ms(sequence.ids):
            if sequence.cancelled:
                return []
            by.read(sequence.ids)
            first = True
        self._first_s = time.perf_counter() - began_s if first else 0.0
        return by.guess(sequence.ids, count)

    def computed(self, sequence: Sequence, drawn: Tokens[int], count: int, allowed: bool) -> None:
        """After a pass over the next `count` tokens of a sequence, and its draft: it has drawn these tokens, and others
        may be guessed if `allowed`."""
        if not (self._looks_up or self._asked):
            return
        rows = count + max(0, len(drawn) - 1)
        first = sequence.computed - rows
        if self._trace is not None:
            self._trace.passed(sequence.ids, first, rows)
        if self.head is None or self._program is None or not self._asks_head:
            return
        self.head.seen(sequence.ids, first, rows, self._program.states())
        if allowed and count > 1 and drawn and self.head.ready(ids := [*sequence.ids, *drawn]):
            began_s = time.perf_counter()  # of a prompt: no guess is to wait for it
            self.head.read(ids)
            self._took_s += time.perf_counter() - began_s

    def passed(self, sequence: Sequence, drawn: list[int], step: StepRecord) -> None:
        """That pass has drawn these tokens: all of the draft that were right, and the one that follows them."""
        if not self._looks:
            return
        verified, guess = len(sequence.draft), self._guess
        if guess is not None:
            compared = len(drawn) if self._by is not None else verified or 1
            right = _right(guess.tokens[:compared], drawn)
            self.gate.judged(guess.matched, right, min(compared, right + 1))
        if self._by is not None and verified:
            self._by.judged(HEAD_MATCHED, len(drawn) - 1, min(verified, len(drawn)))
        if not self._times:
            return
        building_s = self._program.built_s - self._built_s if self._program is not None else 0.0  # once for such a pass
        first_ms = 1e3 * self._first_s
        took_ms = step.total_ms - 1e3 * (building_s + self._late_s)
        took_ms += 1e3 * self._settle_s - first_ms if verified else -1e3 * self._took_s
        load = self._load(verified)
        if self.prefetch is not None and verified:
            self.prefetch.passed(took_ms, self._usual_ms(verified), step.stall_ms)
        for gate in (*([self.gate] if self._looks_up else []), *[own for _, own in self._asked]):
            if not verified or gate is (self._by or self.gate):
                saved = gate.took(verified, len(drawn) - 1, took_ms, first_ms, load)
                if verified:
                    step.draft_saved_ms = saved

    def _load(self, verified: int) -> Load | None:
        """What was foretold of a pass that has verified so many tokens, or of one of a single row what it had."""
        if verified:
            loads = self._foretold.loads
            return loads[verified] if verified < len(loads) else None
        return self._trace.load() if self._trace is not None else None

    def told(self, step: StepRecord) -> None:
        """Have the record of a pass say what guessing took."""
        if self._took_s:
            step.draft_ms, self._took_s = 1e3 * self._took_s, 0.0
        if self.head is not None and self._asks_head and (use := self.head.take_use()) is not None:
            step.draft_requests, step.draft_hits, step.draft_bytes = use


def _right(guessed: Tokens[int], drawn: Tokens[int]) -> int:
    """How many of the guessed tokens were drawn."""
    for at, (one, other) in enumerate(zip(guessed, drawn, strict=False)):
        if one != other:
            return at
    return min(len(guessed), len(drawn))
