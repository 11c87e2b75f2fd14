"""Calibrates the loaded model in a thread independent of any browser tab, and saves the resulting profile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from app.services.engine_protocol import EngineProtocol
from app.services.job import Job, Thread, outcome
from app.services.profiles import carried
from app.store import Store, StoredTrace
from app.store.traces import stored_traces
from app.words import count
from core.errors import BusyError, MoestroError, ProfileError, SettingError
from core.profile import PARTS, Profile, load, profile_path, save
from core.trace import Trace, open_trace

log = logging.getLogger("moestro.app")
UNEXPECTED = "The calibration broke off because of an error inside Moestro. Its details are in the log."
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
PROMPTS = 64  # prompts that the prefill speed is measured on
Text = Any  # core.calibrate.texts.Text; importing that module imports transformers


class Calibrate(Protocol):
    """Signature of `core.calibrate.gather.calibrate`. Raises MoestroError, also when cancelled."""

    def __call__(
        self,
        engine: Any,
        texts: Sequence[Text],
        *,
        parts: Collection[str],
        traces: Sequence[Trace],
        source: str,
        limit: int,
        progress: Callable[[str, float], None],
        cancel: threading.Event,
    ) -> Profile: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """Inputs of a calibration: names of CHOICES, with the text and the path that two of them need. `limit` = most
    tokens of text, 0 = all.
    """

    kinds: tuple[str, ...]
    parts: tuple[str, ...]
    text: str = ""
    path: str = ""
    limit: int = 0


class Calibration(Job):
    """A calibration in progress, or the outcome of the last one. `said` = a note shown with the outcome, "" = none."""

    def __init__(self, model: str) -> None:
        super().__init__("Collecting what to read")
        self.model = model
        self.said = ""


class Calibrator:
    """Runs one calibration at a time in its own thread. Methods return at once and may be called from any thread."""

    def __init__(self, store: Store, work: Calibrate | None = None) -> None:
        self.store, self._work = store, work
        self.job: Calibration | None = None
        self.problem = ""  # why the loaded model's profile is not used; "" = it is, or there is none
        self._thread = Thread()

    @property
    def busy(self) -> bool:
        """Whether a calibration is running; it has the engine to itself."""
        return self.job is not None and not self.job.finished

    def find(self, model_hash: str) -> Profile | None:
        """The profile for a model being loaded. None if it cannot be read; `problem` says why."""
        path = profile_path(self.store.folder, model_hash)
        self.problem = ""
        if not path.exists():
            return None
        try:
            return load(path, model_hash=model_hash)
        except ProfileError as error:
            log.warning("a profile is not used: %s", error)
            self.problem = str(error)
            return None

    def start(self, engine: EngineProtocol, model: str, reading: Reading) -> Calibration:
        """Start a calibration. The caller ensures exclusive use of the engine while `busy`. Raises BusyError or
        SettingError; later errors are reported in the returned job.
        """
        if self.busy:
            raise BusyError("The model is being calibrated already.")
        if unknown := set(reading.kinds) - CHOICES.keys() | set(reading.parts) - PARTS.keys():
            raise SettingError(f"There is no {', '.join(sorted(unknown))} to calibrate with.")
        if not reading.parts:
            raise SettingError("Choose at least one thing to measure.")
        if not reading.kinds:
            raise SettingError("Choose at least one thing to read.")
        for kind, given, what in (("text", reading.text, "Paste a text"), ("path", reading.path, "Give a path")):
            if kind in reading.kinds and not given.strip():
                raise SettingError(f"{what} to read, or untick “{CHOICES[kind]}”.")
        self.job = job = Calibration(model)
        self._thread.run("calibrate", self._run, job, engine, reading)
        return job

    def cancel(self) -> None:
        """Ask the running calibration to stop; the profile is unchanged."""
        if self.job is not None:
            self.job.cancelled.set()

    def delete(self, engine: EngineProtocol) -> None:
        """Remove the loaded model's profile. Raises SettingError while a chosen option needs it."""
        engine.use_profile(None)
        profile_path(self.store.folder, engine.model_hash).unlink(missing_ok=True)
        self.problem = ""

    def close(self, timeout: float = 60.0) -> None:
        """Stop the running calibration and wait for its end."""
        self.cancel()
        self._thread.join(timeout)

    def _run(self, job: Calibration, engine: EngineProtocol, reading: Reading) -> None:
        job.end(
            **outcome(
                job,
                lambda: self._calibrate(job, engine, reading),
                "Calibrated",
                "Not calibrated",
                job.model,
                UNEXPECTED,
            )
        )

    def _calibrate(self, job: Calibration, engine: EngineProtocol, reading: Reading) -> dict[str, Any]:
        texts, traces, source = self._collect(engine, job.model, reading)
        fresh = self._worker()(
            engine,
            texts,
            parts=set(reading.parts),
            traces=traces,
            source=source,
            limit=reading.limit,
            progress=job.progress,
            cancel=job.cancelled,
        )
        if job.cancelled.is_set():
            raise MoestroError("Cancelled.")
        path = profile_path(self.store.folder, engine.model_hash)
        old = self.find(engine.model_hash)
        whole = fresh if old is None else fresh.over(old)
        save(whole, path)
        self.problem = ""
        missing = [part for part in reading.parts if not fresh.has(part)]
        said = " ".join(filter(None, [_missing(missing), *carried(job.model, whole)]))
        try:
            engine.use_profile(whole)
        except MoestroError as error:  # saved all the same, and used at the next load
            said = str(error)
        return {"said": said}

    def _collect(self, engine: EngineProtocol, model: str, reading: Reading) -> tuple[list[Text], list[Trace], str]:
        """The texts and traces to read, and a description for display. Raises MoestroError when there are none."""
        from core.calibrate import texts as reader

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
            path = Path(reading.path.strip().strip('"')).expanduser()
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
            path = Path(reading.path.strip().strip('"')).expanduser()
            files = [path] if path.is_file() else islice((f for f in path.rglob("*") if f.is_file()), FILES)
            number += sum(file.stat().st_size for file in files)
        return number

    def speed(self, load: int | None) -> float | None:
        """Prefill speed in tokens/s under a load; None without prompts."""
        rows = (
            self.store.db.rows(
                "SELECT tokens, total_ms FROM steps WHERE load = ? AND phase = 'prefill' ORDER BY id DESC LIMIT ?",
                load,
                PROMPTS,
            )
            if load is not None
            else []
        )
        took_ms = sum(row["total_ms"] for row in rows)
        return 1e3 * sum(row["tokens"] for row in rows) / took_ms if took_ms else None

    def _worker(self) -> Calibrate:
        if self._work is None:
            from core.calibrate.gather import calibrate

            self._work = calibrate
        return self._work


def plural(number: int, what: str) -> str:
    """A count with its noun in singular or plural."""
    return f"{number} {what}{'s' * (number != 1)}"


def _missing(parts: Sequence[str]) -> str:
    from core.profile.summary import TITLES

    named = ", ".join(TITLES[part] for part in parts)
    return f"Not measured, because only a text that the model reads can tell: {named}." if parts else ""
