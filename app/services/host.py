"""The host: the parts behind the dashboard and the HTTP API, put together. All tabs and the HTTP API share them.

Methods of the parts return at once (work runs in threads) and may be called from any thread. Commands raise
MoestroError, with a text to display, and then change nothing; setters (`change`, `change_many`, `set_sampling`) return
that text instead, "" on success."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from app.services.analysis.analyst import Analyst
from app.services.analysis.quality import Evaluate, measure
from app.services.answer_queue import AnswerQueue, Request
from app.services.auditor import Auditor
from app.services.auto import Auto
from app.services.batcher import Batcher
from app.services.calibrator import Calibrate, Calibrator
from app.services.chats import Chats
from app.services.comparer import Compare, Comparer, compare
from app.services.deletion import delete, outcome
from app.services.evaluator import Evaluator
from app.services.importer import Importer, ImportModel
from app.services.jobs import JobRunner
from app.services.library import Library
from app.services.loader import Loader
from app.services.loading import Estimate
from app.services.log_lines import LogLines
from app.services.machine_load import MachineWatch
from app.services.model_manager import ModelManager
from app.services.plan_basis import Basis, RoutedTokens
from app.services.planner import Planner
from app.services.profiles import StoredProfiles
from app.services.regret import Regret
from app.services.remembered import Remembered
from app.services.replanner import KEY, Replanner
from app.services.totals import Totals
from app.services.writer import Writer
from app.store import Store
from core.errors import MoestroError
from core.metrics.limit import SpeedLimit
from core.settings.config import Settings
from core.settings.link import LinkSettings
from core.settings.param import declared
from core.types import StepRecord

if TYPE_CHECKING:
    from core.engine import Engine

log = logging.getLogger("moestro.app")
LINK = {param.name for param in declared(LinkSettings).values()}
DESCRIBED = ("link", "link_gbps", "link_latency_us")  # of a manifest: the link


class Host:
    """The parts: `models` owns the engine and its settings, `loader` loads it, `chats` asks it; `calibrator`,
    `evaluator`, `comparer`, `importer`, `analyst` and `batcher` do long jobs; `planner` plans the cache, `replanner`
    again while idle, from what `routed` keeps; `library` knows the models on this machine, `regret` compares eviction
    policies, of which `auto` chooses, `totals` sums up since the start, `jobs` runs every long job, `remembered` keeps
    values for the next start, `log` the newest lines of the log."""

    def __init__(
        self,
        store: Store | None = None,
        engine: type[Engine] | None = None,
        estimate: Estimate | None = None,
        importing: ImportModel | None = None,
        calibrating: Calibrate | None = None,
        evaluating: Evaluate | None = None,
        comparing: Compare | None = None,
    ) -> None:
        """`engine`, `estimate`, `importing`, `calibrating`, `evaluating` and `comparing` default to core's own. Raises
        BusyError or StoreError when the store cannot be opened."""
        self._closing = threading.Lock()
        self.store = store = store or Store()
        self.remembered = remembered = Remembered(store.db)
        self.log = LogLines()
        self.jobs = jobs = JobRunner()
        self._queue = queue = AnswerQueue()
        profiles = StoredProfiles(store.folder)
        self.models = models = ModelManager(store, remembered, jobs, queue, self._changed, self._unloaded)
        self.regret = Regret(models.settings.telemetry.regret)
        self.auto = auto = Auto(models, remembered, self.regret)
        self.regret.heard = auto.look
        self.totals = Totals()
        self.machine = MachineWatch()
        self._auditor = Auditor(store, queue)
        self._writer = Writer(store, queue, self._on_step, self._ended)
        self.loader = Loader(store, remembered, jobs, models, profiles, engine, estimate, auto.begun)
        self.chats = Chats(store, remembered, models, queue, self._writer)
        self.library = Library(store.db, store.folder)
        self.importer = Importer(self.library, store.db, jobs, importing)
        self.calibrator = Calibrator(store, models, jobs, profiles, calibrating)
        self.routed = RoutedTokens()
        basis = Basis(models, self.routed)
        self.planner = Planner(store.folder, models, basis)
        kept: Mapping[str, object] = store.db.get(KEY) or {}
        on = kept.get("on") is True
        self.replanner = Replanner(models, self.planner, self.routed, remembered, lambda: self.busy, on)
        self.evaluator = Evaluator(remembered, models, jobs, evaluating or measure)
        self.comparer = Comparer(remembered, models, jobs, comparing or compare)
        self.analyst = Analyst(store, jobs)
        self.batcher = Batcher(store.folder / "batches", models, jobs, lambda: self.chats.sampling, self.totals.add)

    @property
    def busy(self) -> bool:
        """Whether an answer is being written or waits, or a job has the model to itself."""
        return self._queue.busy or self.jobs.exclusive is not None

    def limit(self) -> SpeedLimit | None:
        """The share of the speed limit over the last decoded tokens, with what the best cache policy would have missed
        where that is known; None while no model is loaded."""
        return self.models.limit(self.regret.fewest(self.models.load_id, self.models.settings))

    def delete_model(self, path: str) -> str:
        """Delete the library's model at a path; returns what was deleted, and what is left there, as text. Raises
        MoestroError, also for a model in use."""
        entry = self.library.find(path)
        if entry is None:
            raise MoestroError("It is not there any more. Refresh the list.")
        loading, job = self.loader.loading, self.importer.job
        using = [
            *([self.models.model] if self.models.model else []),
            *([loading.model] if loading and not loading.finished else []),
            *([job.source, str(job.out), str(job.partial)] if job and not job.finished and job.out else []),
        ]
        try:
            return outcome(entry, delete(entry, using))
        finally:
            self.library.refresh()

    def stop(self) -> None:
        """Refuse new answers and stop the present ones, so that the streams to their clients end; `close` follows."""
        self.models.shut()
        self._writer.interrupt()

    def close(self) -> None:
        """Stop all answers and jobs, save the text so far, free the model, close the store. May be called twice."""
        if not self._closing.acquire(blocking=False):
            return
        self.models.shut()
        self.jobs.close()
        self.replanner.close()
        if not self._writer.close():
            log.error("an answer did not stop within its time; the store is closed without its end")
        self.regret.close()
        self._auditor.close()
        self.models.drop()
        self.store.close()

    # -- from one part to another -------------------------------------------------------------------------------------

    def _changed(self, settings: Settings) -> None:
        self.regret.switch(settings.telemetry.regret)

    def _unloaded(self) -> None:
        self.regret.rest()
        self._auditor.rest()

    def _on_step(self, request: Request, step: StepRecord) -> None:
        model = request.model
        self.totals.add(step)
        self.routed.add(model.load, step, model.engine.shape.experts)
        if self.replanner.on != (step.ranked is not None):  # between two passes, on their thread
            model.engine.keep(probs=False, ranks=self.replanner.on, tokens=False)
        if LINK & step.changes.keys():
            self._relinked(request)
        if not (self.models.in_blocks or self.models.text_to_text):  # the other caches would be of whole experts
            self.regret.add(model.load, model.engine.shape, model.effective, step, model.engine.profile)

    def _relinked(self, request: Request) -> None:
        """What was recorded of the load says which link its last passes had, as the deck and the estimate do."""
        engine = request.model.engine
        now, kind = engine.manifest(), str(engine.settings["link"])
        fields = {name: now.get(name) for name in DESCRIBED}
        try:
            self.store.steps.relink(request.model.load, {**fields, "settings": {"link": kind}})
        except MoestroError as error:  # the answer goes on
            log.warning("could not note the link of a load: %s", error)

    def _ended(self, request: Request) -> None:
        self.totals.ended(request.answer)
        self.replanner.look()
        stats = request.answer.stats
        if stats is not None and stats.audit:
            self._auditor.expect(request.model.engine, stats.audit, request.answer.message_id)
