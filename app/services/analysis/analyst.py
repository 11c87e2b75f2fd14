"""Runs one analysis of recorded routing at a time in a thread independent of any browser tab, and stores the
results.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.services.analysis import sources, workers
from app.services.analysis.compare import compare, test
from app.services.analysis.lab import Lab
from app.services.analysis.question import Question
from app.services.analysis.sources import Routing, Source
from app.services.analysis.whatif import Table
from app.services.analysis.workers import Task
from app.services.job import Job, Thread, outcome
from app.store import Store
from app.words import count
from core.errors import BusyError, MoestroError, SettingError
from core.settings.registry import variant

# tokens x runs; smaller analyses run in this process, since they end before another process would have started
SMALL = 3000
SMALL_BYTES = 200_000  # of a trace file; smaller ones are read in this process
log = logging.getLogger("moestro.app")
UNEXPECTED = "It broke off because of an error inside Moestro. Its details are in the log."
KEPT = {"whatif": "whatif", "lab": "predictor_lab"}  # store keys of the last results


class Analysis(Job):
    """An analysis in progress, or the outcome of the last one."""

    def __init__(self, kind: str) -> None:
        super().__init__("Reading the routing")
        self.kind = kind


class Analyst:
    """Runs one analysis at a time in its own thread. Methods return at once and may be called from any thread."""

    def __init__(self, store: Store, processes: int = 0) -> None:
        """`processes` = simulations that run at once, 0 = one per CPU core."""
        self.store, self.processes = store, processes
        self.job: Analysis | None = None
        self.table: Table | None = self._remembered(KEPT["whatif"], Table.read)
        self.lab: Lab | None = self._remembered(KEPT["lab"], Lab.read)
        self._folder = store.folder / "analysis"
        self._lock = threading.Lock()
        self._thread = Thread()

    @property
    def busy(self) -> bool:
        """Whether an analysis is running."""
        return self.job is not None and not self.job.finished

    @property
    def stamp(self) -> str:
        """Changes whenever the displayed state changes."""
        job, made = self.job, [answer.about.created if answer else "" for answer in (self.table, self.lab)]
        return f"{id(job)} {job.state if job else ''} {made}"

    def start(self, question: Question) -> Analysis:
        """Start an analysis. Raises BusyError, SettingError or TraceError for problems found at once; later ones are
        reported in the job.
        """
        for name in question.policies:
            variant("eviction", name)
        for name in question.predictors:
            variant("predictor", name)
        if question.kind == "lab" and not question.predictors:
            raise SettingError("Choose at least one prefetcher.")
        if question.source.kind == "file" and not Path(question.source.path).expanduser().is_file():
            raise SettingError(f"There is no file {question.source.path}.")
        with self._lock:
            if self.busy:
                raise BusyError("An analysis is running. Wait for it or cancel it, then start another.")
            self.job = job = Analysis(question.kind)
            self._thread.run("analysis", self._run, job, question)
            return job

    def cancel(self) -> None:
        """Stop the running analysis; the last result is kept."""
        if self.job is not None:
            self.job.cancelled.set()

    def close(self, timeout: float = 30.0) -> None:
        """Stop the running analysis and wait for its end."""
        self.cancel()
        self._thread.join(timeout)

    def _run(self, job: Analysis, question: Question) -> None:
        try:
            fields = outcome(job, lambda: self._answer(job, question), "Done", "Not done", "an analysis", UNEXPECTED)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        job.end(**fields)

    def _answer(self, job: Analysis, question: Question) -> dict[str, Any]:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        routing = self._routing(job, question)

        def work(tasks: Sequence[Task]) -> list[Any]:
            return self._work(job, tasks, routing.tokens)

        if question.kind == "whatif":
            self.table = compare(question, routing, work)
            self._remember("whatif", self.table.dump())
        else:
            self.lab = test(question, routing, work)
            self._remember("lab", self.lab.dump())
        return {}

    def _work(self, job: Analysis, tasks: Sequence[Task], tokens: int) -> list[Any]:
        """All results, in the order of the tasks."""
        found: dict[int, Any] = {}
        text = f"Simulating {count(tokens)} tokens"

        def done(at: int, result: Any) -> None:
            found[at] = result
            job.progress(f"{text}: {len(found)} of {len(tasks)} runs", len(found) / len(tasks))

        job.progress(f"{text}: 0 of {len(tasks)} runs", 0.0)
        work = workers.here if tokens * len(tasks) <= SMALL else workers.run
        work(tasks, job.cancelled, done, self.processes)
        return [found[at] for at in range(len(tasks))]

    def _routing(self, job: Analysis, question: Question) -> Routing:
        source, target = question.source, self._folder / "routing.trace"
        if source.kind != "file":
            return sources.from_store(self.store, source, target, question.limit)
        read: list[Routing] = []
        work = workers.here if Path(source.path).expanduser().stat().st_size <= SMALL_BYTES else workers.run
        work(
            [Task(sources.from_file, (source, str(target), question.limit))],
            job.cancelled,
            lambda at, result: read.append(result),
            1,
        )
        session = None
        if question.load is not None:
            try:
                session = sources.from_store(self.store, Source("load", question.load), self._folder / "session.trace")
            except MoestroError:
                pass  # the session recorded nothing to take over
        return sources.known(read[0], session)

    def _remember(self, kind: str, dumped: Any) -> None:
        try:
            self.store.db.put(KEPT[kind], dumped)
        except MoestroError as error:
            log.warning("the analysis could not be kept for the next start: %s", error)

    def _remembered(self, key: str, read: Callable[[Any], Any]) -> Any:
        kept = self.store.db.get(key)
        try:
            return read(kept) if kept else None
        except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            log.warning("forgot an analysis of an earlier version: %s", error)
            return None
