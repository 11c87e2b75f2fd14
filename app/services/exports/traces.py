"""Trace files of past chats, written from the store on request."""

import sqlite3
from pathlib import Path

from app.services.exports.archive import NothingThere, fresh
from app.store import Store, StoredTrace, StoreError
from app.wording import model_id
from core.profile.trace import TraceHead, TraceWriter

NOTHING = "No routing was recorded there. It is recorded while Telemetry is on."
DAMAGED = (
    "The routing on disk is damaged, so no trace was written. The words of the chats do not depend on it; "
    "delete what was recorded in the tab Sessions."
)


def write(trace: StoredTrace, path: Path) -> Path:
    """Write a trace file, replacing an existing one atomically.

    Raises ExportError when it cannot be written, StoreError when the routing cannot be read."""
    head = TraceHead(
        trace.layers,
        trace.experts,
        trace.top_k,
        model=model_id(trace.model),
        model_hash=trace.model_hash,
        beside=trace.beside,
    )
    try:
        with fresh(path, "trace") as part, TraceWriter(part, head) as writer:
            for chunk in trace.chunks():
                writer.write(chunk)
    except sqlite3.Error as error:
        raise StoreError(f"The routing on disk could not be read: {error}.") from error
    except (TypeError, ValueError, OverflowError) as error:  # malformed rows
        raise StoreError(DAMAGED) from error
    return path


def find(store: Store, chat: int | None, load: int | None) -> StoredTrace:
    """The trace of a chat (for the model of `load`, else the last one used) or of a load. Raises NothingThere, and
    StoreError when its records are damaged."""
    traces = store.traces(chat, load)
    if load is not None:
        traces = [one for one in traces if load in one.loads]
    if not traces:
        if store.has_damaged_loads(chat, load):
            raise StoreError(DAMAGED)
        raise NothingThere(NOTHING)
    return traces[-1]
