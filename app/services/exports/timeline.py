"""The last answer of a chat as a timeline in Chrome's trace format: ui.perfetto.dev and chrome://tracing open it.

Passes and copies stand where they happened. Of a pass only sums are recorded of what it spent its time on, so that
compute, stall and idle stand one after the other within it, and what the host computed at its start. Source of the
format: "Trace Event Format", the Chromium project."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.services.exports.archive import NothingThere, fresh
from app.store import Load, Store
from app.wording import describe_change, model_id
from core import __version__
from core.metrics import METRICS
from core.types import Outcome, StepRecord, Transfer

PASSES, SHARES, HOST = 1, 2, 3  # threads of the timeline; the copies' follow
LANES = {True: 10, False: 40}  # demand or prefetch -> the first thread of its copies
NAMES = {PASSES: "Passes", SHARES: "Of each pass: compute, stall, idle", HOST: "Host computes missing experts"}
NOTHING = "Nothing was recorded of an answer in this chat. Passes are recorded while Telemetry is on."
Event = dict[str, Any]


def write(store: Store, path: Path, chat: int) -> Path:
    """Write the timeline, replacing an existing file atomically. Raises NothingThere, ExportError, and StoreError when
    the records are damaged."""
    last = store.db.rows("SELECT answer, load FROM steps WHERE chat = ? ORDER BY id DESC LIMIT 1", chat)
    if not last:
        raise NothingThere(NOTHING)
    answer, load = last[0]["answer"], store.steps.loads([last[0]["load"]])[0]
    steps = list(store.steps.records(answer=answer, load=load.id))  # each load has a clock of its own
    changes = store.db.rows("SELECT step, name, old, new FROM changes WHERE load = ? ORDER BY id", load.id)
    turned = [(row["step"], f"{row['name']} {row['old']} → {row['new']}") for row in changes]
    events = [*_named(load), *_passes(steps), *_copies([one for step in steps for one in step.transfers])]
    events += _marks(steps, turned)
    about = {"made by": f"Moestro {__version__}", "chat": chat, "answer": answer, "model": model_id(load.model)}
    with fresh(path, "timeline") as part:
        body = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
        part.write_text(json.dumps(body, allow_nan=False), encoding="utf-8")
    return path


def _named(load: Load) -> Iterator[Event]:
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"Moestro: {model_id(load.model)}"}}
    for thread, name in NAMES.items():
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _slice(name: str, thread: int, start_s: float, ms: float, args: Mapping[str, Any] | None = None) -> Event:
    """Something with a length. Times of the format are microseconds."""
    found = {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": start_s * 1e6, "dur": ms * 1e3}
    return {**found, "args": dict(args)} if args else found


def _passes(steps: Iterable[StepRecord]) -> Iterator[Event]:
    for step in steps:
        name = "token" if step.phase == "decode" else f"prompt, {step.tokens} tokens"
        yield _slice(name, PASSES, step.started_s, step.total_ms, _figures(step))
        at_s = step.started_s
        for part, ms in (("compute", step.compute_ms), ("stall", step.stall_ms), ("idle", step.idle_ms)):
            if ms > 0:
                yield _slice(part, SHARES, at_s, ms)
                at_s += ms / 1e3
        if step.host_ms > 0:
            yield _slice("host", HOST, step.started_s, step.host_ms, {"requests": step.host_computed})
        counted = {"hits": step.hits, "misses": step.requests - step.hits}
        yield {"ph": "C", "pid": 1, "name": "requests", "ts": step.started_s * 1e6, "args": counted}


def _figures(step: StepRecord) -> dict[str, Any]:
    """All metrics of a pass that are not zero, and its hits by layer."""
    found = {one.column or one.name: getattr(step, one.name) for one in METRICS if hasattr(step, one.name)}
    hit = step.outcome <= Outcome.PREFETCH_HIT
    layers, asked = np.unique(step.layer, return_counts=True)
    by_layer = {
        f"layer {at}": f"{int(hit[step.layer == at].sum())} of {of} hit" for at, of in zip(layers, asked, strict=True)
    }
    return {"pass": step.index, **{name: value for name, value in found.items() if value}, **by_layer}


def _copies(copies: Sequence[Transfer]) -> Iterator[Event]:
    """Each on the first thread of its kind that is free: copies may overlap."""
    ends: dict[bool, list[float]] = {True: [], False: []}
    for one in sorted(copies, key=lambda copy: copy.started_s):
        lanes = ends[one.demand]
        lane = next((i for i, end_s in enumerate(lanes) if end_s <= one.started_s), len(lanes))
        if lane == len(lanes):
            lanes.append(0.0)
            kind = "Copies on demand" if one.demand else "Prefetches"
            name = {"name": f"{kind} {lane + 1}"}
            yield {"ph": "M", "pid": 1, "tid": LANES[one.demand] + lane, "name": "thread_name", "args": name}
        lanes[lane] = one.ended_s
        waited_ms = round(1e3 * (one.started_s - one.submitted_s), 3)
        args = {"bytes": one.bytes, "from": one.origin, "waited_ms": waited_ms, "phase": one.phase}
        length_ms = 1e3 * (one.ended_s - one.started_s)
        yield _slice(f"layer {one.layer} expert {one.expert}", LANES[one.demand] + lane, one.started_s, length_ms, args)


def _marks(steps: Sequence[StepRecord], turned: Iterable[tuple[int, str]]) -> list[Event]:
    """The settings that were changed during the answer."""
    begun = {step.index: step.started_s for step in steps}
    return [
        {"ph": "i", "s": "p", "pid": 1, "tid": PASSES, "name": describe_change(text), "ts": begun[index] * 1e6}
        for index, text in turned
        if index in begun
    ]
