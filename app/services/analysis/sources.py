"""Sources of routing (this session, a chat, a trace file) and the measurements recorded with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from app.services.analysis.measured import Measured, Pass, measure
from app.store import Load, Store, StoredTrace
from app.store.steps import DEMAND, TRANSFER
from app.wording import count, name_of
from core.errors import TraceError
from core.memory.link import Link
from core.profile.trace import Chunk, FileTrace, Trace, TraceHead, TraceWriter, open_trace
from core.profile.trace.file import PREDICTED, save
from core.system.paths import named_path
from core.types import Outcome

TIMED = 4000  # passes, the last ones, that the clock is fitted to
RECORDED = "SELECT chat, sum(tokens) AS tokens FROM steps WHERE chat IS NOT NULL AND layers > 0 GROUP BY chat"
FILE = "file"  # the menu choice for a path or an upload
NOTHING = "Nothing has been recorded there yet. Ask the model something first, or choose another source."
UNRECORDED = "The routing of a text-to-text model is not recorded: there is nothing to replay. Choose another source."


@dataclass(frozen=True, slots=True)
class RoutingSource:
    """A load ("this session"), a chat, or a trace file."""

    kind: Literal["load", "chat", "file"]
    id: int = 0
    path: str = ""
    experts: int = 0  # per layer, where a file does not say; 0 = the largest id in it, plus one

    @classmethod
    def parse(cls, choice: str, path: str = "", experts: int = 0, load: int | None = None) -> RoutingSource:
        """Parse the form's choice: "load:3", "chat:12", or "file" with `path`. `load` = of the model that is loaded: it
        is meant by any load, as the form may have been drawn before it."""
        kind, _, rest = (choice or "").partition(":")
        if kind in ("load", "chat") and rest.isdigit():
            return cls("chat", int(rest)) if kind == "chat" else cls("load", int(rest) if load is None else load)
        path = path.strip().strip('"')
        if not path:
            raise TraceError("Say which routing to look at: choose a chat, or give a trace file.")
        return cls("file", path=path, experts=max(0, experts))


@dataclass(frozen=True, slots=True)
class Routing:
    """A trace in its own file, and what is known about its recording. `link` and the following fields are display
    text."""

    name: str
    path: str
    tokens: int
    layers: int
    experts: int
    top_k: int
    model: str = ""
    model_hash: str = ""
    expert_bytes: int = 0  # 0 = not known
    measured: Measured | None = None
    link: str = ""
    notes: tuple[str, ...] = ()


def choices(store: Store, load: int | None) -> list[tuple[str, str]]:
    """The menu as (title, choice): the session of the loaded model, every chat, a file."""
    found = []
    if load is not None:
        found.append(("Since the model was loaded", f"load:{load}"))
    sizes = {row["chat"]: row["tokens"] for row in store.db.rows(RECORDED)}
    found += [
        (f"{chat.title} · {count(sizes[chat.id])} tokens recorded", f"chat:{chat.id}")
        for chat in store.chats.all()
        if chat.id in sizes
    ]
    return [*found, ("A trace file…", FILE)]


def from_file(source: RoutingSource, target: str, limit: int = 0) -> Routing:
    """Read a trace of any supported format; write its last `limit` tokens (0 = all) as a Moestro trace. Raises
    TraceError."""
    path = named_path(source.path, TraceError)
    trace = open_trace(path, source.experts)
    if not trace.tokens:
        raise TraceError(f"{path} has no tokens.")
    whole, model_hash = trace.tokens, getattr(trace, "model_hash", "")
    notes = (
        [f"{path.name} is cut short; the incomplete part at its end is left out."]
        if isinstance(trace, FileTrace) and trace.cut
        else []
    )
    if limit and whole > limit:
        notes.append(_limited(limit, whole))
        trace = shortened(trace, limit, Path(target))
    copy = trace if isinstance(trace, FileTrace) else save(trace, Path(target), packed=False)
    return Routing(
        path.name,
        str(copy.path),
        trace.tokens,
        trace.layers,
        trace.experts,
        trace.top_k,
        trace.model,
        model_hash,
        notes=tuple(notes),
    )


def from_store(store: Store, source: RoutingSource, target: Path, limit: int = 0, *, lab: bool = False) -> Routing:
    """Write the recorded routing of a load or a chat as a trace; for a chat with several models, that of the last one.

    `limit`: the last so many tokens, 0 = all. `lab`: where some were recorded for the lab, those alone, so that all
    prefetchers are compared on the same tokens. Raises TraceError when there is none."""
    found = store.traces(*((source.id, None) if source.kind == "chat" else (None, source.id)))
    if not found:
        load = store.steps.loads([source.id]) if source.kind == "load" else []
        raise TraceError(UNRECORDED if any(one.shape.encoder_layers for one in load) else NOTHING)
    stored = found[-1]
    (last,) = store.steps.loads(stored.loads[-1:])
    notes = (
        [f"{count(sum(one.tokens for one in found[:-1]))} tokens of another model in this chat are left out."]
        if found[:-1]
        else []
    )
    named = stored.recorded_for_lab() if lab else None
    if named is not None and named.tokens < stored.tokens:
        notes.append(f"Only the {count(named.tokens)} of {count(stored.tokens)} tokens recorded for the lab are used.")
    stored = named or stored
    whole = cast(Trace, stored)  # the cast only hides that its sizes are read-only
    if limit and stored.tokens > limit:
        notes.append(_limited(limit, stored.tokens))
        trace = shortened(whole, limit, target)
    else:
        trace = save(whole, target, packed=False)
    measured = measure(_passes(store, stored), stored.top_k, _copy_ms(last))
    return Routing(
        _name(store, source),
        str(target),
        trace.tokens,
        stored.layers,
        stored.experts,
        stored.top_k,
        stored.model,
        stored.model_hash,
        last.shape.expert_bytes,
        measured,
        _link(last),
        tuple(notes),
    )


def beside(routing: Routing, loaded: Load) -> Routing:
    """With a note where it was recorded with another model than the one that is `loaded`."""
    if routing.model_hash in ("", loaded.manifest.get("model_hash", "")):
        return routing
    of = name_of(routing.model) if routing.model else "another model"
    note = f"Recorded with {of}, not with {name_of(loaded.model)}, which is loaded."
    return replace(routing, notes=(note, *routing.notes))


def shortened(trace: Trace, tokens: int, target: Path) -> FileTrace:
    """The last passes of a trace with at most `tokens` tokens (at least its last pass), in a file of their own."""
    sizes = np.concatenate([chunk.sizes for chunk in trace.chunks()])
    behind = np.cumsum(sizes[::-1])[::-1]  # tokens from each pass to the end
    first = min(int((behind > tokens).sum()), len(sizes) - 1)
    with TraceWriter(
        target,
        TraceHead(
            trace.layers,
            trace.experts,
            trace.top_k,
            model=trace.model,
            model_hash=getattr(trace, "model_hash", ""),
            probs=getattr(trace, "probs", False),
            predictor=getattr(trace, "predictor", None),
            beside=getattr(trace, "beside", ()),
        ),
        packed=False,
    ) as writer:
        at = 0
        for chunk in trace.chunks():
            if at + len(chunk.sizes) > first:
                writer.write(_from_pass(chunk, max(0, first - at)))
            at += len(chunk.sizes)
    return FileTrace(target)


def _from_pass(chunk: Chunk, first: int) -> Chunk:
    if not first:
        return chunk
    part = slice(int(chunk.sizes[:first].sum()), None)
    predicted = {name: array for name in PREDICTED if (array := getattr(chunk, name)) is not None}
    for name, rows in predicted.items():
        predicted[name] = rows[rows["of"] >= first].copy()
        predicted[name]["of"] -= first
    of_tokens = {
        name: array[part] for name in ("ids", "tok", "weights", "probs") if (array := getattr(chunk, name)) is not None
    }
    return replace(
        chunk, sizes=chunk.sizes[first:], decode=chunk.decode[first:], rid=chunk.rid[first:], **predicted, **of_tokens
    )


def _limited(limit: int, tokens: int) -> str:
    return f"Of {count(tokens)} tokens, only the last {count(limit)} are used."


def known(routing: Routing, other: Routing | None) -> Routing:
    """A trace file with the loaded model's shape takes over the measurements of its session."""
    if other is None or (routing.layers, routing.experts, routing.top_k) != (other.layers, other.experts, other.top_k):
        return routing
    return replace(
        routing,
        expert_bytes=other.expert_bytes,
        measured=other.measured,
        link=other.link,
        notes=(*routing.notes, f"Times and sizes are those of {name_of(other.model)} in this session."),
    )


def _passes(store: Store, stored: StoredTrace) -> list[Pass]:
    """The last TIMED decoded tokens with their recorded times."""
    marks = ", ".join("?" * len(stored.loads))
    where, values = (" AND chat = ?", (stored.chat,)) if stored.chat is not None else ("", ())
    with store.db.reader() as db:
        rows = db.execute(
            "SELECT total_ms - record_ms AS total_ms, stall_ms, layer, outcome, transfers FROM steps WHERE layers > 0 "
            f"AND phase = 'decode' AND tokens = 1 AND load IN ({marks}){where} ORDER BY id DESC LIMIT ?",
            (*stored.loads, *values, TIMED),
        )
        return [as_pass(row, stored.layers) for row in rows]


def as_pass(row: Any, layers: int) -> Pass:
    """A decoded token from its row of the store."""
    layer, outcome = np.frombuffer(row["layer"], "<i2"), np.frombuffer(row["outcome"], "u1")
    copies = np.frombuffer(row["transfers"], TRANSFER)
    took = (copies["ended_s"] - copies["started_s"]) * 1e3
    return Pass(
        row["total_ms"],
        row["stall_ms"],
        tuple(np.bincount(layer[outcome >= Outcome.PARTIAL_HIT], minlength=layers).tolist()),
        tuple(took[copies["decode"] != 0].tolist()),
        bool((copies["kind"] & DEMAND == 0).any()),
    )


def _name(store: Store, source: RoutingSource) -> str:
    if source.kind == "load":
        return "this session"
    return next((f"“{chat.title}”" for chat in store.chats.all() if chat.id == source.id), "a chat")


def _copy_ms(load: Load) -> float | None:
    """Copy time of one expert from the load's link measurement, for passes without a copy."""
    link = Link.read(load.manifest)
    return link.copy_ms(load.shape.expert_bytes) if link is not None else None


def _link(load: Load) -> str:
    link = Link.read(load.manifest)
    return f"{'emulated' if link.emulated else 'measured'} link, {link.gbps:.3g} GB/s" if link is not None else ""
