"""Decides before every decoded token how many guessed ones its pass verifies, and by whom they are guessed, and learns
from what came of it."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens

from core.engine.draft_gate import DraftGate, Worth
from core.engine.draft_lookup import Guess
from core.engine.sequence import Sequence
from core.runtime.draft_head import DraftHead
from core.runtime.program.program import Program
from core.runtime.program.row_steps import ROWS
from core.settings.drafts import DraftSettings
from core.types import StepRecord

REST = 3  # passes without a look at guesses, at most, after some that did not pay
HEAD_SLOPE = 0.5  # of a token's time that each further row takes with a guess of the head, before any was measured
HEAD_MATCHED = 8  # the head's guesses are expected to be as good as those that follow so many tokens that matched
NOT_FAST = "the model is not computed by the fast arithmetic's program on a CPU"
NO_HEAD = (
    "the model was loaded without a head for further tokens: it has none of a known kind, or this was chosen only "
    "afterwards, and the model is to be loaded again"
)


class Drafter:
    """For one loaded model, over all its answers. `say(text)` is called with why it does nothing."""

    def __init__(self, program: Program | None, most: int, head: DraftHead | None = None) -> None:
        """`program`: computes tokens that are verified with the bits of those computed alone; None = nothing does.
        `most` of them may be taken back."""
        self.say: Callable[[str], None] = lambda text: None
        self.gate, self.head_gate = DraftGate(), DraftGate(HEAD_SLOPE)
        self._objection = NOT_FAST if program is None else ""
        self._program, self._most, self._head = program, min(ROWS - 1, most), head
        self._settings = DraftSettings()
        self._looks_up = self._asks = False  # in the text, and the head
        self._built_s = self._took_s = 0.0
        self._settle_s = self._late_s = 0.0  # what bringing states up to date took, the last time and before this pass
        self._guess: Guess | None = None
        self._by_head = False  # the head has guessed what the pass verifies
        self._rest = self._rested = 0  # passes to come without a look, and how many there were the last time
        self._looks = False  # at the pass that comes

    def configure(self, old: DraftSettings | None, new: DraftSettings) -> None:
        """Guess, or do not, from the next pass on."""
        self._looks_up = new.by_lookup and not self._objection
        self._asks = new.by_head and not self._objection and self._head is not None
        if self._head is not None and not self._asks:
            self._head.forget()
        why = self._objection or (NO_HEAD if new.source == "mtp" and self._head is None else "")
        if new != old and new.source != "off" and why:
            self.say(f"drafts {new.source} is not used: {why}")

    def restart(self) -> None:
        """What passes took is of other settings."""
        self.gate.restart()
        self.head_gate.restart()

    def draft(self, sequence: Sequence, allowed: bool) -> None:
        """Before the pass over the last token of a sequence: set what it verifies beside, which is nothing unless
        `allowed`."""
        began_s, memory, self._late_s = time.perf_counter(), sequence.kv.memory, 0.0
        if memory.unsettled:
            memory.settle()
            self._settle_s = self._late_s = time.perf_counter() - began_s
            began_s += self._late_s
        sequence.draft = []
        self._guess, self._by_head, self._took_s = None, False, 0.0
        self._rest, looks_up = max(0, self._rest - 1), self._looks_up and not self._rest
        self._looks = looks_up or self._asks
        if not self._looks:
            return
        most = min(self._most, sequence.stop.limit - sequence.drawn - 1)
        self._built_s = self._program.built_s if self._program is not None else 0.0
        found = head = Worth()
        if looks_up:
            self._guess = guess = sequence.lookup.guess(sequence.ids, most)
            if guess is not None and allowed:
                found = self.gate.choose(guess.matched, len(guess.tokens))
                self._rest = self._rested = 0 if found.guesses else min(REST, 2 * self._rested + 1)
        if self._head is not None and self._asks and allowed and most > 0 and self._head.ready(sequence.ids):
            head = self.head_gate.choose(HEAD_MATCHED, most)
            if head.guesses and head.faster > found.faster:
                self._by_head = True
                sequence.draft = self._head.guess(sequence.ids, head.guesses)
        if self._guess is not None and not self._by_head:
            sequence.draft = self._guess.tokens[: found.guesses]
        self._took_s = time.perf_counter() - began_s

    def computed(self, sequence: Sequence, drawn: Tokens[int], count: int, allowed: bool) -> None:
        """After a pass over the next `count` tokens of a sequence, and its draft: it has drawn these tokens, and others
        may be guessed if `allowed`."""
        if self._head is None or self._program is None or not self._asks:
            return
        began_s, rows = time.perf_counter(), count + max(0, len(drawn) - 1)
        ids = [*sequence.ids, *drawn]
        self._head.seen(ids, sequence.computed - rows, self._program.states()[:rows])
        if allowed and count > 1 and drawn and self._head.ready(ids):  # a prompt: no guess is to wait for it
            self._head.read(ids)
        self._took_s += time.perf_counter() - began_s

    def passed(self, sequence: Sequence, drawn: list[int], step: StepRecord) -> None:
        """That pass has drawn these tokens: all of the draft that were right, and the one that follows them."""
        if not self._looks:
            return
        verified, guess = len(sequence.draft), self._guess
        if guess is not None:
            compared = len(drawn) if self._by_head else verified or 1
            right = _right(guess.tokens[:compared], drawn)
            self.gate.judged(guess.matched, right, min(compared, right + 1))
        if self._by_head:
            self.head_gate.judged(HEAD_MATCHED, len(drawn) - 1, min(verified, len(drawn)))
        building_s = self._program.built_s - self._built_s if self._program is not None else 0.0  # once for such a pass
        took_ms = step.total_ms - 1e3 * (building_s + self._late_s)
        took_ms += 1e3 * (self._settle_s if verified else -self._took_s)
        for gate in (self.gate,) if self._head is None else (self.gate, self.head_gate):
            if not verified or gate is (self.head_gate if self._by_head else self.gate):
                saved = gate.took(verified, len(drawn) - 1, took_ms)
                if verified:
                    step.draft_saved_ms = saved

    def told(self, step: StepRecord) -> None:
        """Have the record of a pass say what guessing took."""
        if self._took_s:
            step.draft_ms, self._took_s = 1e3 * self._took_s, 0.0
        if self._head is not None and self._asks:
            step.draft_requests, step.draft_hits, step.draft_bytes = self._head.take_use()


def _right(guessed: Tokens[int], drawn: Tokens[int]) -> int:
    """How many of the guessed tokens were drawn."""
    for at, (one, other) in enumerate(zip(guessed, drawn, strict=False)):
        if one != other:
            return at
    return min(len(guessed), len(drawn))
