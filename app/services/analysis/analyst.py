"""Runs one analysis of recorded routing at a time in a thread independent of any browser tab, and stores the
results."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from app.services.analysis import sources
from app.services.analysis.compare import compare, test
from app.services.analysis.lab import Lab
from app.services.analysis.question import Question
from app.services.analysis.sources import Routing, RoutingSource
from app.services.analysis.whatif import Table
from app.services.jobs import Job, JobOwner, JobRunner
from app.services.remembered import Remembered
from app.store import Store
from app.store.private import clear
from app.wording import count
from core.errors import MoestroError, SettingError
from core.settings.registry import variant
from core.system.paths import named_path
from core.system.tasks import Task, here, run

# tokens x runs; smaller analyses run in this process, since they end before another process would have started
SMALL = 3000
SMALL_BYTES = 200_000  # of a trace file; smaller ones are read in this process
FILES = ("routing.trace", "session.trace")  # temporary, in the folder of analyses
KEPT = {"whatif": "whatif", "lab": "predictor_lab"}  # store keys of the last results
TABLE, LAB = TypeAdapter(Table), TypeAdapter(Lab)  # what reads them


class Analysis(Job):
    """An analysis in progress, or the outcome of the last one."""

    name = "analysis"
    done, undone = "Done", "Not done"
    unexpected = "It broke off because of an error inside Moestro. Its details are in the log."
    already = "An analysis is running. Wait for it or cancel it, then start another."

    def __init__(self, kind: str) -> None:
        super().__init__("Reading the routing", "an analysis")
        self.kind = kind


class Analyst(JobOwner[Analysis]):
    """Analyses recorded routing. Methods return at once and may be called from any thread. The last result is kept
    where an analysis is cancelled."""

    kind = Analysis

    def __init__(self, store: Store, jobs: JobRunner, processes: int = 0) -> None:
        """`processes` = simulations that run at once, 0 = one per CPU core."""
        super().__init__(jobs)
        self.store, self.processes, self._remembered = store, processes, Remembered(store.db)
        self.table: Table | None = self._remembered.result(KEPT["whatif"], TABLE.validate_python)
        self.lab: Lab | None = self._remembered.result(KEPT["lab"], LAB.validate_python)
        self._folder = store.folder / "analysis"

    @property
    def stamp(self) -> str:
        """Changes whenever the displayed state changes."""
        job, made = self.job, [answer.about.created if answer else "" for answer in (self.table, self.lab)]
        return f"{id(job)} {job.state if job else ''} {made}"

    def start(self, question: Question) -> Analysis:
        """Start an analysis. Raises BusyError, SettingError or TraceError for problems found at once; later ones are
        reported in the job."""
        for name in question.policies:
            variant("eviction", name)
        for name in question.predictors:
            variant("predictor", name)
        if question.kind == "lab" and not question.predictors:
            raise SettingError("Choose at least one prefetcher.")
        if question.source.kind == "file" and not named_path(question.source.path, SettingError).is_file():
            raise SettingError(f"There is no file {question.source.path}.")
        job = Analysis(question.kind)
        return self._jobs.start(job, lambda: self._run(job, question))

    def _run(self, job: Analysis, question: Question) -> None:
        try:
            self._answer(job, question)
        finally:
            clear(self._folder, *FILES)

    def _answer(self, job: Analysis, question: Question) -> None:
        clear(self._folder, *FILES)
        self._folder.mkdir(parents=True, exist_ok=True)
        routing = self._routing(job, question)
        for loaded in self.store.steps.loads([question.load] if question.load is not None else []):
            routing = sources.beside(routing, loaded)

        def work(tasks: Sequence[Task]) -> list[Any]:
            return self._work(job, tasks, routing.tokens)

        if question.kind == "whatif":
            self.table = compare(question, routing, work)
            self._remembered.put(KEPT["whatif"], asdict(self.table))
        else:
            self.lab = test(question, routing, work)
            self._remembered.put(KEPT["lab"], asdict(self.lab))

    def _work(self, job: Analysis, tasks: Sequence[Task], tokens: int) -> list[Any]:
        """All results, in the order of the tasks."""
        found: dict[int, Any] = {}
        text = f"Simulating {count(tokens)} tokens"
        job.progress(f"{text}: 0 of {len(tasks)} runs", 0.0)
        work = here if tokens * len(tasks) <= SMALL else run
        for at, result in work(tasks, self.processes, job.cancelled):
            found[at] = result
            job.progress(f"{text}: {len(found)} of {len(tasks)} runs", len(found) / len(tasks))
        return [found[at] for at in range(len(tasks))]

    def _routing(self, job: Analysis, question: Question) -> Routing:
        source, target = question.source, self._folder / FILES[0]
        if source.kind != "file":
            return sources.from_store(self.store, source, target, question.limit, lab=question.needs_recording)
        work = here if named_path(source.path).stat().st_size <= SMALL_BYTES else run
        reading = [Task(sources.from_file, (source, str(target), question.limit))]
        ((_, read),) = work(reading, 1, job.cancelled)
        session = None
        if question.load is not None:
            try:
                session = sources.from_store(self.store, RoutingSource("load", question.load), self._folder / FILES[1])
            except MoestroError:
                pass  # the session recorded nothing to take over
        return sources.known(read, session)
