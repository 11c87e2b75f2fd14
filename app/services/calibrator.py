"""Calibrates the loaded model in a thread independent of any browser tab, and saves the resulting profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from app.services.jobs import JobOwner, JobRunner, ModelJob
from app.services.model_manager import ModelManager
from app.services.profiles import StoredProfiles, save_buddies_in_pack
from app.store import Store, StoredTrace
from app.store.traces import stored_traces
from app.wording import count
from core.errors import MoestroError, SettingError
from core.profile import PARTS, Profile
from core.profile.trace import Trace, open_trace
from core.settings.calibration import CalibrationSettings
from core.system.paths import named_path

if TYPE_CHECKING:
    from core.engine import Engine

CHOICES = {
    "bundled": "Bundled prompts",
    "chats": "Chats on this machine",
    "traces": "Recorded routing",
    "text": "A text",
    "path": "A file or folder",
}
TRACES = (".trace", ".npz")  # paths with these suffixes are routing, all others are texts
BUNDLED = 50_000  # approximate characters of the bundled prompts
FILES = 5000  # of a folder, whose sizes are summed
PROMPTS = 256  # passes over prompts that the prefill speed is taken from: the last ones
WHOLE = 0.5  # of the longest one's tokens: a chat's next turns are shorter, and cost as much a pass
Text = Any  # core.engine.texts.Text; importing that module imports transformers
Calibrate = Callable[..., Profile]  # core.measure.calibrate.gather.calibrate, or what stands in for it


@dataclass(frozen=True, slots=True)
class Reading:
    """Inputs of a calibration: names of CHOICES, with the text and the path that two of them need. `limit` = most
    tokens of text, 0 = all. `settings` = of what is trained."""

    kinds: tuple[str, ...]
    parts: tuple[str, ...]
    text: str = ""
    path: str = ""
    limit: int = 0
    settings: CalibrationSettings = field(default_factory=CalibrationSettings)

    @property
    def writing(self) -> int:
        """Most tokens that the model writes for the routing path, if that is measured."""
        generated = self.settings.path_texts == "generated" and set(self.kinds) - {"traces"}
        return self.settings.path_most(self.limit) if generated else 0

    def check(self) -> None:
        """Raises SettingError for what is missing, as far as that is known without reading."""
        if unknown := set(self.kinds) - CHOICES.keys() | set(self.parts) - PARTS.keys():
            raise SettingError(f"There is no {', '.join(sorted(unknown))} to calibrate with.")
        if not self.parts:
            raise SettingError("Choose at least one thing to measure.")
        if not self.kinds:
            raise SettingError("Choose at least one thing to read.")
        for kind, given, what in (("text", self.text, "Paste a text"), ("path", self.path, "Give a path")):
            if kind in self.kinds and not given.strip():
                raise SettingError(f"{what} to read, or untick “{CHOICES[kind]}”.")


class Calibration(ModelJob):
    """A calibration in progress, or the outcome of the last one. `note` = a note shown with the outcome, "" = none."""

    name, doing, tab = "calibrate", "calibrated", "Calibrate"
    done, undone = "Calibrated", "Not calibrated"
    unexpected = "The calibration broke off because of an error inside Moestro. Its details are in the log."

    def __init__(self, model: str) -> None:
        super().__init__("Collecting what to read", model)
        self.note = ""


class Calibrator(JobOwner[Calibration]):
    """Calibrates the loaded model. Methods return at once and may be called from any thread. The profile is unchanged
    where a calibration is cancelled."""

    kind = Calibration

    def __init__(
        self,
        store: Store,
        models: ModelManager,
        jobs: JobRunner,
        profiles: StoredProfiles,
        work: Calibrate | None = None,
    ) -> None:
        """`work` defaults to core's own."""
        super().__init__(jobs)
        self.store, self._models, self._profiles, self._work = store, models, profiles, work

    def start(self, reading: Reading) -> Calibration:
        """Start calibrating the loaded model; no answers are written until it ends. Raises MoestroError for what is
        wrong at once; later errors are reported in the returned job."""
        with self._models.idle("calibrate it"):
            model = self._models.ready()
            reading.check()
            job = Calibration(model.spec.model)
            return self._jobs.start(job, lambda: self._calibrate(job, model.engine, reading))

    @property
    def problem(self) -> str:
        """Why the loaded model's profile is not used; "" = it is, or there is none."""
        return self._profiles.problem

    def delete(self) -> None:
        """Remove the loaded model's profile. Raises MoestroError while a chosen option needs it."""
        with self._models.idle("delete its profile"):
            model = self._models.ready()
            model.engine.use_profile(None)
            self._profiles.delete(model.engine.model_hash)

    def _calibrate(self, job: Calibration, engine: Engine, reading: Reading) -> None:
        texts, traces, source = self._collect(engine, job.model, reading)
        fresh = self._worker()(
            engine,
            texts,
            parts=set(reading.parts),
            traces=traces,
            source=source,
            limit=reading.limit,
            settings=reading.settings,
            folder=self.store.folder,
            progress=job.progress,
            cancel=job.cancelled,
        )
        if job.cancelled.is_set():
            raise MoestroError("Cancelled.")
        whole = self._profiles.add(fresh, engine.model_hash)
        missing = [part for part in reading.parts if not fresh.has(part)]
        job.note = " ".join(filter(None, [_missing(missing), *save_buddies_in_pack(job.model, whole)]))
        try:
            engine.use_profile(whole)
        except MoestroError as error:  # saved all the same, and used at the next load
            job.note = str(error)

    def _collect(self, engine: Engine, model: str, reading: Reading) -> tuple[list[Text], list[Trace], str]:
        """The texts and traces to read, and a description for display. Raises MoestroError when there are none."""
        from core.engine import texts as reader

        texts: list[Text] = []
        traces: list[Trace] = []
        named: list[str] = []
        if "bundled" in reading.kinds:
            texts += reader.bundled(model)
            named.append("the bundled prompts")
        if "chats" in reading.kinds and (chats := self.chats()):
            texts += chats
            named.append(plural(len(chats), "chat"))
        if "text" in reading.kinds:
            texts.append(reading.text.strip())
            named.append("a pasted text")
        if "path" in reading.kinds:
            path = named_path(reading.path)
            if path.suffix.lower() in TRACES:
                traces.append(open_trace(path, engine.shape.experts))
            else:
                texts += reader.from_path(path)
            named.append(path.name)
        if "traces" in reading.kinds and (recorded := self.traces(engine.model_hash)):
            traces += cast(list[Trace], recorded)  # the cast only hides that their sizes are read-only
            named.append(f"{count(sum(trace.tokens for trace in recorded))} recorded tokens")
        if not texts and not traces:
            raise SettingError(
                "There is nothing to read there yet: no chat, and no trace of this model. Choose the "
                "bundled prompts, or give a text."
            )
        return texts, traces, ", ".join(named)

    def chats(self) -> list[Text]:
        """Every stored chat, as messages."""
        found = [
            [{"role": m.role, "content": m.text} for m in self.store.chats.messages(chat.id) if m.text.strip()]
            for chat in self.store.chats.all()
        ]
        return [chat for chat in found if chat]

    def traces(self, model_hash: str) -> list[StoredTrace]:
        """Routing recorded on this machine with this model."""
        return [
            trace
            for trace in stored_traces(self.store.db, self.store.steps.loads(), None)
            if trace.model_hash == model_hash
        ]

    def characters(self, reading: Reading) -> int:
        """Approximate characters of the selected texts, without reading them."""
        number = len(reading.text) if "text" in reading.kinds else 0
        number += BUNDLED if "bundled" in reading.kinds else 0
        if "chats" in reading.kinds:
            number += sum(len(message["content"]) for chat in self.chats() for message in chat)
        if "path" in reading.kinds and reading.path.strip():
            path = named_path(reading.path)
            files = [path] if path.is_file() else islice((f for f in path.rglob("*") if f.is_file()), FILES)
            number += sum(file.stat().st_size for file in files)
        return number

    def speed(self, load: int | None) -> float | None:
        """Tokens/s at which long prompts are read under a load: of its last passes over prompts, those at least WHOLE
        as long as the longest. None without prompts."""
        rows = (
            self.store.db.rows(
                "SELECT tokens, total_ms FROM steps WHERE load = ? AND phase = 'prefill' ORDER BY id DESC LIMIT ?",
                load,
                PROMPTS,
            )
            if load is not None
            else []
        )
        longest = max((row["tokens"] for row in rows), default=0)
        rows = [row for row in rows if row["tokens"] >= WHOLE * longest]
        took_ms = sum(row["total_ms"] for row in rows)
        return 1e3 * sum(row["tokens"] for row in rows) / took_ms if took_ms else None

    def _worker(self) -> Calibrate:
        if self._work is None:
            from core.measure.calibrate.gather import calibrate

            self._work = calibrate
        return self._work


def plural(number: int, what: str) -> str:
    """A count with its noun in singular or plural."""
    return f"{number} {what}{'s' * (number != 1)}"


def _missing(parts: Sequence[str]) -> str:
    from core.profile.summary import TITLES

    named = ", ".join(TITLES[part] for part in parts)
    return f"Not measured, because it needs a text that the model reads: {named}." if parts else ""
