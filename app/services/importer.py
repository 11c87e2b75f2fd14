"""Imports one model at a time into an expert pack, in a thread independent of any browser tab."""

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.services.jobs import Job, JobOwner, JobRunner
from app.services.library import Library
from app.store.database import Database
from core.errors import MoestroError
from core.settings.formats import FORMATS
from core.system.paths import named_path

log = logging.getLogger("moestro.app")
CHOICES = ("auto", *FORMATS)
AUTO = "auto: nearest to the source's own"
DOWNLOADING = "Downloading"  # how the texts of a download's progress begin
SPEED_S = 15.0  # window of the displayed speed
ImportModel = Callable[..., Path]  # core.importing.import_model, or what stands in for it


class ImportJob(Job):
    """An import in progress, or the outcome of the last one. `out` = the pack being written, None until known."""

    name = "import"
    done, undone = "Imported", "Not imported"
    unexpected = "The import broke off because of an error inside Moestro. Its details are in the log."

    def __init__(self, source: str, out: Path | None, format: str, download: bool) -> None:
        super().__init__("Looking at the model", source)
        self.source, self.out, self.format, self.download = source, out, format, download
        self.bytes_done = self.bytes_total = 0
        self.bytes_s = 0.0  # recent bytes/s; 0 = not known yet
        self.arrived = 0  # bytes of a download that has not ended
        self._seen: deque[tuple[float, int]] = deque()

    @property
    def already(self) -> str:
        return f"{self.source} is being imported. Wait for it or cancel it, then import another."

    @property
    def can_resume(self) -> bool:
        """Whether partial output exists that the same import can resume from."""
        return self.state in ("error", "cancelled") and bool(self.kept)

    @property
    def kept(self) -> str:
        """What the same import can resume from, as words; "" = nothing."""
        if self.partial is not None and any(self.partial.glob("journal*")):
            return f"is finished in {self.partial}"
        return "has arrived" if self.arrived else ""

    @property
    def partial(self) -> Path | None:
        """The folder of the unfinished pack."""
        return self.out and self.out.with_name(f"{self.out.name}.partial")

    def outcome(self, error: Exception | None) -> dict[str, Any]:
        return {"bytes_s": 0.0, **super().outcome(error)}

    def progress(self, text: str, share: float, bytes_done: int = 0, bytes_total: int = 0) -> None:
        """Record the progress, and estimate speed and remaining time."""
        now = time.monotonic()
        if self._seen and (bytes_done < self._seen[-1][1] or bytes_total != self.bytes_total):
            self._seen.clear()  # a new phase, with its own speed
        self._seen.append((now, bytes_done))
        while now - self._seen[0][0] > SPEED_S and len(self._seen) > 2:
            self._seen.popleft()
        (since, before), took = self._seen[0], now - self._seen[0][0]
        speed = (bytes_done - before) / took if took > 0.5 and since < now else self.bytes_s
        left = (bytes_total - bytes_done) / speed if speed and bytes_total else None
        self.arrived = bytes_done if text.startswith(DOWNLOADING) else 0
        self.update(
            text=text,
            share=min(1.0, max(0.0, share)),
            bytes_done=bytes_done,
            bytes_total=bytes_total,
            bytes_s=speed,
            left_s=left,
        )


class Importer(JobOwner[ImportJob]):
    """Imports models. Methods return at once and may be called from any thread. Finished parts of a cancelled import
    are kept for resuming."""

    kind = ImportJob

    def __init__(self, library: Library, db: Database, jobs: JobRunner, work: ImportModel | None = None) -> None:
        """Packs are written into the library's folder; it is refreshed when an import has ended, before the job's state
        is published. `db` stores the last import, so that one interrupted by a crash or restart can be resumed."""
        super().__init__(jobs)
        self._library, self._db, self._work = library, db, work
        self._last_forecast: tuple[tuple[str, str, tuple[int, ...]], list[str]] | None = None
        if (broken := self._broken_off()) is not None:
            jobs.recall(broken)

    def start(self, source: str, format: str = "auto", out: str = "", download: bool = False) -> ImportJob:
        """Start an import; "" as `out` stands for a folder among the packs, named as `launch.py import` does.

        Raises BusyError, or MoestroError if the import cannot be started; later errors are reported in the returned
        job."""
        source = source.strip().strip('"')
        if not source:
            raise MoestroError("Say what to import: a folder, a GGUF file, or a name on the Hugging Face hub.")
        if format not in CHOICES:
            raise MoestroError(f"There is no format {format!r}. Choose one of: {', '.join(CHOICES)}.")
        target = named_path(out, what="output folder") if out.strip() else None
        if target is not None and target.exists():
            raise MoestroError(
                f"{target} exists already, and nothing is ever overwritten. Choose another output "
                "folder, or delete it first."
            )
        job = ImportJob(source, target, format, download)
        return self._jobs.start(job, lambda: self._run(job))

    def resume(self) -> ImportJob:
        """Resume the import that was stopped last. Raises as `start` does."""
        job = self.job
        if job is None or not job.can_resume:
            raise MoestroError("There is no stopped import to resume. Start one.")
        return self.start(job.source, job.format, str(job.out or ""), job.download)

    def forecast(self, source: str, format: str) -> list[str]:
        """What an import of a source that is on this machine would make, in lines for the page: sizes, and what is
        lost; [] of anything else. Raises MoestroError where it would be refused."""
        from core.hf.files import stamp
        from core.importing import forecast_import, parse

        source = source.strip().strip('"')
        try:
            path = named_path(source)
        except MoestroError:
            return []
        there = path.exists()
        if not source or format not in CHOICES or (not there and parse(source) is None):
            return []
        key = source, format, stamp(path) if there else ()
        if self._last_forecast is None or self._last_forecast[0] != key:  # the page requests it often
            found = forecast_import(source, format)
            if found is None:
                return []
            self._last_forecast = key, found.lines()
        return self._last_forecast[1]

    def _remember(self, job: ImportJob) -> None:
        try:
            self._db.put("import", [job.source, str(job.out or ""), job.format, job.download])
        except MoestroError as error:  # the import matters more than resuming it after a restart
            log.warning("could not remember the import for the next start: %s", error)

    def _broken_off(self) -> ImportJob | None:
        """The import that an earlier process left unfinished."""
        kept = self._db.get("import", list)
        if not kept or len(kept) != 4 or not isinstance(kept[1], str) or not kept[1]:
            return None
        source, out, format, download = kept
        job = ImportJob(str(source), Path(out), str(format), bool(download))
        job.state = "cancelled"
        return job if job.can_resume else None

    def _run(self, job: ImportJob) -> None:
        def place(name: str, format: str) -> Path:
            job.update(out=self._library.packs / f"{name}-{format}")
            self._remember(job)
            assert job.out is not None
            return job.out

        self._remember(job)
        try:
            from core.memory.pack.lock import clear

            clear(self._library.packs)
            job.out = self._worker()(
                job.source,
                job.out or place,
                format=job.format,
                download=job.download,
                progress=job.progress,
                cancel=job.cancelled,
            )
        finally:
            try:
                self._library.refresh()
            except Exception:
                log.exception("the list of models was not renewed")

    def _worker(self) -> ImportModel:
        if self._work is None:
            from core.importing import import_model

            self._work = import_model
        return self._work
