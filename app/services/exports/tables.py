"""Computes the tables of an export from the stored forward passes: vectorised, in batches, in one pass over the data.

Prefill and decode are never summed together: every table has a phase column."""

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from app.services.exports import answers, lossy_choices
from app.store import Load
from app.store.row_checks import timestamp
from app.store.steps import DEMAND, FROM_DISK, TRANSFER
from core.metrics import COUNTED, HIT_RATE, METRICS, REQUESTS, Outcome
from core.types import ModelShape

Tables = dict[str, pd.DataFrame]
Counts = npt.NDArray[np.int64]
PHASES = ("prefill", "decode")
BATCH = 256  # forward passes read at a time

_KEYS = {
    "load": "The loading of a model the row belongs to; see manifest.json.",
    "phase": "prefill (the prompt) or decode (one generated token a pass).",
}
_LAYER = {"layer": "Mixture-of-Experts layer, counted from 0."}
_OUTCOMES = {one.name: one.help for one in REQUESTS}
_RATE = {HIT_RATE.name: HIT_RATE.help}
_MS = "milliseconds"
DEFINITIONS: dict[str, dict[str, str]] = {
    "tokens": {
        "index": "Number of the forward pass since the model was loaded.",
        "load": _KEYS["load"],
        "chat": "The chat it was for; empty for the HTTP API.",
        "answer": "The answer it was for; empty for the HTTP API.",
        "phase": _KEYS["phase"],
        **{one.column or one.name: one.help for one in METRICS},
    },
    "layers": {**_KEYS, **_LAYER, **_OUTCOMES, **_RATE},
    "experts": {
        **_KEYS,
        **_LAYER,
        "expert": "Expert, counted from 0 within its layer.",
        "activations": "Tokens that the router sent to it.",
        **_OUTCOMES,
    },
    "coactivation": {
        **_KEYS,
        **_LAYER,
        "expert_i": "The one expert.",
        "expert_j": "The other, of higher number.",
        "tokens": "Tokens that the router sent to both; pairs that never met are left out.",
    },
    "transfers": {
        **_KEYS,
        "second": "Second since the model was loaded in which the copies ended.",
        "origin": "Where the copies came from: host memory or disk.",
        "demand_copies": "Experts copied on demand.",
        "prefetch_copies": "Experts copied by prefetches.",
        "demand_bytes": "Payload copied on demand.",
        "prefetch_bytes": "Payload copied by prefetches.",
        "copy_ms": f"Time the link was busy with them, in {_MS}.",
        "gb_s": "Payload per second of wall time, in GB/s (10^9 bytes).",
    },
    "answers": answers.DEFINITIONS,
    "choices": lossy_choices.DEFINITIONS,
    "settings": {
        "load": _KEYS["load"],
        "chat": "The chat whose forward pass took the change first; empty if deleted.",
        "index": "The forward pass that it acted on first.",
        "time": "When, in UTC.",
        "name": "The setting.",
        "old": "Its value before.",
        "new": "Its value from then on.",
    },
}
_RENAMED = {"step": "index", **{one.name: one.column for one in COUNTED if one.column}}


class _Sums:
    """Sums over all passes of one load, by phase (axis 0: prefill, decode)."""

    def __init__(self, shape: ModelShape) -> None:
        layers, experts = shape.layers, shape.experts
        self.shape = shape
        self.outcomes: Counts = np.zeros((2, layers, experts, len(Outcome)), np.int64)
        self.together: Counts = np.zeros((2, layers, experts, experts), np.int64)  # diagonal: activations
        self.seen = np.zeros(2, bool)

    def add(self, rows: Sequence[sqlite3.Row]) -> Counts:
        """Add a batch; returns [pass, outcome] counts."""
        decode = np.array([row["phase"] == "decode" for row in rows])
        self.seen |= [not decode.all(), decode.any()]
        outcome, layer, expert = (
            _joined(rows, name, dtype) for name, dtype in (("outcome", "u1"), ("layer", "<i2"), ("expert", "<i2"))
        )
        of = np.repeat(np.arange(len(rows)), [len(row["outcome"]) for row in rows])
        flat = np.ravel_multi_index((decode[of].astype(np.int64), layer, expert, outcome), self.outcomes.shape)
        self.outcomes += np.bincount(flat, minlength=self.outcomes.size).reshape(self.outcomes.shape)
        for phase in (0, 1):
            of_phase = [row for row in rows if (row["phase"] == "decode") == phase and row["layers"]]
            if of_phase:
                self._route(
                    phase,
                    np.concatenate(
                        [
                            np.frombuffer(row["ids"], "<i2").reshape(row["layers"], row["tokens"], row["top_k"])
                            for row in of_phase
                        ],
                        axis=1,
                    ),
                )
        return np.bincount(of * len(Outcome) + outcome, minlength=len(rows) * len(Outcome)).reshape(len(rows), -1)

    def _route(self, phase: int, ids: npt.NDArray[np.int16]) -> None:
        for layer, chosen in enumerate(ids):  # [T, k]
            on = np.zeros((len(chosen), self.shape.experts), np.float32)  # sums of ones: exact up to 2^24 tokens
            np.put_along_axis(on, chosen.astype(np.int64), 1.0, axis=1)
            self.together[phase, layer] += (on.T @ on).astype(np.int64)


def collect(db: sqlite3.Connection, loads: Sequence[Load], chat: int | None) -> Tables:
    """All tables over the passes of a chat, or of the loads when `chat` is None."""
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in DEFINITIONS}
    for load in loads:
        sums, moved = _Sums(load.shape), []
        where, values = ("load = ? AND chat = ?", (load.id, chat)) if chat is not None else ("load = ?", (load.id,))
        cursor = db.execute(f"SELECT * FROM steps WHERE {where} ORDER BY id", values)
        while rows := cursor.fetchmany(BATCH):
            parts["tokens"].append(_tokens(rows, sums.add(rows)))
            moved.append(_joined(rows, "transfers", TRANSFER))
            parts["choices"].append(lossy_choices.counted(load.id, rows))
        parts["layers"].append(_layers(load.id, sums))
        parts["experts"].append(_experts(load.id, sums))
        parts["coactivation"].append(_coactivation(load.id, sums))
        if moved:
            parts["transfers"].append(_seconds(load.id, np.concatenate(moved)))
        parts["answers"].append(answers.answers(db, load.id, chat))
        parts["choices"] = [lossy_choices.summed(parts["choices"])]
        parts["settings"].append(_settings(db, load.id))
    return {
        name: pd.concat([p for p in parts[name] if len(p)] or [pd.DataFrame(columns=list(columns))])[list(columns)]
        for name, columns in DEFINITIONS.items()
    }


def _tokens(rows: Sequence[sqlite3.Row], outcomes: Counts) -> pd.DataFrame:
    names = ("step", "load", "chat", "answer", "phase", "changed", *(one.name for one in COUNTED))
    table = pd.DataFrame([[row[name] for name in names] for row in rows], columns=list(names)).rename(columns=_RENAMED)
    table[["chat", "answer"]] = table[["chat", "answer"]].astype("Int64")
    flags = [one.column or one.name for one in COUNTED if one.kind is bool]
    table[flags] = table[flags].astype(bool)
    table["assignments"] = [row["layers"] * row["tokens"] * row["top_k"] for row in rows]
    return _with_outcomes(table, outcomes)


def _with_outcomes(table: pd.DataFrame, outcomes: Counts) -> pd.DataFrame:
    """Add the columns of REQUESTS and the hit rate from [row, outcome] counts."""
    counts = {one.name: outcomes[:, one.outcomes].sum(1) for one in REQUESTS}
    hits, requests = counts["hits"], counts["requests"]
    rate = np.divide(hits, requests, out=np.full(len(hits), np.nan), where=requests > 0)
    return table.assign(**counts, hit_rate=rate)


def _grid(load: int, sums: _Sums, **axes: int) -> tuple[pd.DataFrame, npt.NDArray[np.bool_]]:
    """One row for every phase that occurred and every combination of `axes`, and the mask of these rows among all."""
    index = np.indices((2, *axes.values())).reshape(1 + len(axes), -1)
    keep = sums.seen[index[0]]
    table = pd.DataFrame({"load": load, "phase": np.array(PHASES)[index[0]], **dict(zip(axes, index[1:], strict=True))})
    return table[keep], keep


def _layers(load: int, sums: _Sums) -> pd.DataFrame:
    table, keep = _grid(load, sums, layer=sums.shape.layers)
    return _with_outcomes(table, sums.outcomes.sum(2).reshape(-1, len(Outcome))[keep])


def _experts(load: int, sums: _Sums) -> pd.DataFrame:
    table, keep = _grid(load, sums, layer=sums.shape.layers, expert=sums.shape.experts)
    table["activations"] = np.diagonal(sums.together, axis1=2, axis2=3).reshape(-1)[keep]
    return _with_outcomes(table, sums.outcomes.reshape(-1, len(Outcome))[keep])


def _coactivation(load: int, sums: _Sums) -> pd.DataFrame:
    phase, layer, i, j = np.nonzero(np.triu(sums.together, 1))
    return pd.DataFrame(
        {
            "load": load,
            "phase": np.array(PHASES)[phase],
            "layer": layer,
            "expert_i": i,
            "expert_j": j,
            "tokens": sums.together[phase, layer, i, j],
        }
    )


def _seconds(load: int, moved: npt.NDArray[Any]) -> pd.DataFrame:
    demand, size = (moved["kind"] & DEMAND).astype(np.int64), moved["bytes"]
    table = pd.DataFrame(
        {
            "phase": np.array(PHASES)[moved["decode"]],
            "second": np.floor(moved["ended_s"]).astype(np.int64),
            "origin": np.where(moved["kind"] & FROM_DISK, "disk", "host"),
            "demand_copies": demand,
            "prefetch_copies": 1 - demand,
            "demand_bytes": size * demand,
            "prefetch_bytes": size * (1 - demand),
            "copy_ms": (moved["ended_s"] - moved["started_s"]) * 1e3,
        }
    )
    summed = table.groupby(["second", "phase", "origin"], as_index=False).sum()
    return summed.assign(load=load, gb_s=(summed["demand_bytes"] + summed["prefetch_bytes"]) / 1e9)


def _settings(db: sqlite3.Connection, load: int) -> pd.DataFrame:
    def utc(seconds: object) -> str:
        return datetime.fromtimestamp(timestamp(seconds, "time"), UTC).isoformat(timespec="milliseconds")

    rows = [
        (row["load"], row["chat"], row["step"], utc(row["time"]), row["name"], row["old"], row["new"])
        for row in db.execute("SELECT * FROM changes WHERE load = ? ORDER BY id", (load,))
    ]
    return pd.DataFrame(rows, columns=list(DEFINITIONS["settings"])).astype({"chat": "Int64"})


def _joined(rows: Sequence[sqlite3.Row], name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.frombuffer(b"".join(row[name] for row in rows), dtype)
