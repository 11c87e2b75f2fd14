"""Recorded routing as traces: gives the steps of a chat or of a load the interface of any other trace.

There is no separate recording. Every pass is committed with its expert ids as it is computed, so a crash loses at most
the one being written, and every chat can be replayed without prior setup."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from app.store.database import Database
from app.store.named import unpacked
from app.store.schema import StoreError
from app.store.steps import Load, damaged_pass
from core.metrics.record import ShadowPredictions
from core.profile.trace import Chunk
from core.profile.trace.chunk import BESIDE, CHUNK, beside_map_type, id_type

PIECE = 256  # passes read at a time
HELD_BYTES = 4 << 20  # of what prefetchers named, as stored, in one chunk
Named = tuple[str, Mapping[str, Any]]  # a prefetcher and its parameters


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """The routing of one model in a chat, or with chat None everything under `loads`: a core.profile.trace.Trace.

    `size` = bytes of its ids before compression in a trace file."""

    db: Database
    loads: tuple[int, ...]
    chat: int | None
    layers: int
    experts: int
    top_k: int
    model: str
    model_hash: str
    tokens: int
    size: int
    beside: tuple[Named, ...] = ()  # the lab's prefetchers when it was recorded last
    lab: bool = False  # only the passes recorded for the lab

    def recorded_for_lab(self) -> StoredTrace | None:
        """Its passes that were recorded for the lab; None where there are none."""
        sql, values = _passes("coalesce(sum(tokens), 0) AS tokens", self.loads, self.chat, lab=True)
        (row,) = self.db.rows(sql, *values)
        return replace(self, lab=True, tokens=row["tokens"]) if row["tokens"] else None

    def chunks(self) -> Iterator[Chunk]:
        """All passes in order, in chunks of bounded size; reads one consistent state of the store despite concurrent
        writes."""
        sql, values = _passes("id, answer, tokens, phase, ids, named", self.loads, self.chat, lab=self.lab)
        answers: dict[int | None, int] = {}
        with self.db.reader() as db:
            cursor = db.execute(f"{sql} ORDER BY id", values)
            rows, tokens, held = [], 0, 0
            while piece := cursor.fetchmany(PIECE):
                for row in piece:
                    rows.append(row)
                    tokens, held = tokens + row["tokens"], held + len(row["named"])
                    if tokens >= CHUNK or held >= HELD_BYTES:
                        yield self._chunk(rows, answers)
                        rows, tokens, held = [], 0, 0
            if rows:
                yield self._chunk(rows, answers)

    def _chunk(self, rows: list[sqlite3.Row], answers: dict[int | None, int]) -> Chunk:
        ids, named = [], list[ShadowPredictions | None]()
        for row in rows:
            try:
                ids.append(np.frombuffer(row["ids"], "<i2").reshape(self.layers, row["tokens"], self.top_k))
                named.append(unpacked(row["named"], self.experts))
            except (ValueError, TypeError, KeyError) as error:
                raise StoreError(damaged_pass(row["id"], error)) from error
        return Chunk(
            np.concatenate(ids, 1).transpose(1, 0, 2).astype(id_type(self.experts)),
            np.array([row["tokens"] for row in rows], np.int32),
            np.array([row["phase"] == "decode" for row in rows]),
            np.array([answers.setdefault(row["answer"], len(answers)) for row in rows], np.int32),
            beside=self._rows(named, "ranked", BESIDE),
            beside_maps=self._rows(named, "maps", beside_map_type(self.experts)),
        )

    def _rows(
        self, named: Sequence[ShadowPredictions | None], field: Literal["ranked", "maps"], kind: np.dtype[Any]
    ) -> npt.NDArray[Any] | None:
        """The rows of each pass, by the places of `beside`; those of prefetchers with other parameters are left out."""
        if not self.beside:
            return None
        found = [np.empty(0, kind)]
        for number, one in enumerate(named):
            for by, predictor in enumerate(one.predictors if one is not None else ()):
                if predictor in self.beside:
                    rows = getattr(one, field)
                    own = rows[rows["by"] == by].copy()
                    own["by"], own["of"] = self.beside.index(predictor), number
                    found.append(own)
        return np.concatenate(found)


def stored_traces(db: Database, loads: list[Load], chat: int | None) -> list[StoredTrace]:
    """One trace for each model among `loads` that has passes there, in order of first use."""
    models: dict[tuple[object, ...], list[Load]] = {}
    for load in loads:
        models.setdefault((load.model, str(load.manifest.get("model_hash", "")), load.shape), []).append(load)
    found = []
    for (_, model_hash, _), same in models.items():
        ids = tuple(load.id for load in same)
        sql, values = _passes("coalesce(sum(tokens), 0) AS tokens, coalesce(sum(length(ids)), 0) AS size", ids, chat)
        (row,) = db.rows(sql, *values)
        if row["tokens"]:
            shape = same[0].shape
            wide = np.dtype(id_type(shape.experts)).itemsize
            found.append(
                StoredTrace(
                    db,
                    ids,
                    chat,
                    shape.layers,
                    shape.experts,
                    shape.top_k,
                    same[0].model,
                    str(model_hash),
                    row["tokens"],
                    row["size"] // 2 * wide,
                    _last_predictors(db, ids, chat, shape.experts),
                )
            )
    return found


def _last_predictors(db: Database, loads: tuple[int, ...], chat: int | None, experts: int) -> tuple[Named, ...]:
    """The prefetchers of the last pass that was recorded for the lab; none where it is damaged, which reading the
    trace reports."""
    sql, values = _passes("named", loads, chat, lab=True)
    rows = db.rows(f"{sql} ORDER BY id DESC LIMIT 1", *values)
    try:
        named = unpacked(rows[0]["named"], experts) if rows else None
    except (ValueError, TypeError, KeyError):
        return ()
    return named.predictors if named is not None else ()


def _passes(
    columns: str, loads: tuple[int, ...], chat: int | None, *, lab: bool = False
) -> tuple[str, tuple[int, ...]]:
    """The query for passes recorded with routing; `lab`: those recorded for the lab."""
    marks = ", ".join("?" * len(loads))
    sql = f"SELECT {columns} FROM steps WHERE load IN ({marks}) AND layers > 0{' AND length(named) > 0' if lab else ''}"
    return (sql, loads) if chat is None else (f"{sql} AND chat = ?", (*loads, chat))
