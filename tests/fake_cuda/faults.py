"""CUDA calls that fail when a test says so. After an error that is not an allocation's, a real device is lost: every
later call fails, too."""

import threading
from collections.abc import Callable

LOST = "CUDA error: an illegal memory access was encountered"


class Faults:
    """`check(call)` is asked by every call of the fake device: "launch", "event.record", "event.synchronize" ..."""

    def __init__(self) -> None:
        self.lost = False
        self.remembered = ""  # of a refused call: the next launch raises it, once
        self._when: Callable[[str], bool] | None = None

    def lose_device(self, when: Callable[[str], bool]) -> None:
        """The first call for which `when(call)` is true fails, and every later one."""
        self._when = when

    def lose_in_worker(self, call: str) -> None:
        """The same, at the first such call of a copy thread."""
        self.lose_device(lambda made: made == call and threading.current_thread().name.startswith("moestro-link"))

    def mend(self) -> None:
        """As after a restart."""
        self.lost, self._when, self.remembered = False, None, ""

    def check(self, call: str) -> None:
        """Raises RuntimeError, as torch does, when `call` fails."""
        if self.lost or (self._when is not None and self._when(call)):
            self.lost = True
            raise RuntimeError(LOST)
        if self.remembered and call == "launch":
            error, self.remembered = self.remembered, ""
            raise RuntimeError(error)
