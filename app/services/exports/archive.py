"""Exports a chat, or everything since a load, as a zip of tidy CSV files and a manifest that describes every column."""

import errno
import json
import platform
import sqlite3
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import numpy as np
import pandas as pd

from app.services.exports.tables import DEFINITIONS, Tables, collect
from app.store import Load, Store, StoreError
from app.store.private import open_private, private_folder
from app.store.row_checks import InvalidRow
from app.wording import model_id
from core import __version__
from core.errors import MoestroError, TraceError

FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG}
Opener = Callable[[Path], IO[bytes]]


class NothingThere(MoestroError):
    """The chat or load to export does not exist."""


class ExportError(MoestroError):
    """The export could not be written; no partial file is left."""


def write(
    store: Store,
    path: Path,
    *,
    chat: int | None = None,
    load: int | None = None,
    opener: Opener = lambda path: open_private(path),
) -> Path:
    """Write the export of a chat or of a load to `path`; returns it. An existing file is replaced atomically.

    Raises NothingThere, or ExportError when it cannot be written."""
    with (
        fresh(path, "export") as part,
        opener(part) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, text in contents(store, chat, load).items():
            archive.writestr(zipfile.ZipInfo(name, _stamp()), text, zipfile.ZIP_DEFLATED)
    return path


@contextmanager
def fresh(path: Path, what: str) -> Iterator[Path]:
    """A file to write, which takes the place of `path` when it is complete, and is deleted where it will not be.
    Raises ExportError, which says `what` could not be written."""
    part = path.with_name(path.name + ".part")
    try:
        private_folder(path.parent)
        part.unlink(missing_ok=True)
        try:
            yield part
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, TraceError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__ or error
        if getattr(cause, "errno", None) in FULL:
            raise ExportError(
                f"The disk is full: the {what} was not written to the data folder. Free some space, then try again. "
                "Your chats are as they were."
            ) from error
        reason = getattr(cause, "strerror", None) or error
        raise ExportError(f"The {what} could not be written in the data folder: {reason}.") from error


def contents(store: Store, chat: int | None, load: int | None) -> dict[str, str]:
    """The files of an export by name. Raises NothingThere."""
    with store.db.reader() as db:
        try:
            if chat is not None and db.execute("SELECT 1 FROM chats WHERE id = ?", (chat,)).fetchone() is None:
                raise NothingThere("That chat no longer exists. Pick another one to export.")
            if chat is None and db.execute("SELECT 1 FROM loads WHERE id = ?", (load,)).fetchone() is None:
                raise NothingThere("Nothing was recorded under that load. Pick another one to export.")
            key, value = ("chat", chat) if chat is not None else ("load", load)
            found = db.execute(f"SELECT DISTINCT load FROM steps WHERE {key} = ?", (value,))
            loads = store.steps.loads([*(row[0] for row in found), *([] if load is None else [load])])
            tables = collect(db, loads, chat)
        except sqlite3.Error as error:
            raise StoreError(f"The statistics on disk could not be read: {error}.") from error
        except (ValueError, TypeError, IndexError, OverflowError, MemoryError) as error:  # malformed rows
            how = f": {error}" if isinstance(error, InvalidRow) else ""
            raise StoreError(
                f"What was recorded there is damaged{how}. Delete the recording of the chat in the tab "
                "Sessions; its words are kept."
            ) from error
    of = f"chat {chat}" if chat is not None else f"everything since load {load}"
    return {
        **{
            f"{name}.csv": table.to_csv(index=False, lineterminator="\n", float_format="%.10g")
            for name, table in tables.items()
        },
        "manifest.json": json.dumps(manifest(of, loads, tables), indent=2, default=str),
    }


def manifest(of: str, loads: list[Load], tables: Tables) -> dict[str, object]:
    """The manifest: model, machine and settings behind the figures, and the meaning of each column."""
    steps = tables["tokens"]
    return {
        "export": of,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "moestro": __version__,
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "pandas": pd.__version__},
        "exact": bool(steps["exact"].all()) and not any(map(_is_rounded, loads)),
        "link": "none"
        if steps.empty
        else "emulated"
        if steps["emulated"].all()
        else "partly emulated"
        if steps["emulated"].any()
        else "measured",
        "loads": [
            {
                "load": one.id,
                **one.manifest,
                "loaded": _utc(one.created),
                "unloaded": _utc(one.ended),
                "model": model_id(one.model),
                "shape": {name: getattr(one.shape, name) for name in one.shape.__slots__},
                "spec": {**one.spec, "model": model_id(one.model)},
                "settings_at_load": one.settings,
            }
            for one in loads
        ],
        "definitions": DEFINITIONS,
    }


def _stamp() -> tuple[int, int, int, int, int, int]:
    """Now, as a ZIP file can say it: of a clock outside 1980 to 2107, the nearest moment."""
    now = time.localtime()[:6]
    return min(max(now, (1980, 1, 1, 0, 0, 0)), (2107, 12, 31, 23, 59, 58))


def _utc(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _is_rounded(load: Load) -> bool:
    """Whether exact answers of a load may differ in bits from those of the same arithmetic with everything resident."""
    return not str(load.manifest.get("arithmetic")).startswith("fast") and bool(load.manifest.get("closeness"))
