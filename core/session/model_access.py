"""Who has the model of an engine: an answer, a workbench, or, as long as nobody else wants it, the quality meter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from core.cache.expert_cache import Residency
from core.capacity.memory_accounting import Ledger
from core.capacity.sizes import Sizes
from core.errors import BusyError
from core.hf import ExpertsSite
from core.memory.transfer import TransferEngine
from core.prediction.predictor_host import Foresight
from core.quality.meter import Meter
from core.quality.report import Quality
from core.runtime.kv_cache import KVCache
from core.runtime.measurement import Workbench
from core.runtime.moe_step import MoEStep
from core.runtime.recorder import Recorder
from core.runtime.telemetry import Telemetry
from core.runtime.warmup import Threads
from core.session.model_lock import Turn
from core.session.settings_controller import Knobs, Turned
from core.types import ModelShape


class Lending:
    """A part of `core.engine.Engine`."""

    model: Any
    device: torch.device
    context: int
    sizes: Sizes
    shape: ModelShape
    residency: Residency
    transfers: TransferEngine
    recorder: Recorder
    telemetry: Telemetry
    ledger: Ledger
    foresight: Foresight
    meter: Meter
    _sites: tuple[ExpertsSite, ...]
    _step: MoEStep
    _kv: KVCache
    _threads: Threads
    _knobs: Knobs
    _turned: Turned

    def __init__(self) -> None:
        self._turn, self._busy_because = Turn(), ""

    @property
    def busy(self) -> bool:
        """An answer is being generated, or somebody has the workbench."""
        return self._turn.taken

    @contextmanager
    def workbench(self, because: str) -> Iterator[Workbench]:
        """The model for one caller alone, to run and measure. Raises BusyError; so does meanwhile whoever asks
        something of it, with `because` for a reason."""
        self._take("The model is answering. Stop the answer first.")
        self._busy_because = because
        with self._lent() as bench:
            yield bench

    @property
    def unscored(self) -> int:
        """Answers of which `audit` still has something to say."""
        return self.meter.due

    @property
    def quality(self) -> Quality | None:
        """What lossy options cost in quality, over the last answers that were scored; None before any was."""
        return self.meter.quality

    def audit(self, stop: threading.Event | None = None) -> Quality | None:
        """Score the answer that has waited longest against the exact model; METHODS section 6.

        None when there is none, when the model is in use, and when `stop` was set or somebody else wanted the model
        meanwhile: that caller waits for one layer at most, and the answer is scored another time. The cache is left as
        it was. Any thread may call this.
        """
        if not self._turn.visit():
            return None
        if not self.meter.due:
            self._give()
            return None
        with self._lent() as bench:
            return self.meter.audit(bench, lambda: self._turn.asked or (stop is not None and stop.is_set()))

    def _take(self, otherwise: str) -> None:
        """Have the model, from now until `_give`. Raises BusyError with the reason, or `otherwise`."""
        if not self._turn.take():
            raise BusyError(self._busy_because or otherwise)

    def _give(self) -> None:
        self._busy_because = ""
        self._turn.give()

    def _apply_if_idle(self) -> None:
        """What was asked for acts at once, unless an answer is being generated: then it does between two tokens."""
        if self._turn.take(briefly=True):  # an answer that begins meanwhile waits for it
            try:
                self._knobs.apply(self._turned)
            finally:
                self._give()

    @contextmanager
    def _lent(self) -> Iterator[Workbench]:
        """To whoever has the turn, which ends with it."""
        try:
            self._knobs.apply(self._turned)
            bench = Workbench(
                self.model,
                self._sites,
                self.shape,
                self.device,
                self.context,
                self.sizes.chunk,
                self._step,
                self.residency,
                self.transfers,
                self.recorder,
                self._kv,
                self._threads,
                self.foresight,
                self.sizes.carried,
                self.sizes.workspace,
            )
            try:
                yield bench
            finally:
                bench.close()
        finally:
            self._give()
            self.telemetry.version += 1
