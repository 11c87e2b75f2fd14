"""The routes under /live, which a tab polls several times a second: state and new text, the deck's frame, the chats.

One small JSON response replaces open streams, so any number of tabs can follow, and a reloaded page continues."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Query, Response

from app.server import frames
from app.server.json_values import RowId
from app.services.host import Host
from app.services.jobs import Job
from app.services.progress import Answer
from app.wording import model_id, name_of
from core.engine.quality.report import Quality
from core.errors import MoestroError
from core.policy.substitute.list_lengths import ListRule

MOST = 200  # lines of the list of chats; older chats are found by searching, and in the tab Sessions
MOST_CHARS = 200  # of a query


def router(host: Host) -> APIRouter:
    """/live/state, /live/frame and /live/chats."""
    routes = APIRouter(prefix="/live")

    @routes.get("/state")
    def state(chat: RowId | None = None, answer: RowId | None = None, since: RowId = 0) -> dict[str, Any]:
        """State of the host and one chat, with the running answer's text from character `since` on if it is
        `answer`."""
        running, shown = host.chats.answer(chat), stamp(host, chat)
        if running is not None and shown.endswith(f":{running.message_id}"):
            running = None  # the chat shows it already
        return {
            "host": host_state(host),
            "import": import_state(host),
            "jobs": jobs_state(host),
            "stamp": shown,
            "answer": answer_state(running, answer, since, host.chats.before(running) if running is not None else 0),
            "chats": host.store.chats.version,
            "machine": host.machine.now(),
        }

    @routes.get("/frame")
    def frame(layer: RowId = 0, since: str = "") -> Response:
        return frame_since(host, layer, since)

    @routes.get("/chats")
    def chats(find: str = Query("", max_length=MOST_CHARS)) -> dict[str, Any]:
        return chat_list(host, find)

    return routes


def frame_since(host: Host, layer: int, since: str) -> Response:
    """The deck's frame with one layer in detail; 204 while the client's is the newest, by its header X-Version."""
    busy = host.busy
    # Read before the frame: at worst the frame is sent once more.
    version = f"{host.models.version}.{layer}.{int(busy)}.{host.regret.version}"
    headers = {"x-version": version, "cache-control": "no-store"}
    if since == version:
        return Response(status_code=204, headers=headers)
    model, quality = host.models.model_id, host.models.quality
    data = frames.encode(
        host.models.frame(layer, fewest=host.regret.fewest(host.models.load_id, host.models.settings)),
        model=model,
        version=version,
        busy=busy,
        quality=_scored(quality),
        regret=host.regret.view(
            host.models.load_id,
            host.models.settings,
            in_blocks=host.models.in_blocks,
            text_to_text=host.models.text_to_text,
        ),
    )
    return Response(data, media_type="application/octet-stream", headers=headers)


def _scored(quality: Quality | None) -> dict[str, Any] | None:
    """The figures of scored answers for the deck, with the verdict on their agreement."""
    if quality is None:
        return None
    figures, share = asdict(quality), quality.agreed
    if share is not None:
        figures |= {"agreed": share.hits, "low": share.low, "high": share.high, "verdict": share.verdict}
    return figures


def chat_list(host: Host, find: str) -> dict[str, Any]:
    """The pinned chats and those most recently changed, or those that have all words of `find`, with an excerpt of the
    message that has them. `more` = there are others."""
    pinned = set(host.store.chats.pinned)
    every = sorted(host.store.chats.all(), key=lambda one: one.id not in pinned)
    if not find.strip():
        lines = [{"id": o.id, "title": o.title, "excerpt": "", "pinned": o.id in pinned} for o in every[:MOST]]
        return {"chats": lines, "more": len(every) > MOST}
    titles = {one.id: one.title for one in every}
    found = [one for one in host.store.search_chats(find, MOST + 1) if one.chat in titles]
    lines = [
        {"id": one.chat, "title": titles[one.chat], "excerpt": one.excerpt, "pinned": one.chat in pinned}
        for one in found[:MOST]
    ]
    return {"chats": lines, "more": len(found) > MOST}


def host_state(host: Host) -> dict[str, Any]:
    """Whether the host is empty, loading or ready, the load's progress, whether answers may be changed, and stamps that
    change with the model, settings, and the answers that an estimate rests on."""
    loading, job = host.loader.loading, host.importer.job
    known = {
        "settings": f"{hash((tuple(host.models.settings.items()), host.chats.sampling, id(host.models.profile))):x}",
        "answers": str(host.totals.ended_answers),
        "library": f"{host.library.version} {id(job)} {job.state if job is not None else ''}",
        "busy": host.busy,
        "unscored": host.models.unscored,
        "lossy": host.models.settings.lossy.active,
        "closeness": host.models.closeness,
        **host.models.arithmetic,
        "weights": host.models.weights,
    }
    if loading is not None and not loading.finished:
        return {
            **known,
            "state": "loading",
            "text": loading.text,
            "share": loading.share,
            "stamp": f"loading {model_id(loading.model)}",
        }
    ended = f"{id(loading)} {loading.state}" if loading is not None else ""
    return {
        **known,
        "state": "ready" if host.models.model is not None else "empty",
        "stamp": f"{host.models.load_id} {ended}",
    }


def import_state(host: Host) -> dict[str, Any] | None:
    """The running or last import: progress, speed, and whether it can be resumed."""
    job = host.importer.job
    if job is None:
        return None
    gone = job.state == "done" and job.out is not None and not job.out.exists()  # deleted since
    return {
        "state": "none" if gone else job.state,
        "name": name_of(job.source),
        "text": job.error or job.text,
        "share": job.share,
        "done": job.bytes_done,
        "total": job.bytes_total,
        "speed": round(job.bytes_s),
        "left": job.left_s,
        "resume": job.can_resume,
    }


def jobs_state(host: Host) -> dict[str, Any]:
    """For each other long job: its progress, and a stamp that changes with the contents of its tab."""
    analysis, calibration, profile = host.analyst.job, host.calibrator.job, host.models.profile
    ended = f"{id(calibration)} {calibration.state if calibration is not None else ''}"
    lists = ListRule.of(host.models.settings)  # of similarities, drawn with the profile
    return {
        "analysis": {"stamp": host.analyst.stamp, **job_state(analysis)},
        "calibration": {
            "stamp": f"{host.models.load_id} {ended} {id(profile)} {lists} {host.replanner.stamp}",
            **job_state(calibration),
        },
        "batch": {"stamp": f"{host.models.load_id} {host.batcher.stamp}", **job_state(host.batcher.job)},
        "evaluation": {"stamp": f"{host.models.load_id} {host.evaluator.stamp}", **job_state(host.evaluator.job)},
        "beside": {"stamp": f"{host.models.load_id} {host.comparer.stamp}", **job_state(host.comparer.job)},
    }


def job_state(job: Job | None) -> dict[str, Any]:
    """The data of a progress bar."""
    if job is None:
        return {"state": "none", "text": "", "share": 0.0, "left": None}
    return {"state": job.state, "text": job.text, "share": job.share, "left": job.left_s}


def stamp(host: Host, chat: int | None) -> str:
    """Changes whenever the finished messages of a chat do. "gone" when the chat no longer exists."""
    if chat is None:
        return ""
    try:
        done = [m for m in host.chats.messages(chat) if m.state != "writing"]
    except MoestroError:
        return "gone"
    changes = sum((m.quality is not None) + 2 * bool(m.unsaved) for m in done)
    return f"{len(done)}:{changes}:{done[-1].id}" if done else "0"


def answer_state(answer: Answer | None, known: int | None, since: int, before: int = 0) -> dict[str, Any] | None:
    """The running answer; its whole text when the client follows another one. `before`: queued answers before it."""
    if answer is None:
        return None
    since = since if answer.message_id == known else 0
    return {
        "id": answer.message_id,
        "state": answer.state,
        "before": before,
        "from": since,
        "text": answer.text[since:],
        "done": answer.prefill_done,
        "total": answer.prefill_total,
        "cached": answer.prefill_cached,
        "tokens": answer.n_tokens,
        "ttft_ms": round(answer.ttft_ms),
        "unsaved": answer.unsaved,
        "opened": answer.opens_reasoning,
    }
