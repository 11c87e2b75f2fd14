"""CPU and wall seconds per test folder, printed at the end of a run and kept in `.pytest_cache/v/moestro/times`.

A pytest plugin. CPU seconds are those of the process that runs the test and of its children that have ended; what is in
no test (starting workers, imports, collection) is the last row.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pytest

KEPT = "moestro/times"


def used_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


@dataclass
class Spent:
    """What the tests of one file or folder took."""

    tests: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def __iadd__(self, other: Spent) -> Spent:
        self.tests, self.cpu_s, self.wall_s = (
            self.tests + other.tests,
            self.cpu_s + other.cpu_s,
            self.wall_s + other.wall_s,
        )
        return self


class Clock:
    """In each process that runs tests: notes in every report the CPU seconds since the one before."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._before_s = config, 0.0

    def pytest_collection_finish(self) -> None:
        self._before_s = used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, pytest.TestReport]:
        report = yield
        now_s = used_s()
        report.cpu_s, self._before_s = now_s - self._before_s, now_s
        if report.passed:
            report.keywords = {}  # which are looked at for what failed alone, and are half of what a worker sends
        return report

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["cpu_s"] = used_s()


class Times:
    """In the process that shows the results: adds up the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._began_s, self._workers_s = config, time.monotonic(), 0.0
        self._files: defaultdict[str, Spent] = defaultdict(Spent)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = Spent(report.when == "call", getattr(report, "cpu_s", 0.0), report.duration)
        self._files[report.nodeid.split("::", 1)[0]] += spent

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._workers_s += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: defaultdict[str, Spent] = defaultdict(Spent)
        for file, spent in self._files.items():
            parts = PurePosixPath(file).parts
            folders["/".join(parts[:2] if len(parts) > 2 else parts[:1])] += spent
        all_s = self._workers_s or used_s()
        rows = sorted(folders.items(), key=lambda row: -row[1].cpu_s)
        if len(self._files) > 1:
            terminalreporter.section("CPU seconds per folder")
            for name, spent in rows:
                terminalreporter.line(f"{name:<24}{spent.tests:6} tests {spent.cpu_s:8.1f} CPU s {spent.wall_s:8.1f} s")
            rest_s = all_s - sum(spent.cpu_s for _, spent in rows)
            wall_s = time.monotonic() - self._began_s
            terminalreporter.line(f"{'start and collection':<36} {rest_s:8.1f} CPU s")
            terminalreporter.line(f"{'all':<36} {all_s:8.1f} CPU s {wall_s:8.1f} s")
            if getattr(self._config, "cache", None) is not None:  # absent with -p no:cacheprovider
                files = {file: vars(spent) for file, spent in sorted(self._files.items())}
                self._config.cache.set(KEPT, {"cpu_s": all_s, "wall_s": wall_s, "files": files})


def register(config: pytest.Config) -> None:
    """Measure this run: in workers of xdist the tests, in the process that shows the results the sums."""
    config.pluginmanager.register(Clock(config), "moestro-clock")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(config), "moestro-times")
