"""Every answer as a run: its figures, and the settings that it was computed with."""

import csv
import io
import sqlite3
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from app.store import Load, Store
from app.store.row_checks import InvalidRow, quality_of, stats_of
from app.wording import model_id
from core.settings.migration import migrated

MOST = 200  # runs, the latest
FIGURES = (
    *(
        "prompt_tokens cached_tokens new_tokens tok_s ttft_ms tpot_ms hit_rate stall_ms disk_misses exact emulated "
        "arithmetic"
    ).split(),
)
_ANSWERS = """
    SELECT m.id, m.chat, m.created, m.stats, m.quality, c.title, c.model FROM messages m JOIN chats c ON c.id = m.chat
    WHERE m.role = 'assistant' AND m.stats IS NOT NULL ORDER BY m.id DESC LIMIT ?"""
_PASSES = "SELECT answer, load, min(step) AS first, max(step) AS last FROM steps WHERE chat = ? GROUP BY answer, load"


@dataclass(frozen=True, slots=True)
class Run:
    """An answer. `settings`: at its first pass, as text; none where its passes were not recorded. `turned`: those that
    changed while it was computed."""

    answer: int
    chat: int
    title: str
    model: str
    created: float  # seconds since the epoch
    stats: Mapping[str, Any]
    quality: Mapping[str, Any] | None
    settings: Mapping[str, str]
    turned: tuple[str, ...] = ()


def runs(store: Store, most: int = MOST) -> list[Run]:
    """The latest answers with figures, newest first; those that are damaged are left out."""
    loads = {load.id: load for load in store.steps.loads()}
    in_force: dict[int, tuple[list[int], list[dict[str, str]]]] = {}
    passes: dict[int, dict[int, sqlite3.Row]] = {}  # by chat and answer
    found = list[Run]()
    for row in store.db.rows(_ANSWERS, most):
        try:
            stats, quality = stats_of(row["stats"]), quality_of(row["quality"])
        except InvalidRow:
            continue
        if row["chat"] not in passes:
            passes[row["chat"]] = {one["answer"]: one for one in store.db.rows(_PASSES, row["chat"])}
        own = passes[row["chat"]].get(row["id"])
        load = loads.get(own["load"]) if own is not None else None
        model, settings, turned = row["model"], dict[str, str](), tuple[str, ...]()
        if load is not None and own is not None:
            if load.id not in in_force:
                in_force[load.id] = settings_in_force(store, load)
            steps, forces = in_force[load.id]
            settings, after = (forces[bisect_right(steps, own[name])] for name in ("first", "last"))
            turned = tuple(name for name, value in after.items() if settings.get(name) != value)
            model = load.model
        about = row["id"], row["chat"], row["title"], model, row["created"]
        found.append(Run(*about, stats or {}, quality, settings, turned))
    return found


def settings_in_force(store: Store, load: Load) -> tuple[list[int], list[dict[str, str]]]:
    """(the passes before which settings changed; the settings before the first change, and after each), as text."""
    now = {name: str(value) for name, value in load.settings.items()}
    changes: dict[int, dict[str, str]] = {}
    for row in store.db.rows("SELECT step, name, new FROM changes WHERE load = ? ORDER BY id", load.id):
        changes.setdefault(row["step"], {})[row["name"]] = row["new"]
    forces = [now]
    for step in sorted(changes):
        now = {**now, **changes[step]}
        forces.append(now)
    return sorted(changes), [migrated(force) for force in forces]


def differing(some: Sequence[Run]) -> dict[str, list[str]]:
    """The settings in which runs differ: the value of each, "" where it is not known."""
    names = dict.fromkeys(name for one in some for name in one.settings)
    values = {name: [one.settings.get(name, "") for one in some] for name in names}
    return {name: each for name, each in values.items() if len({*each}) > 1}


def to_csv(found: Sequence[Run]) -> str:
    """A row for each run: its figures (as in answers.csv), and its settings, each in a column of its own."""
    names = sorted({name for one in found for name in one.settings})
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["answer", "chat", "model", "began", *FIGURES, *(f"setting.{name}" for name in names), "turned"])
    for one in found:
        began = datetime.fromtimestamp(one.created).astimezone().isoformat(timespec="seconds")
        figures = [one.stats.get(name) for name in FIGURES]
        settings = [one.settings.get(name) for name in names]
        about = one.answer, one.chat, model_id(one.model), began
        table.writerow([*about, *figures, *settings, " ".join(one.turned)])
    return out.getvalue()
