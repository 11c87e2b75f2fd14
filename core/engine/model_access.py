"""Who may use a loaded model: an answer, a measurement session, or the quality meter while it is unused."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from core.engine.quality.meter import Meter
from core.engine.quality.report import Quality
from core.errors import BusyError
from core.runtime.measurement import MeasurementSession
from core.system.native import openmp

Holder = Literal["free", "owner", "brief", "idle"]


class ModelLock:
    """Like a lock, with three kinds of holders.

    An owner (an answer, a measurement) excludes other callers: they are refused at once. A brief holder (applying
    settings) makes other callers wait. An idle holder (scoring answers) must poll `asked` and release when it is set;
    callers wait until it has. Any thread may call any method.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: Holder = "free"
        self._waiting = 0

    def acquire(self, *, briefly: bool = False) -> bool:
        """Waits for a brief or an idle holder to release; False when an owner holds it."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._holder in ("free", "owner"))
                if self._holder == "owner":
                    return False
                self._holder = "brief" if briefly else "owner"
                return True
            finally:
                self._waiting -= 1

    def try_acquire_idle(self) -> bool:
        """Acquire it for idle work; False when another thread holds it or waits for it."""
        with self._changed:
            if self._holder != "free" or self._waiting:
                return False
            self._holder = "idle"
            return True

    def release(self) -> None:
        """Release it, whatever kind the holder is."""
        with self._changed:
            self._holder = "free"
            self._changed.notify_all()

    @property
    def asked(self) -> bool:
        """Whether a caller waits for the holder to release."""
        return self._waiting > 0

    @property
    def taken(self) -> bool:
        """Whether an owner holds it."""
        return self._holder == "owner"


class ModelAccess:
    """`apply_settings` brings the engine to the requested settings; `open_session` begins a measurement session;
    `changed` tells that a frame would look different. All are called by the holder of the lock."""

    def __init__(
        self,
        apply_settings: Callable[[], None],
        open_session: Callable[[], MeasurementSession],
        changed: Callable[[], None],
    ) -> None:
        self.lock, self._because = ModelLock(), ""
        self._apply_settings, self._open_session, self._changed = apply_settings, open_session, changed

    @property
    def busy(self) -> bool:
        """Whether an answer is being generated, or a measurement session is open."""
        return self.lock.taken

    @contextmanager
    def owned(self, otherwise: str) -> Iterator[None]:
        """Exclusive use inside. Raises BusyError with the holder's reason, or `otherwise`."""
        self._take(otherwise)
        self._changed()
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def measuring(self, because: str) -> Iterator[MeasurementSession]:
        """Exclusive use inside, to run and measure passes; other callers get BusyError with `because`."""
        self._take("The model is answering. Stop the answer first.")
        self._because = because
        with self.session() as session:
            yield session

    def audit(self, meter: Meter, stop: threading.Event | None) -> Quality | None:
        """Have `meter` score an answer, unless the model is in use. It gives way to any other caller, and to `stop`."""
        if not self.lock.try_acquire_idle():
            return None
        if not meter.due:
            self._release()
            return None
        with self.session() as session:
            return meter.audit(session, lambda: self.lock.asked or (stop is not None and stop.is_set()))

    def apply_if_idle(self) -> None:
        """Apply requested settings at once, unless an answer is being generated: it then applies them between two
        tokens."""
        if self.lock.acquire(briefly=True):  # an answer that starts now waits
            try:
                self._apply_settings()
            finally:
                self._release()

    @contextmanager
    def session(self) -> Iterator[MeasurementSession]:
        """A measurement session for the holder of the lock, which is released at the end."""
        try:
            self._apply_settings()
            session = self._open_session()
            try:
                yield session
            finally:
                session.close()
        finally:
            self._give_back()

    def _take(self, otherwise: str) -> None:
        if not self.lock.acquire():
            raise BusyError(self._because or otherwise)

    def _give_back(self) -> None:
        """End the use. What was requested after its last pass began is applied now: no other pass may follow."""
        self._release()
        self.apply_if_idle()
        self._changed()

    def _release(self) -> None:
        self._because = ""
        openmp.stop_workers()
        self.lock.release()
