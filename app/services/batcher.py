"""Answers a file of prompts with the loaded model, in a thread independent of any browser tab."""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.services.batch.answers_file import Answers
from app.services.batch.figures import BatchFigures
from app.services.batch.run import Backend, Progress, Run
from app.services.jobs import JobOwner, JobRunner, ModelJob
from app.services.loading import Loaded
from app.services.model_manager import ModelManager
from app.store.private import private_folder
from core.engine.batch_request import BATCH
from core.errors import MoestroError
from core.settings.registry import create
from core.settings.sampling import Sampling
from core.system.reading import open_regular, reason
from core.types import StepRecord

MOST = 256  # prompts at a time
LATEST = 12  # answers shown


@dataclass(frozen=True, slots=True)
class BatchForm:
    """The values of the form. `upload`: the file that was dropped on the page."""

    upload: str = ""
    at_once: int = BATCH
    scheduler: str = "none"
    pipelined: bool = False
    retry_errors: bool = False

    def files(self, folder: Path) -> tuple[Path, Path]:
        """The prompts, and the answers in `folder`, under a name that the same file finds again. Raises MoestroError
        for what is wrong at once."""
        if not 1 <= self.at_once <= MOST:
            raise MoestroError(f"Answer from 1 to {MOST} prompts at a time.")
        if not self.upload:
            raise MoestroError("Drop a file of prompts first.")
        source = Path(self.upload)
        if not source.is_file():
            raise MoestroError(f"{source.name} is not there any more. Drop it again.")
        with open_regular(source, MoestroError) as file:
            try:
                mark = hashlib.file_digest(file, "sha256").hexdigest()[:8]
                return source, private_folder(folder) / f"{source.stem}-{mark}.answers.jsonl"
            except OSError as error:
                raise MoestroError(f"{source.name} cannot be answered: {reason(error)}.") from error


Answerer = Callable[..., Backend]
"""Makes what answers lines with an engine: `app.server.v1.batch.ByEngine`, whose answers have the API's form."""


class BatchJob(ModelJob):
    """A batch in progress, or the outcome of the last one. `drain` is set: no further prompt is begun."""

    name, doing, tab = "batch", "used for a batch", "Batch"
    done, undone = "All answered", "Not all answered"
    unexpected = "The batch broke off because of an error inside Moestro. Its details are in the log."

    def __init__(self, model: Loaded) -> None:
        super().__init__("Reading the file", model.spec.model)
        self.drain = threading.Event()
        self.answers: Answers | None = None  # the file, once the run has verified it as its own
        self.answered: Progress | None = None
        self.figures = BatchFigures(model.engine.shape)
        self.latest: deque[Mapping[str, Any]] = deque(maxlen=LATEST)  # records, as they are in the file

    @property
    def seconds(self) -> int:
        """How long it has run, in whole seconds; 0 when it has ended."""
        return 0 if self.finished else int(time.monotonic() - self._began_s)

    def outcome(self, error: Exception | None) -> dict[str, Any]:
        """As of every job; a batch that was drained with lines left was cancelled."""
        known = self.answered
        if error is None and (self.drain.is_set() or self.cancelled.is_set()) and known is not None and known.left:
            return {"state": "cancelled", "text": "Stopped"}
        return super().outcome(error)


class Batcher(JobOwner[BatchJob]):
    """Answers batches with the loaded model. Methods return at once and may be called from any thread."""

    kind = BatchJob

    def __init__(
        self,
        folder: Path,
        models: ModelManager,
        jobs: JobRunner,
        sampling: Callable[[], Sampling],
        on_step: Callable[[StepRecord], None],
    ) -> None:
        """`folder` = where answers go; `sampling()` = what lines do not say; `on_step` gets each pass."""
        super().__init__(jobs)
        self._folder, self._models, self._sampling, self._on_step = folder, models, sampling, on_step

    @property
    def stamp(self) -> str:
        """Changes with the state that the page shows: every second while it runs."""
        job = self.job
        if job is None:
            return ""
        known = job.answered
        return f"{id(job)} {job.state} {known.done if known else 0} {job.drain.is_set()} {job.seconds}"

    def start(self, form: BatchForm, answerer: Answerer) -> BatchJob:
        """Start answering; until it ends the model answers nothing else, and settings may be changed. Raises
        MoestroError for what is wrong at once; later errors are reported in the returned job."""
        source, out = form.files(self._folder)
        with self._models.idle("answer a batch"):
            model = self._models.ready()
            job = BatchJob(model)
            return self._jobs.start(job, lambda: self._run(job, model, source, out, form, answerer))

    def stop(self) -> None:
        """Begin no further prompt; at the second call, give up what is being written, too."""
        job = self._jobs.running(BatchJob)
        if job is not None and not job.drain.is_set():
            job.drain.set()
            job.update(text="Stopping after those being written")
        else:
            self.cancel()

    def _run(self, job: BatchJob, model: Loaded, source: Path, out: Path, form: BatchForm, answerer: Answerer) -> None:
        engine, sampling = model.engine, self._sampling()
        scheduler = create("scheduler", form.scheduler, {}) if form.scheduler != "none" else None
        job.figures.regrouped = engine.regrouped

        def on_step(step: StepRecord) -> None:
            job.figures.add(step)
            self._on_step(step)

        def shown(progress: Progress) -> None:
            if job.cancelled.is_set():
                job.drain.set()
            left = f"{progress.errors} with an error, " if progress.errors else ""
            ending = ", stopping after those being written" if job.drain.is_set() else ""
            text = f"{progress.before + progress.done} of {progress.total}, {left}{progress.tok_s:.1f} tokens/s{ending}"
            if engine.one_at_a_time:
                text += f". {engine.one_at_a_time}"
            job.update(text=text, share=progress.share, left_s=progress.left_s)

        run = Run(source, out, job.drain, form.retry_errors, job.latest.append)
        job.answers, job.answered = run.answers, run.progress
        try:
            backend = answerer(
                engine,
                model.spec.model,
                sampling,
                form.at_once,
                scheduler,
                job.cancelled,
                on_step,
                pipelined=form.pipelined,
            )
            run.answer(backend, shown)
        finally:
            run.close()
