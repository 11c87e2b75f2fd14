"""Decides before every decoded token how many guessed ones its pass verifies, and learns from what came of it."""

from collections.abc import Callable

from core.engine.draft_gate import DraftGate
from core.engine.draft_lookup import Guess
from core.engine.sequence import Sequence
from core.runtime.program.gpu.program import GpuProgram
from core.runtime.program.program import Program
from core.runtime.program.row_steps import ROWS
from core.settings.drafts import DraftSettings
from core.types import StepRecord

REST = 3  # passes without a look at guesses, at most, after some that did not pay
NOT_FAST = "the model is not computed by the fast arithmetic's program on a CPU"
STATES = "the model keeps states, of which no token can be taken back"


class Drafter:
    """For one loaded model, over all its answers. `say(text)` is called with why it does nothing."""

    def __init__(self, program: Program | GpuProgram | None, most: int) -> None:
        """`program`: computes tokens that are verified with the bits of those computed alone; None = nothing does.
        `most` of them may be taken back."""
        self.say: Callable[[str], None] = lambda text: None
        self.gate = DraftGate()
        self._objection = NOT_FAST if program is None else "" if most > 0 else STATES
        self._program, self._most, self._used = program, min(ROWS - 1, most), False
        self._built_s = 0.0
        self._guess: Guess | None = None
        self._rest = self._rested = 0  # passes to come without a look, and how many there were the last time
        self._looks = False  # at the pass that comes

    def configure(self, old: DraftSettings | None, new: DraftSettings) -> None:
        """Guess, or do not, from the next pass on."""
        self._used = new.source != "off" and not self._objection
        if new != old and new.source != "off" and self._objection:
            self.say(f"drafts {new.source} is not used: {self._objection}")

    def draft(self, sequence: Sequence, allowed: bool) -> None:
        """Before the pass over the last token of a sequence: set what it verifies beside, which is nothing unless
        `allowed`."""
        sequence.draft = []
        self._guess = None
        self._rest, self._looks = max(0, self._rest - 1), self._used and not self._rest
        if not self._looks:
            return
        most = min(self._most, sequence.stop.limit - sequence.drawn - 1)
        self._built_s = self._program.built_s if self._program is not None else 0.0
        self._guess = guess = sequence.lookup.guess(sequence.ids, most)
        if guess is not None and allowed:
            sequence.draft = guess.tokens[: self.gate.choose(guess.matched, len(guess.tokens))]
            self._rest = self._rested = 0 if sequence.draft else min(REST, 2 * self._rested + 1)

    def passed(self, sequence: Sequence, drawn: list[int], step: StepRecord) -> None:
        """That pass has drawn these tokens: all of the draft that were right, and the one that follows them."""
        if not self._looks:
            return
        verified, guess = len(sequence.draft), self._guess
        if guess is not None:
            right = len(drawn) - 1 if verified else int(drawn[0] == guess.tokens[0])
            self.gate.judged(guess.matched, right, min(verified, right + 1) or 1)
        building_s = self._program.built_s - self._built_s if self._program is not None else 0.0  # once for such a pass
        step.draft_saved_ms = self.gate.took(verified, len(drawn) - 1, step.total_ms - 1e3 * building_s)
