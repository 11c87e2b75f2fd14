"""The tables, as a list of migrations: entry n takes a database from version n to n + 1. Never edit a released entry.

The column of a new metric needs none: it is added when a database is opened (`add_metrics`).

`steps` is the one source of every statistic: one row per forward pass, everything else is computed from it. `pieces`
holds the text of answers still being written, one row per token, so that a commit costs the same however long the
answer is; it is folded into `messages.text` when the answer ends (or, after a crash, when the store is opened)."""

import functools
import sqlite3
from collections.abc import Iterable
from contextlib import closing

from core.errors import MoestroError
from core.metrics import COUNTED, Metric


class StoreError(MoestroError):
    """The chats and statistics on disk cannot be read or written."""


class FullError(StoreError):
    """The disk has no room for the data."""


class DamagedError(StoreError):
    """The database is damaged, or its tables differ from this version's."""


MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE memory (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE chats (
        id INTEGER PRIMARY KEY AUTOINCREMENT, title TEXT NOT NULL, model TEXT NOT NULL, created REAL NOT NULL);
    CREATE TABLE messages (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        chat INTEGER NOT NULL REFERENCES chats(id) ON DELETE CASCADE,
        role TEXT NOT NULL, text TEXT NOT NULL, state TEXT NOT NULL, error TEXT NOT NULL DEFAULT '',
        stats TEXT, created REAL NOT NULL,
        asked INTEGER,         -- of an answer: the user message begun with it, NULL for a regeneration
        replaced_by INTEGER);  -- the answer of the edit or regeneration that took this one's place
    CREATE INDEX messages_chat ON messages(chat);
    CREATE TABLE pieces (
        message INTEGER NOT NULL REFERENCES messages(id) ON DELETE CASCADE, seq INTEGER NOT NULL, text TEXT NOT NULL,
        PRIMARY KEY (message, seq)) WITHOUT ROWID;
    CREATE TABLE loads (
        id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, created REAL NOT NULL, ended REAL,
        spec TEXT NOT NULL, settings TEXT NOT NULL, shape TEXT NOT NULL, manifest TEXT NOT NULL);
    CREATE TABLE steps (
        id INTEGER PRIMARY KEY, load INTEGER NOT NULL REFERENCES loads(id),
        chat INTEGER REFERENCES chats(id) ON DELETE CASCADE, answer INTEGER,
        step INTEGER NOT NULL, phase TEXT NOT NULL, tokens INTEGER NOT NULL, started_s REAL NOT NULL,
        total_ms REAL NOT NULL, compute_ms REAL NOT NULL, stall_ms REAL NOT NULL, idle_ms REAL NOT NULL,
        copy_ms REAL NOT NULL, prefetch_issued INTEGER NOT NULL, prefetch_used INTEGER NOT NULL,
        prefetch_late INTEGER NOT NULL, prefetch_wasted INTEGER NOT NULL, demand_bytes INTEGER NOT NULL,
        prefetch_bytes INTEGER NOT NULL, wasted_bytes INTEGER NOT NULL, slots INTEGER NOT NULL,
        device_bytes INTEGER NOT NULL, budget_bytes INTEGER NOT NULL, emulated INTEGER NOT NULL, exact INTEGER NOT NULL,
        layers INTEGER NOT NULL, top_k INTEGER NOT NULL,
        ids BLOB NOT NULL, layer BLOB NOT NULL, expert BLOB NOT NULL, outcome BLOB NOT NULL, transfers BLOB NOT NULL);
    CREATE INDEX steps_load ON steps(load);
    CREATE INDEX steps_chat ON steps(chat, phase);
    CREATE TABLE changes (
        id INTEGER PRIMARY KEY, load INTEGER NOT NULL REFERENCES loads(id), chat INTEGER, step INTEGER NOT NULL,
        time REAL NOT NULL, name TEXT NOT NULL, old TEXT NOT NULL, new TEXT NOT NULL);
    CREATE INDEX changes_load ON changes(load);
    """,
    # rows before this column: nothing was read from disk
    "ALTER TABLE steps ADD COLUMN disk_bytes INTEGER NOT NULL DEFAULT 0",
    """
    ALTER TABLE steps ADD COLUMN prefetch_evicted INTEGER NOT NULL DEFAULT 0;  -- before it these were not told apart
    ALTER TABLE steps ADD COLUMN late_bytes INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE steps ADD COLUMN evicted_bytes INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE steps ADD COLUMN predict_ms REAL NOT NULL DEFAULT 0;
    ALTER TABLE steps ADD COLUMN net_ms REAL NOT NULL DEFAULT 0;
    """,
    "ALTER TABLE messages ADD COLUMN quality TEXT",  # of a lossy answer that was scored against the exact model
    """
    ALTER TABLE steps ADD COLUMN changed INTEGER NOT NULL DEFAULT 0;     -- assignments that were not the router's ...
    ALTER TABLE steps ADD COLUMN choices BLOB NOT NULL DEFAULT x'';      -- ... and every event: metrics.lossy_events
    """,
    "ALTER TABLE steps ADD COLUMN named BLOB NOT NULL DEFAULT x''",  # for the lab: app/store/named.py
    # A chat is a tree. Before, a message that an edit or a regeneration had replaced was only hidden: of the messages
    # that were shown when one was begun, the last is its parent. `replaced_by` is not written any more.
    """
    ALTER TABLE messages ADD COLUMN parent INTEGER;       -- the message that it follows; NULL: it begins the chat
    ALTER TABLE messages ADD COLUMN leaf_before INTEGER;  -- of an answer: its chat's leaf when it was begun, to undo it
    ALTER TABLE chats ADD COLUMN leaf INTEGER;            -- the last message of the branch that is shown
    ALTER TABLE chats ADD COLUMN system TEXT NOT NULL DEFAULT '';
    UPDATE messages SET parent = CASE WHEN asked IS NOT NULL THEN asked ELSE (
        SELECT max(o.id) FROM messages o WHERE o.chat = messages.chat AND o.id < messages.id AND (
            o.replaced_by IS NULL OR o.replaced_by > coalesce(
                (SELECT a.id FROM messages a WHERE a.chat = messages.chat AND a.asked = messages.id), messages.id)))
        END;
    UPDATE messages SET leaf_before = coalesce(
            (SELECT max(o.id) FROM messages o WHERE o.chat = messages.chat AND o.replaced_by = messages.id),
            (SELECT u.parent FROM messages u WHERE u.id = messages.asked), parent)
        WHERE state = 'writing';
    UPDATE chats SET leaf = (SELECT max(id) FROM messages WHERE chat = chats.id AND replaced_by IS NULL);
    DROP INDEX messages_chat;
    CREATE INDEX messages_chat ON messages(chat, parent);
    """,
    # What an answer that was cut is continued with.
    """
    ALTER TABLE pieces ADD COLUMN token INTEGER;       -- its id; NULL: text that was withheld until the end
    ALTER TABLE messages ADD COLUMN tokens BLOB;       -- of an answer: the ids of its tokens, int32; NULL: unknown
    ALTER TABLE messages ADD COLUMN sampling TEXT;     -- ... the settings that it was begun with
    ALTER TABLE messages ADD COLUMN state_before TEXT; -- ... of one that is being continued, to undo that
    """,
)


def add_metrics(db: sqlite3.Connection, metrics: Iterable[Metric] = COUNTED) -> None:
    """Add a column to `steps` for each metric that no migration knows; passes recorded before have 0 there."""
    known, there = ({name for name, _ in found} for found in (_wanted()["steps"], _columns(db, "steps")))
    new = [(one.name, "REAL" if one.kind is float else "INTEGER") for one in metrics if one.name not in known | there]
    _run(db, "".join(f"ALTER TABLE steps ADD COLUMN {name} {kind} NOT NULL DEFAULT 0;" for name, kind in new))


def wrong_tables(db: sqlite3.Connection) -> str:
    """The required tables that a database lacks, or ""."""
    for table, wanted in _wanted().items():
        there = _columns(db, table)
        if lacking := sorted(name for name, _ in wanted - there):
            return f"its table {table} has no {lacking[0]}" if there else f"it has no table {table}"
    return ""


@functools.cache
def _wanted() -> dict[str, set[tuple[str, str]]]:
    """The tables of a new database, with their columns."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        migrate(fresh)
        tables = fresh.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        return {table: _columns(fresh, table) for (table,) in tables.fetchall()}


def _columns(db: sqlite3.Connection, table: str) -> set[tuple[str, str]]:
    """Names and types; empty where there is no such table."""
    return {(row[1], row[2]) for row in db.execute(f"PRAGMA table_info({table})")}


def migrate(db: sqlite3.Connection, migrations: tuple[str, ...] = MIGRATIONS) -> None:
    """Upgrade the database to the newest version, atomically. Raises StoreError if it is newer."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > len(migrations):
        raise StoreError(
            f"The chats on disk were written by a newer Moestro (version {version} of its tables, this "
            f"one knows {len(migrations)}). Update Moestro, or set MOESTRO_HOME to another folder."
        )
    if version < 0:
        raise DamagedError(f"The chats on disk are damaged: they have version {version}.")
    steps = [f"{script}; PRAGMA user_version = {n};" for n, script in enumerate(migrations[version:], version + 1)]
    _run(db, "".join(steps))


def _run(db: sqlite3.Connection, script: str) -> None:
    """All of a script's statements, or none."""
    if not script:
        return
    try:
        db.executescript(f"BEGIN IMMEDIATE; {script} COMMIT;")
    except sqlite3.Error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
