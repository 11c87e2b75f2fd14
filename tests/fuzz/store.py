"""The user's database: bytes of its file, and values of its tables; opened, read whole, exported, and written to."""

import json
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from app.services.exports import archive, traces
from app.services.host import Host
from app.store import Store
from core.errors import MoestroError
from tests.app.conftest import QuickEngine, ended
from tests.fake_models import fake_estimate
from tests.fuzz.changes import Change, Gone, act
from tests.fuzz.draw import DEPTH, NUMBERS, OTHERS, byte_change, drawn, file_change
from tests.fuzz.mutant import Mutant

FILE = "home/moestro.sqlite3"
DEEP = f"replace(hex(zeroblob({DEPTH // 2})), '0', '[')"
VALUES = """NULL|-1|0|1e308|9223372036854775807|''|'x'|x'00ff'|'[1'|'"text"'|'{}'|'[]'|'null'|'NaN'|zeroblob(3)|""" + (
    f"zeroblob(100000)|cast(x'ff41' AS TEXT)|{DEEP}"
)
STATEMENTS = (
    "DROP TABLE {table}",
    "DELETE FROM {table}",
    "ALTER TABLE {table} DROP COLUMN {column}",
    "ALTER TABLE {table} RENAME TO other",
    "ALTER TABLE {table} RENAME COLUMN {column} TO other",
    "PRAGMA user_version = 0",
    "PRAGMA user_version = 2",
    "PRAGMA user_version = 999",
    "PRAGMA user_version = -1",
    "INSERT INTO {table} DEFAULT VALUES",
)

SHOWN = """WITH RECURSIVE path(id, parent) AS (
    SELECT m.id, m.parent FROM messages m JOIN chats c ON m.chat = c.id WHERE c.id = ? AND m.id = coalesce(
        (SELECT id FROM messages WHERE id = c.leaf AND chat = c.id), (SELECT max(id) FROM messages WHERE chat = c.id))
    UNION ALL SELECT m.id, m.parent FROM path JOIN messages m ON m.id = path.parent AND m.id < path.id)
    SELECT role, text FROM messages JOIN path USING (id) ORDER BY id"""


@act("sql")
def run_sql(file: Path, change: Mapping[str, Any]) -> None:
    """A statement on the database, with checks and references off."""
    try:
        with sqlite3.connect(file, isolation_level=None) as db:
            db.execute("PRAGMA ignore_check_constraints = ON")
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute(change["statement"])
        db.close()
    except sqlite3.Error:
        raise Gone from None


class Stores:
    """A host over the fake engine on a database that has been used. What it shows must be what the file holds."""

    name = "store"
    samples = ("used",)

    def make(self, sample: str, folder: Path) -> None:
        with closing(self._host(folder)) as host:
            for text in ("hello", "what is a slot?"):
                ended(host.chats.ask(None, text))
            host.models.change_many({"budget": "40%", "eviction": "lfu"})
            host.library.set_folders([str(folder / "models")])
        with sqlite3.connect(folder / FILE, isolation_level=None) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.execute("PRAGMA journal_mode = DELETE")
        db.close()

    @staticmethod
    def _host(folder: Path) -> Host:
        host = Host(Store(folder / "home"), QuickEngine, fake_estimate)
        try:
            host.chats.set_sampling(max_new_tokens=4)
            loading = host.loader.load(host.loader.plan("demo"))
            assert loading.join(20.0)
        except BaseException:
            host.close()
            raise
        return host

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        with sqlite3.connect(folder / FILE) as db:
            named = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name"
            tables = [name for (name,) in db.execute(named)]
            columns = {t: [row[1] for row in db.execute(f"PRAGMA table_info({t})")] for t in tables}
            keys = [key for (key,) in db.execute("SELECT key FROM memory ORDER BY key")]
        db.close()

        def remembered() -> Change:
            said = rng.choice((*OTHERS, *NUMBERS, DEEP, '{"budget": 3}', '{"eviction": "none", "x": 1}'))
            said = said if said == DEEP else f"'{said}'"
            return self._sql(f"UPDATE memory SET value = {said} WHERE key = '{rng.choice(keys)}'")

        def anywhere(table: str, column: str) -> Change:
            where = f"rowid = (SELECT max(rowid) FROM {table})" if table not in ("memory", "pieces") else "1"
            return self._sql(f"UPDATE {table} SET {column} = {rng.choice(VALUES.split('|'))} WHERE {where}")

        def place() -> dict[str, str]:
            return {"table": (table := rng.choice(tables)), "column": rng.choice(columns[table])}

        return drawn(
            rng,
            (0.05, lambda: file_change(rng, rng.choice((FILE, "home/in-use.sqlite3")))),
            (0.15, lambda: byte_change(rng, folder, FILE, range(100))),
            (0.20, lambda: byte_change(rng, folder, FILE)),
            (0.15, remembered),
            (0.10, lambda: self._sql(rng.choice(STATEMENTS).format(**place()))),
            (0.35, lambda: anywhere(**place())),
        )

    @staticmethod
    def _sql(statement: str) -> Change:
        return {"do": "sql", "file": FILE, "statement": statement}

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        if (folder / FILE).is_file():
            shutil.copy(folder / FILE, folder / "before.sqlite3")
        with closing(self._host(folder)) as host:
            seen: dict[str, Any] = {"chats": [(c.id, str(c.title)) for c in host.store.chats.all()]}
            seen["said"] = [[(m.role, m.text) for m in host.chats.messages(chat)] for chat, _ in sorted(seen["chats"])]
            refused = []
            for chat, _ in seen["chats"]:
                for write in (
                    lambda: archive.write(host.store, folder / "e.zip", chat=chat),  # noqa: B023
                    lambda: traces.write(traces.find(host.store, chat, None), folder / "t.trace"),  # noqa: B023
                ):
                    try:
                        write()
                    except MoestroError as error:
                        refused.append(str(error))
            host.library.refresh(), host.library.entries()
            answer = ended(host.chats.ask(None, "still there?"))
            seen["answered"] = answer.text
            seen["refused"] = refused
            assert not answer.error or "Moestro" in answer.error or answer.error.endswith("."), answer.error
            return seen

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        if seen["answered"] != whole["answered"]:
            return "what is asked now is answered otherwise"
        if not (folder / "before.sqlite3").is_file():
            return ""  # there was nothing: a new store
        try:
            with sqlite3.connect(folder / "before.sqlite3") as db:
                if [row[0] for row in db.execute("PRAGMA quick_check")] != ["ok"]:
                    return "the file is damaged and was used"
                chats = db.execute("SELECT id FROM chats ORDER BY id").fetchall()
                stored = [[list(row) for row in db.execute(SHOWN, chat)] for chat in chats]
            db.close()
        except sqlite3.Error as error:
            return f"the file cannot be read ({error}) and was used"
        shown = [[list(pair) for pair in chat] for chat in seen["said"]]
        same = json.dumps(shown, default=str) == json.dumps(stored, default=str)
        return "" if same else "it shows what is not stored"
