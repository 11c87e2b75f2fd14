"""Chats and messages as the store reads them: their types, and the queries that find them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from app.store.row_checks import InvalidRow, fields

State = Literal["writing", "done", "stopped", "error", "interrupted", "edited"]
LINE = "c.id, c.title, c.model, c.created, CASE typeof(c.system) WHEN 'text' THEN c.system ELSE '' END AS system"
UP = "UNION ALL SELECT m.id, m.parent FROM path JOIN messages m ON m.id = path.parent AND m.id < path.id"
BRANCH = f"WITH RECURSIVE path(id, parent) AS (SELECT id, parent FROM messages WHERE id = c.leaf {UP})"
UNTOLD = "(SELECT count(*) FROM steps WHERE chat = c.id AND phase = 'decode' AND answer = m.id)"  # it has no figures
SUMS = f"""coalesce((SELECT max(created) FROM messages WHERE chat = c.id), c.created) AS updated,
    ({BRANCH} SELECT count(*) FROM path) AS messages,
    ({BRANCH} SELECT CAST(total(CASE WHEN role = 'user' THEN 0 WHEN json_valid(stats)
        THEN json_extract(stats, '$.new_tokens') + coalesce(json_extract(stats, '$.begun_tokens'), 0)
        ELSE {UNTOLD} END) AS INTEGER)
     FROM path JOIN messages m ON m.id = path.id) AS tokens"""
FIELDS = "m.id, m.role, m.text, m.state, m.error, m.stats, m.created, m.quality, m.parent"
SHOWN = f"""WITH RECURSIVE path(id, parent) AS (
    SELECT id, parent FROM messages WHERE id = (SELECT leaf FROM chats WHERE id = ?) AND chat = ? {UP})
    SELECT {FIELDS} FROM path JOIN messages m ON m.id = path.id ORDER BY m.id"""
EVERY = f"SELECT {FIELDS} FROM messages m WHERE m.chat = ? ORDER BY m.id"
NEWEST = """WITH RECURSIVE under(id) AS (
    SELECT id FROM messages WHERE id = ? AND chat = ?
    UNION ALL SELECT m.id FROM under JOIN messages m ON m.chat = ? AND m.parent = under.id AND m.id > under.id)
    SELECT max(id) AS id FROM under"""


@dataclass(frozen=True, slots=True)
class Chat:
    """One line of the history. `created` and `updated` are seconds since the epoch; `messages` = those of the branch
    that is shown; `tokens` = of its answers, as the lines under them count; `system` = the system prompt.
    """

    id: int
    title: str
    model: str
    created: float
    updated: float
    system: str
    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message as shown. `stats`, for a finished answer: the fields of `core.types.AnswerStats`, and `queued_ms`.
    `quality`, for one scored against the exact model: the fields of `core.engine.quality.report.Quality`. `unsaved`:
    why its text is only in memory. `branches`: the messages at its place in the chat, by age, itself included.
    """

    id: int
    role: Literal["user", "assistant"]
    text: str
    state: State
    error: str
    stats: dict[str, Any] | None
    created: float
    quality: dict[str, Any] | None = None
    unsaved: str = ""
    parent: int | None = None
    branches: tuple[int, ...] = ()


class Unfinished(NamedTuple):
    """An answer to continue: its text, its tokens (None: unknown), the settings of sampling that it was begun with."""

    text: str
    ids: tuple[int, ...] | None
    sampling: dict[str, Any]


def ids_of(kept: object) -> tuple[int, ...] | None:
    """The tokens of an answer; None where they are unknown."""
    whole = isinstance(kept, bytes) and len(kept) % 4 == 0
    return tuple(np.frombuffer(kept, "<i4").tolist()) if whole else None  # type: ignore[call-overload]


def blob_of(tokens: Iterable[int | None]) -> bytes:
    """The same as the store has them, without text that was no token's."""
    return np.array([one for one in tokens if one is not None], "<i4").tobytes()


def settings_of(kept: object) -> dict[str, Any]:
    """The settings that an answer was begun with; none where they are unknown."""
    try:
        return fields(kept, "sampling")
    except InvalidRow:
        return {}
