"""Controls access to an engine's model: an answer, a measurement session, or the quality meter while it is unused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from core.cache.expert_cache import ExpertCache
from core.capacity.memory_accounting import Ledger
from core.capacity.sizes import Sizes
from core.errors import BusyError
from core.hf import ExpertsSite
from core.memory.transfer import TransferEngine
from core.prediction.predictor_host import PredictorHost
from core.quality.meter import Meter
from core.quality.report import Quality
from core.runtime.kv_cache import KVCache
from core.runtime.measurement import MeasurementSession
from core.runtime.moe_step import MoEStep
from core.runtime.recorder import Recorder
from core.runtime.telemetry import Telemetry
from core.runtime.warmup import Threads
from core.session.model_lock import ModelLock
from core.session.settings_controller import EngineParts, SettingsController
from core.types import ModelShape


class ModelAccess:
    """Part of `core.engine.Engine`."""

    model: Any
    device: torch.device
    context: int
    sizes: Sizes
    shape: ModelShape
    expert_cache: ExpertCache
    transfers: TransferEngine
    recorder: Recorder
    telemetry: Telemetry
    ledger: Ledger
    predictor_host: PredictorHost
    meter: Meter
    _sites: tuple[ExpertsSite, ...]
    _step: MoEStep
    _kv: KVCache
    _threads: Threads
    _controller: SettingsController
    _parts: EngineParts

    def __init__(self) -> None:
        self._lock, self._busy_because = ModelLock(), ""

    @property
    def busy(self) -> bool:
        """Whether an answer is being generated, or a measurement session is open."""
        return self._lock.taken

    @contextmanager
    def workbench(self, because: str) -> Iterator[MeasurementSession]:
        """Exclusive use of the model, to run and measure passes. Raises BusyError when it is in use; meanwhile other
        callers get BusyError with `because` as the reason."""
        self._take("The model is answering. Stop the answer first.")
        self._busy_because = because
        with self._lent() as bench:
            yield bench

    @property
    def unscored(self) -> int:
        """Number of answers that `audit` has yet to score."""
        return self.meter.due

    @property
    def quality(self) -> Quality | None:
        """The quality cost of lossy options over the last scored answers; None before any was scored."""
        return self.meter.quality

    def audit(self, stop: threading.Event | None = None) -> Quality | None:
        """Score the answer that has waited longest against the exact model; METHODS section 6.

        None when no answer waits, when the model is in use, or when scoring was interrupted because `stop` was set or
        another caller wanted the model: that caller waits for one layer at most, and the answer is scored later. The
        cache is left as it was. Any thread may call this.
        """
        if not self._lock.try_acquire_idle():
            return None
        if not self.meter.due:
            self._give()
            return None
        with self._lent() as bench:
            return self.meter.audit(bench, lambda: self._lock.asked or (stop is not None and stop.is_set()))

    def _take(self, otherwise: str) -> None:
        """Acquire the model lock, until `_give`. Raises BusyError with the holder's reason, or `otherwise`."""
        if not self._lock.acquire():
            raise BusyError(self._busy_because or otherwise)

    def _give(self) -> None:
        self._busy_because = ""
        self._lock.release()

    def _apply_if_idle(self) -> None:
        """Apply requested settings at once, unless an answer is being generated: it then applies them between two
        tokens."""
        if self._lock.acquire(briefly=True):  # an answer that starts meanwhile waits
            try:
                self._controller.apply(self._parts)
            finally:
                self._give()

    @contextmanager
    def _lent(self) -> Iterator[MeasurementSession]:
        """A measurement session for the holder of the model lock, which is released at the end."""
        try:
            self._controller.apply(self._parts)
            bench = MeasurementSession(
                self.model,
                self._sites,
                self.shape,
                self.device,
                self.context,
                self.sizes.chunk,
                self._step,
                self.expert_cache,
                self.transfers,
                self.recorder,
                self._kv,
                self._threads,
                self.predictor_host,
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
