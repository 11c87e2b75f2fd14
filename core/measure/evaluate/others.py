"""Load of other programs on the machine meanwhile, which lowers the measured speeds."""

import time

import psutil

MUCH = 0.3  # cores: more than this is mentioned beside the figures


class Others:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began = self._now()

    def cores(self) -> float | None:
        """CPU cores that other programs used since then, on average; None when no time has passed."""
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._now(), self._began, strict=True))
        return max(0.0, busy_s - own_s) / wall_s if wall_s > 0 else None

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of all busy cores, of this process."""
        system, own = psutil.cpu_times(), self._process.cpu_times()
        names = ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")  # some exist only on Windows
        return time.perf_counter(), sum(getattr(system, name, 0.0) for name in names), own.user + own.system
