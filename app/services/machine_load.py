"""How busy and how warm the whole machine is: its processor and its NVIDIA GPUs. Other programs' work counts, too."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from core.system.nvidia import GpuLoad, gpu_loads

EVERY_S = 1.0  # measured no more often, however many pages ask
SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")  # those of processors, as Linux names them


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """`cpu_percent`: of all cores, since the measurement before. `cpu_celsius`: the warmest sensor of the processor;
    None where the system reports none, as Windows does."""

    cpu_percent: float
    cpu_celsius: float | None
    gpus: tuple[GpuLoad, ...]


class MachineWatch:
    """May be asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._load: MachineLoad | None = None
        self._at_s = 0.0
        self._spent_s = spent_s()  # psutil's own percentage is over the time since the same thread has asked

    def now(self) -> dict[str, Any]:
        """The load of the last second or so, as plain data."""
        with self._lock:
            now_s = time.monotonic()
            if self._load is None or now_s - self._at_s >= EVERY_S:
                self._load = MachineLoad(self._percent(), processor_celsius(), tuple(gpu_loads()))
                self._at_s = now_s
            return asdict(self._load)

    def _percent(self) -> float:
        before, now = self._spent_s, spent_s()
        self._spent_s = now
        busy_s, idle_s = now[0] - before[0], now[1] - before[1]
        return 100 * busy_s / (busy_s + idle_s) if busy_s + idle_s > 0 else 0.0


def spent_s() -> tuple[float, float]:
    """Seconds that all cores together were busy and idle since the machine was started."""
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    twice_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # part of others, on Linux
    return sum(times) - twice_s - idle_s, idle_s


def processor_celsius() -> float | None:
    """The warmest sensor of the processor; None without one."""
    read = getattr(psutil, "sensors_temperatures", None)  # not on Windows
    try:
        found = read() if read is not None else {}
    except OSError:  # a sensor that the system lists and does not let read
        return None
    warmest = [one.current for name in SENSORS for one in found.get(name, []) if one.current]
    return max(warmest, default=None)
