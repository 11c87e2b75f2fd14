"""The routes under /export: recorded sessions, routing, chats, results and answers as files."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.background import BackgroundTask

from app.server.json_values import RowId
from app.services import runs
from app.services.analysis import tables_csv
from app.services.exports import archive, timeline, traces, transcript
from app.services.host import Host
from app.store import Store
from app.store.private import clear
from core.errors import MoestroError

PART_BYTES = 256 << 10  # of a file that is sent


def router(host: Host) -> APIRouter:
    """The routes over a host. A path is matched by the first route that fits, so the fixed names come first."""
    routes, exports = APIRouter(prefix="/export"), Exports(host)
    endpoints: dict[str, Callable[..., Response]] = {
        "session.zip": exports.session,
        "session.trace": exports.session_trace,
        "whatif.csv": exports.comparison,
        "predictors.csv": exports.predictors,
        "quality.csv": exports.quality,
        "beside.csv": exports.beside,
        "runs.csv": exports.runs,
        "limit.csv": exports.limit,
        "batch.jsonl": exports.batch,
        "{chat}.timeline.json": exports.timeline,
        "{chat}.zip": exports.chat,
        "{chat}.trace": exports.chat_trace,
        "{chat}.md": exports.markdown,
        "{chat}.json": exports.as_json,
    }
    for path, endpoint in endpoints.items():
        routes.add_api_route(f"/{path}", endpoint, methods=["GET"])
    return routes


class Exports:
    """A method for each route. Files are opened through links, so the browser shows the text of a refusal."""

    def __init__(self, host: Host) -> None:
        self._host, self._store, self._folder = host, host.store, host.store.folder / "exports"
        clear(
            self._folder, "moestro-*.zip*", "moestro-*.trace*", "moestro-*.json*"
        )  # left by a server that was killed while sending one

    def session(self, load: RowId | None = None) -> Response:
        """Everything that was recorded under a load, by default the current or the last one."""
        if load is None:
            load = self._host.models.load_id
        if load is None:
            load = self._last_load()
        if load is None:
            return _refused("Nothing has been recorded yet. Load a model and ask it something.")
        return self._file(f"moestro-session-{load}", "zip", lambda path: archive.write(self._store, path, load=load))

    def session_trace(self, load: RowId | None = None) -> Response:
        """The routing recorded under a load, by default the last one."""
        return self._trace("moestro-session", None, self._last_load() if load is None else load)

    def chat(self, chat: RowId) -> Response:
        """A chat with everything that was recorded of it."""
        return self._file(f"moestro-chat-{chat}", "zip", lambda path: archive.write(self._store, path, chat=chat))

    def chat_trace(self, chat: RowId, load: RowId | None = None) -> Response:
        """The routing recorded in a chat, of the model of that load."""
        return self._trace(f"moestro-chat-{chat}", chat, load)

    def timeline(self, chat: RowId) -> Response:
        """The last answer of a chat as a timeline for Perfetto."""
        name = f"moestro-chat-{chat}"
        return self._file(name, "timeline.json", lambda path: timeline.write(self._store, path, chat))

    def markdown(self, chat: RowId) -> Response:
        """The shown messages of a chat as Markdown."""
        return self._transcript(chat, "md", "text/markdown; charset=utf-8", transcript.markdown)

    def as_json(self, chat: RowId) -> Response:
        """All messages of a chat as JSON."""
        return self._transcript(chat, "json", "application/json", transcript.as_json)

    def comparison(self) -> Response:
        """The table of the last What-if comparison."""
        table = self._host.analyst.table
        return _table("moestro-whatif.csv", None if table is None else tables_csv.whatif(table))

    def predictors(self) -> Response:
        """The table of the predictor lab."""
        found = self._host.analyst.lab
        return _table("moestro-predictors.csv", None if found is None else tables_csv.lab(found))

    def quality(self) -> Response:
        """The table of the last evaluation."""
        answer = self._host.evaluator.answer
        return _table("moestro-quality.csv", None if answer is None else answer.csv(), "evaluated")

    def beside(self) -> Response:
        """The time of every token of the last comparison of two settings."""
        answer = self._host.comparer.answer
        return _table("moestro-beside.csv", None if answer is None else answer.csv(), "compared")

    def runs(self) -> Response:
        """The latest answers with their figures and settings."""
        found = runs.runs(self._store)
        if not found:
            return _refused("No answer has figures yet. Load a model and ask it something.")
        return _table("moestro-runs.csv", runs.to_csv(found))

    def limit(self) -> Response:
        """Where the time of the last decoded tokens went, and the speed limit."""
        limit = self._host.limit()
        if limit is None or not limit.tokens:
            return _refused("No token has been computed yet. Load a model and ask it something.")
        return _table("moestro-limit.csv", limit.csv())

    def batch(self) -> Response:
        """The answers of the last batch, as far as they are written: the file may grow while it is sent."""
        job = self._host.batcher.job
        if job is None or job.answers is None:
            return _refused("No batch has been answered since the start.")
        try:
            file = job.answers.open()
        except MoestroError as error:
            return _refused(str(error))
        size = os.fstat(file.fileno()).st_size

        def parts() -> Iterator[bytes]:
            left = size
            with file:
                while part := file.read(min(PART_BYTES, left)):
                    left -= len(part)
                    yield part

        headers = {**_attached(job.answers.path.name), "content-length": str(size)}
        return StreamingResponse(parts(), media_type="application/jsonl", headers=headers)

    def _last_load(self) -> int | None:
        loads = self._store.steps.loads()
        return loads[-1].id if loads else None

    def _trace(self, name: str, chat: int | None, load: int | None) -> Response:
        return self._file(name, "trace", lambda path: traces.write(traces.find(self._store, chat, load), path))

    def _file(self, name: str, ending: str, write: Callable[[Path], object]) -> Response:
        """A file that is written now and deleted when it has been sent."""
        path = self._folder / f"{name}-{time.time_ns()}.{ending}"
        try:
            write(path)
        except MoestroError as error:
            return _refused(str(error), 404 if isinstance(error, archive.NothingThere) else 507)
        kinds = {"zip": "application/zip", "timeline.json": "application/json"}
        kind = kinds.get(ending, "application/octet-stream")
        deletion = BackgroundTask(path.unlink, missing_ok=True)
        return FileResponse(path, filename=f"{name}.{ending}", media_type=kind, background=deletion)

    def _transcript(self, chat: int, ending: str, kind: str, written: Callable[[Store, int], str]) -> Response:
        try:
            body = written(self._store, chat)
        except archive.NothingThere as error:
            return _refused(str(error))
        return Response(body, media_type=kind, headers=_attached(f"moestro-chat-{chat}.{ending}"))


def _refused(text: str, status: int = 404) -> Response:
    return PlainTextResponse(text, status)


def _table(name: str, text: str | None, done: str = "simulated") -> Response:
    if text is None:
        return _refused(f"Nothing has been {done} yet. Do so in the tab Analysis.")
    return Response(text, media_type="text/csv", headers=_attached(name))


def _attached(name: str) -> dict[str, str]:
    """Headers of a download under a name."""
    coded = quote(name, errors="replace")
    named = f'filename="{name}"' if coded == name else f"filename*=utf-8''{coded}"
    return {"content-disposition": f"attachment; {named}", "cache-control": "no-store"}
