"""Makes forward passes over sequences: applies requested settings before each, draws the tokens that follow, and
records it. When a GPU runs out of memory, it frees some slots and makes the pass once more."""

import time
from collections.abc import Callable

import torch

from core.engine.loading import LoadedModel
from core.engine.sequence import Sequence
from core.engine.settings_controller import EngineParts, SettingsController
from core.errors import DeviceError, DeviceFullError
from core.runtime.batch import Batch, Share
from core.runtime.out_of_memory import faulted, shortage
from core.runtime.pipeline import Pipeline
from core.types import Phase, StepRecord

Work = tuple[tuple[Sequence, int], ...]
"""The next tokens, so many of each sequence, that one pass computes."""
FULL = (
    "The device ran out of memory: it has no room for {}. Lower the context or the budget, or close what else uses the "
    "device."
)


class Passes:
    """Of one model, for the holder of its lock."""

    def __init__(
        self, loaded: LoadedModel, pipeline: Pipeline, controller: SettingsController, parts: EngineParts
    ) -> None:
        self._loaded, self._pipeline, self._controller, self._parts = loaded, pipeline, controller, parts
        self._prefix_cache = parts.memory.prefix_cache
        self.chunk = loaded.sizes.chunk  # most tokens in one pass without borrowing memory
        self._ended_s, self._requests = 0.0, list[int]()  # of the last pass
        self._encodes = loaded.shape.encoder_layers > 0

    def next_count(self, sequence: Sequence, left: int, room: int) -> int:
        """How many of a sequence's next `left` tokens are read in one pass that has room for `room`. Of a text-to-text
        model all tokens of the prompt first, which the encoder computes, then each that the decoder does."""
        if not self._encodes:
            return min(left, room)
        return 1 if sequence.computed else min(sequence.prompt - 1, room)

    def max_chunk(self, unread: int) -> int:
        """Most tokens of the next pass over prompts, of which so many are still to be read."""
        return self._controller.max_prefill_chunk(self._parts, unread) or self.chunk

    def release_workspace(self) -> None:
        """Give borrowed slots back: what was read has ended or was aborted, and nothing is leased."""
        self._controller.reserve_workspace(self._parts, 0)

    @torch.inference_mode()
    def run(self, phase: Phase, *work: tuple[Sequence, int], total: int = 0) -> tuple[list[list[int]], StepRecord]:
        """Compute the next tokens, so many of each sequence, in one forward pass; draw the token that follows where all
        of a sequence's are computed, and those after it as far as they are the ones of its draft, which only a sequence
        alone in its pass has. `total` = tokens of a prompt that is read in several passes.

        When the device runs out of memory, some slots are freed and the pass is made once more. Raises DeviceFullError
        when that does not help, and DeviceError for other errors that a GPU reports.
        """
        try:
            return self._once(phase, work, total)
        except RuntimeError as error:
            lack = self._shortage(error)
        # the error is gone by now, and with it what the frames of the pass held
        self._make_room(work, lack)
        try:
            return self._once(phase, work, total)
        except RuntimeError as error:
            raise DeviceFullError(FULL.format(self._shortage(error))) from error

    def _shortage(self, error: RuntimeError) -> str:
        """What the device had no memory for. Any other error is raised."""
        lack = shortage(error)
        if lack:
            return lack
        if self._loaded.device.type == "cuda" and faulted(error):
            raise DeviceError.of(error) from error
        raise error

    def _make_room(self, work: Work, lack: str) -> None:
        """After an aborted pass: roll it back, and free some slots. Raises DeviceFullError when there are none to free,
        or the pass cannot be rolled back."""
        self._pipeline.recall()
        self._parts.memory.expert_cache.abandon()
        for sequence, _ in work:
            if not sequence.kv.memory.rollback(sequence.kv, sequence.checkpoints):
                raise DeviceFullError(FULL.format(lack))
        if not self._controller.make_room(self._parts):
            raise DeviceFullError(FULL.format(lack))

    def _once(self, phase: Phase, work: Work, total: int) -> tuple[list[list[int]], StepRecord]:
        """One forward pass, as `run` describes it."""
        started_s, parts, device, asked = time.perf_counter(), self._parts, self._loaded.device, len(work)
        if phase != "decode" or asked > 1:
            self._pipeline.recall()
        self._controller.apply(parts)
        if not self._controller.reserve_workspace(parts, sum(count for _, count in work) if phase == "prefill" else 0):
            work = _first(work, self.chunk)  # settings that came since do not leave the memory
        if phase == "decode" and len(work) == 1:
            parts.drafter.draft(work[0][0], self._drafts_allowed())
        parts.memory.ledger.begin()
        batch = Batch(phase, tuple([sequence.share(count) for sequence, count in work]))
        self._pipeline.begin(batch)
        if work[0][0].draft:
            parts.drafter.fetch(work[0][0])
        held, taken_over = [sequence.computed for sequence, _ in work], sum(sequence.taken_over for sequence, _ in work)
        ahead = [(sequence.request, sequence.ids[sequence.computed + n :][: self.chunk]) for sequence, n in work]
        self._pipeline.announce(*[one for one in ahead if one[1]])  # searched for while these ones are computed
        began_s = time.perf_counter()
        keep = 1 + len(work[0][0].draft)
        progress = self._progress(work, total) if phase == "prefill" else None
        logits = self._pipeline.forward(batch, keep, _stop(work), progress, settles=False)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # prefetches may go on
        model_s = time.perf_counter() - began_s
        draws_s = time.perf_counter()
        try:
            tokens = [self._draw(sequence, row) for (sequence, _), row in zip(work, logits.split(keep), strict=True)]
        except BaseException:
            for (sequence, _), start in zip(work, held, strict=True):
                sequence.kv.abort_pass(start)
            self._pipeline.settle()
            raise
        self._pipeline.settle(self._follows(phase, work[0][0], tokens) if asked == keep == 1 else None)
        drew_s = time.perf_counter()
        first, refused = work[0][0], keep - len(tokens[0]) if keep > 1 else 0
        if refused:
            first.kv.memory.take_back(first.kv, refused)
        follow = [(one, drawn) for (one, _), drawn in zip(work, tokens, strict=True) if drawn]
        self._pipeline.announce(*[(one.request, drawn[-1:]) for one, drawn in follow if one.continues(drawn)])
        changes = self._controller.take_changes()
        used = parts.memory.ledger.passed(decoded=phase == "decode")
        budget = parts.memory.ledger.budget_bytes
        step = parts.recorder.end(started_s, model_s, used, budget, changes, keep - 1, refused)
        if len(work) == 1:
            parts.drafter.computed(first, tokens[0], work[0][1], phase == "prefill" and self._drafts_allowed())
        if not step.lossless:
            lossy_key = self._prefix_cache.lossy_key(self._controller.applied)
            for (sequence, _), start in zip(work, held, strict=True):
                sequence.kv.mark_lossy(start, lossy_key)
        step.cached_tokens = taken_over
        step.exact = all(sequence.kv.exact for sequence, _ in work)
        step.sample_ms = (drew_s - draws_s) * 1e3
        requests, before = [sequence.request for sequence, _ in work], self._requests
        if requests == before or not set(before).isdisjoint(requests):
            step.between_ms = (started_s - self._ended_s) * 1e3
        if parts.recorder.enabled:
            parts.telemetry.catch_up()
        self._ended_s, self._requests = time.perf_counter(), requests
        step.spent(self._ended_s - started_s)
        if phase == "decode" and len(work) == 1:
            parts.drafter.passed(first, tokens[0], step)
        parts.drafter.told(step)
        first.draft = []
        parts.host.passed(step)
        if parts.recorder.enabled:
            parts.telemetry.add(step)
        return [*tokens, *[[] for _ in range(asked - len(work))]], step

    def _follows(self, phase: Phase, sequence: Sequence, tokens: list[list[int]]) -> Batch | None:
        """The pass over the token that was just drawn, where it is sure to be the next one of this text."""
        (drawn,) = tokens
        if phase != "decode" or not drawn or self._parts.drafter.guesses or not sequence.continues(drawn):
            return None
        return Batch("decode", (Share(drawn, sequence.kv, sequence.request),))

    def _drafts_allowed(self) -> bool:
        """Whether a pass may verify guessed tokens: where nothing that is measured or recorded of it would be blurred
        by them."""
        prediction, lossy = self._parts.prediction, self._controller.applied.lossy
        comparing = prediction.throttle.comparing or self._parts.host.throttle.comparing
        return not (lossy.active or comparing or prediction.capture.captures)

    def _progress(self, work: Work, total: int) -> Callable[[int], None] | None:
        """Reports how far prompts are read when a pass over them reaches a layer; None where it is of no interest."""
        read, layers = [one for one in work if one[0].reading is not None], self._loaded.shape.layers

        def reached(layer: int) -> None:
            for sequence, count in read:
                sequence.reached(layer, layers, count, total)

        return reached if read else None

    def _draw(self, sequence: Sequence, logits: torch.Tensor) -> list[int]:
        """The token that follows, from logits [1 + d, V] of d drafted tokens, and those after it as long as they are
        the drafted ones; none while tokens of the sequence are left to compute."""
        if sequence.computed < len(sequence.ids):
            return []
        lossy = self._controller.applied.lossy
        if lossy.active:
            sequence.sample.keep(sequence.drawn, logits[0], lossy.quality_rate)
        drawn = [sequence.draw(sequence.ids, logits[:1])]
        for row, guess in enumerate(sequence.draft, 1):
            if drawn[-1] != guess or guess in sequence.stop.ends:
                break
            drawn.append(sequence.draw(sequence.ids + drawn, logits[row : row + 1]))
        return drawn


def _stop(work: Work) -> Callable[[], bool]:
    """Whether no sequence wants the pass any more."""
    cancels = [sequence.stop.cancel for sequence, _ in work]
    return cancels[0].is_set if len(cancels) == 1 else lambda: all(one.is_set() for one in cancels)


def _first(work: Work, tokens: int) -> Work:
    """The beginning of the work, of at most so many tokens."""
    found = []
    for sequence, count in work:
        if tokens:
            found.append((sequence, min(count, tokens)))
            tokens -= found[-1][1]
    return tuple(found)
