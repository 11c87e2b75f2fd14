"""Recorded routing as traces: gives the steps of a chat or of a load the interface of any other trace.

There is no separate recording. Every pass is committed with its expert ids as it is computed, so a crash loses at most
the one being written, and every chat can be replayed without prior setup.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from app.store.database import Database
from app.store.schema import StoreError
from app.store.steps import Load, damaged_pass
from core.trace import Chunk
from core.trace.chunk import CHUNK, id_type

PIECE = 256  # passes read at a time


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """The routing of one model in a chat, or with chat None everything under `loads`. Implements core.trace.Trace.

    `size` = bytes of its ids before compression in a trace file.
    """

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

    def chunks(self) -> Iterator[Chunk]:
        """All passes in order, in chunks of bounded size; reads one consistent state of the store despite concurrent
        writes.
        """
        sql, values = _passes("id, answer, tokens, phase, ids", self.loads, self.chat)
        answers: dict[int | None, int] = {}
        with self.db.reader() as db:
            cursor = db.execute(f"{sql} ORDER BY id", values)
            rows, tokens = [], 0
            while piece := cursor.fetchmany(PIECE):
                for row in piece:
                    rows.append(row)
                    tokens += row["tokens"]
                    if tokens >= CHUNK:
                        yield self._chunk(rows, answers)
                        rows, tokens = [], 0
            if rows:
                yield self._chunk(rows, answers)

    def _chunk(self, rows: list[sqlite3.Row], answers: dict[int | None, int]) -> Chunk:
        ids = []
        for row in rows:
            try:
                ids.append(np.frombuffer(row["ids"], "<i2").reshape(self.layers, row["tokens"], self.top_k))
            except (ValueError, TypeError) as error:
                raise StoreError(damaged_pass(row["id"], error)) from error
        return Chunk(
            np.concatenate(ids, 1).transpose(1, 0, 2).astype(id_type(self.experts)),
            np.array([row["tokens"] for row in rows], np.int32),
            np.array([row["phase"] == "decode" for row in rows]),
            np.array([answers.setdefault(row["answer"], len(answers)) for row in rows], np.int32),
        )


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
                )
            )
    return found


def _passes(columns: str, loads: tuple[int, ...], chat: int | None) -> tuple[str, tuple[int, ...]]:
    """The query for passes recorded with routing."""
    marks = ", ".join("?" * len(loads))
    sql = f"SELECT {columns} FROM steps WHERE load IN ({marks}) AND layers > 0"
    return (sql, loads) if chat is None else (f"{sql} AND chat = ?", (*loads, chat))
