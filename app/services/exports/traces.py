"""Trace files of past chats, written from the store on request."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from app.services.exports.archive import FULL, ExportError, NothingThere
from app.store import Store, StoredTrace, StoreError
from app.store.private import private_folder
from app.wording import model_id
from core.errors import TraceError
from core.profile.trace import TraceHead, TraceWriter

NOTHING = "No routing was recorded there. It is recorded while Telemetry is on."
DAMAGED = (
    "The routing on disk is damaged, so no trace was written. The words of the chats do not depend on it; "
    "delete what was recorded in the tab Sessions."
)


def write(trace: StoredTrace, path: Path) -> Path:
    """Write a trace file, replacing an existing one atomically.

    Raises ExportError when it cannot be written, StoreError when the routing cannot be read.
    """
    part = path.with_name(path.name + ".part")
    try:
        private_folder(path.parent)
        try:
            with TraceWriter(
                part,
                TraceHead(
                    trace.layers,
                    trace.experts,
                    trace.top_k,
                    model=model_id(trace.model),
                    model_hash=trace.model_hash,
                    beside=trace.beside,
                ),
            ) as writer:
                for chunk in trace.chunks():
                    writer.write(chunk)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except sqlite3.Error as error:
        raise StoreError(f"The routing on disk could not be read: {error}.") from error
    except (TypeError, ValueError, OverflowError) as error:  # malformed rows
        raise StoreError(DAMAGED) from error
    except (OSError, TraceError) as error:
        number = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
        if number in FULL:
            raise ExportError(
                "The disk is full: the trace was not written to the data folder. Free some space, then "
                "try again. Your chats are as they were."
            ) from error
        reason = getattr(error.__cause__ or error, "strerror", None) or error
        raise ExportError(f"The trace could not be written in the data folder: {reason}.") from error
    return path


def find(store: Store, chat: int | None, load: int | None) -> StoredTrace:
    """The trace of a chat (for the model of `load`, else the last one used) or of a load. Raises NothingThere, and
    StoreError when its records are damaged.
    """
    traces = store.traces(chat, load)
    if load is not None:
        traces = [one for one in traces if load in one.loads]
    if not traces:
        if store.has_damaged_loads(chat, load):
            raise StoreError(DAMAGED)
        raise NothingThere(NOTHING)
    return traces[-1]
