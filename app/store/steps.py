"""Statistics: one row per forward pass as recorded by the engine, the settings changes, and the loads.

The metrics that are counted are a column each; the arrays of a `StepRecord` are little-endian blobs in its shapes and
dtypes."""

import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from app.store.database import Database
from app.store.named import packed
from app.store.row_checks import InvalidRow, fields, shape_of, text, timestamp
from app.store.schema import StoreError
from core.metrics import COUNTED
from core.types import ModelShape, StepRecord, Transfer

TRANSFER = np.dtype(
    [
        ("layer", "<i2"),
        ("expert", "<i2"),
        ("bytes", "<i8"),
        ("kind", "u1"),
        ("decode", "u1"),
        ("submitted_s", "<f8"),
        ("started_s", "<f8"),
        ("ended_s", "<f8"),
    ]
)
log = logging.getLogger("moestro.store")
DEMAND, FROM_DISK = 1, 2  # bits of a transfer's kind
_COLUMNS = (
    "load",
    "chat",
    "answer",
    "step",
    "phase",
    *(one.name for one in COUNTED),
    "layers",
    "top_k",
    "ids",
    "layer",
    "expert",
    "outcome",
    "transfers",
    "changed",
    "choices",
    "named",
)
_CHANGED = "INSERT INTO changes (load, chat, step, time, name, old, new) VALUES (?, ?, ?, ?, ?, ?, ?)"
_INSERT = f"INSERT INTO steps ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a model: everything recorded under it shares its shape, session clock and manifest."""

    id: int
    model: str
    created: float  # seconds since the epoch
    ended: float | None
    spec: dict[str, Any]
    settings: dict[str, Any]
    shape: ModelShape
    manifest: dict[str, Any]


class Steps:
    """The recorded forward passes of one database."""

    def __init__(self, db: Database) -> None:
        self._db = db
        with db.tx() as tx:  # left open by a crash: set the end to that of its last pass
            tx.execute(
                "UPDATE loads SET ended = created + coalesce((SELECT max(started_s + total_ms / 1000) "
                "FROM steps WHERE load = loads.id), 0) WHERE ended IS NULL"
            )

    def add_load(
        self,
        model: str,
        spec: Mapping[str, object],
        settings: Mapping[str, object],
        shape: ModelShape,
        manifest: Mapping[str, object],
    ) -> int:
        """Record the load of a model; returns the id under which its steps are recorded."""
        texts = (json.dumps(dict(part), default=str) for part in (spec, settings, asdict(shape), manifest))
        with self._db.tx() as db:
            return int(
                db.execute(
                    "INSERT INTO loads (model, created, spec, settings, shape, manifest) VALUES (?, ?, ?, ?, ?, ?)",
                    (model, time.time(), *texts),
                ).lastrowid
                or 0
            )

    def relink(self, load: int, link: Mapping[str, object]) -> None:
        """Record the link that a load has from now on: the fields of its manifest that describe it, None = not any
        more."""
        with self._db.tx() as db:
            db.execute(
                "UPDATE loads SET manifest = json_patch(manifest, ?) WHERE id = ?", (json.dumps(dict(link)), load)
            )

    def end_load(self, load: int) -> None:
        """Record the unload."""
        with self._db.tx() as db:
            db.execute("UPDATE loads SET ended = ? WHERE id = ?", (time.time(), load))

    def loads(self, ids: Iterable[int] | None = None) -> list[Load]:
        """Loads by id, or all of them, oldest first."""
        wanted = None if ids is None else set(ids)
        found = []
        for row in self._db.rows("SELECT * FROM loads ORDER BY id"):
            if wanted is None or row["id"] in wanted:
                try:
                    found.append(
                        Load(
                            row["id"],
                            text(row["model"], "model"),
                            timestamp(row["created"], "created"),
                            None if row["ended"] is None else timestamp(row["ended"], "ended"),
                            fields(row["spec"], "spec"),
                            fields(row["settings"], "settings"),
                            shape_of(row["shape"]),
                            fields(row["manifest"], "manifest"),
                        )
                    )
                except InvalidRow as error:
                    log.warning(
                        "what was recorded under load %s is left out, its description is damaged: %s", row["id"], error
                    )
        return found

    def trace(self, model: str, tokens: int) -> npt.NDArray[np.int16] | None:
        """Recorded routing of a model's latest answers: expert ids [tokens, layers, k], oldest first, or None."""
        loads = self._db.rows("SELECT id FROM loads WHERE model = ? ORDER BY id DESC LIMIT 8", model)
        for load in loads:
            rows = self._db.rows(
                "SELECT ids, layers, top_k FROM steps WHERE load = ? AND phase = 'decode' AND tokens = 1 AND layers "
                "ORDER BY id DESC LIMIT ?",
                load["id"],
                tokens,
            )
            if rows:
                return np.stack([np.frombuffer(r["ids"], "<i2").reshape(r["layers"], r["top_k"]) for r in rows[::-1]])
        return None

    def add(self, load: int, chat: int | None, answer: int | None, step: StepRecord, old: Mapping[str, object]) -> None:
        """Record a forward pass, and the settings that changed just before it, with their `old` values."""
        layers, _, top_k = step.ids.shape
        with self._db.tx() as db:
            db.execute(
                _INSERT,
                (
                    load,
                    chat,
                    answer,
                    step.index,
                    step.phase,
                    *(getattr(step, one.name) for one in COUNTED),
                    layers,
                    top_k,
                    _bytes(step.ids, "<i2"),
                    _bytes(step.layer, "<i2"),
                    _bytes(step.expert, "<i2"),
                    _bytes(step.outcome, "u1"),
                    _transfers(step.transfers),
                    step.changed,
                    step.lossy.choices.tobytes() if step.lossy is not None else b"",
                    packed(step.beside),
                ),
            )
            if step.changes:
                now = time.time()
                db.executemany(
                    _CHANGED,
                    [
                        (load, chat, step.index, now, name, str(old.get(name, "")), str(new))
                        for name, new in step.changes.items()
                    ],
                )

    def delete(self, chat: int) -> None:
        """Delete the recorded passes of a chat. Its messages stay, and so do the settings changes, which explain other
        chats' figures."""
        with self._db.tx() as db:
            db.execute("DELETE FROM steps WHERE chat = ?", (chat,))

    def records(
        self, *, chat: int | None = None, load: int | None = None, answer: int | None = None
    ) -> Iterator[StepRecord]:
        """The stored passes of a chat, load or answer, or of all that are given, in order, as the engine recorded them,
        without `changes`, and without `rows`: whose a pass is, its columns `chat` and `answer` say."""
        given = {name: one for name, one in (("chat", chat), ("answer", answer), ("load", load)) if one is not None}
        where = " AND ".join(f"{name} = ?" for name in given)
        with self._db.reader() as db:
            for row in db.execute(f"SELECT * FROM steps WHERE {where} ORDER BY id", tuple(given.values())):
                try:
                    yield _record(row)
                except (ValueError, TypeError) as error:
                    raise StoreError(damaged_pass(row["id"], error)) from error


def damaged_pass(number: int, error: Exception) -> str:
    """The error message for a recorded pass that cannot be read."""
    return (
        f"What was recorded of pass {number} is damaged ({error}). Delete the recording of its chat in the tab "
        "Sessions; its words are kept."
    )


def _bytes(array: Any, dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _transfers(transfers: tuple[Transfer, ...]) -> bytes:
    return (
        np.array(
            [
                (
                    t.layer,
                    t.expert,
                    t.bytes,
                    DEMAND * t.demand + FROM_DISK * (t.origin == "disk"),
                    t.phase == "decode",
                    t.submitted_s,
                    t.started_s,
                    t.ended_s,
                )
                for t in transfers
            ],
            TRANSFER,
        ).tobytes()
        if transfers
        else b""
    )


def _record(row: sqlite3.Row) -> StepRecord:
    figures: dict[str, Any] = {one.name: bool(row[one.name]) if one.kind is bool else row[one.name] for one in COUNTED}
    transfers = tuple(
        Transfer(
            layer,
            expert,
            size,
            bool(kind & DEMAND),
            submitted_s,
            started_s,
            ended_s,
            "decode" if decode else "prefill",
            "disk" if kind & FROM_DISK else "host",
        )
        for layer, expert, size, kind, decode, submitted_s, started_s, ended_s in np.frombuffer(
            row["transfers"], TRANSFER
        ).tolist()
    )
    return StepRecord(
        index=row["step"],
        phase=row["phase"],
        **figures,
        ids=np.frombuffer(row["ids"], "<i2").reshape(row["layers"], row["tokens"], row["top_k"]),
        layer=np.frombuffer(row["layer"], "<i2"),
        expert=np.frombuffer(row["expert"], "<i2"),
        outcome=np.frombuffer(row["outcome"], "u1"),
        transfers=transfers,
    )
