"""The models on this machine: packs, the local Hugging Face cache, and the user's folders. No UI code.

Uses no network and reads only configs, manifests and headers."""

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

from app.services.candidates import Entry, Where, is_pack, look
from app.store.database import Database
from core.errors import MoestroError
from core.system.paths import expanded
from core.system.reading import BadJson, parse_json, reason, require_regular, shown

DEPTH = 2  # search depth in the user's folders
MOST_INSIDE = 20_000  # entries per folder that are visited
LONGEST_REF = 4096  # bytes of a revision name in the Hugging Face cache
MOST_FOLDERS = 2000  # folders visited in the Hugging Face cache


class Library:
    """The models found at the last `refresh`, most recently used first. Thread-safe."""

    def __init__(self, db: Database, home: Path) -> None:
        self._db, self.packs = db, home / "packs"
        self._lock = threading.Lock()
        self._entries: list[Entry] | None = None
        self.version = 0  # counts changes of the list

    @property
    def folders(self) -> list[str]:
        """The user's folders that are searched."""
        return [str(folder) for folder in self._db.get("folders", list) or []]

    def set_folders(self, folders: Iterable[str]) -> None:
        """Store which folders are searched. Raises StoreError."""
        self._db.put("folders", list(dict.fromkeys(f for folder in folders if (f := folder.strip().strip('"')))))
        self._entries = None

    def entries(self) -> list[Entry]:
        """The entries last found; searches on first use."""
        with self._lock:
            found = self._entries
        return self.refresh() if found is None else found

    def refresh(self) -> list[Entry]:
        """Search again."""
        rows = self._db.rows("SELECT model, max(created) AS used FROM loads GROUP BY model")
        found = scan(self.packs, self.folders, {row["model"]: row["used"] for row in rows})
        with self._lock:
            self.version += found != self._entries
            self._entries = found
        return found

    def find(self, path: str | None) -> Entry | None:
        """The entry at a path, as last found."""
        return next((e for e in self.entries() if e.path == path), None)


def peek(home: Path) -> tuple[list[str], dict[str, float]]:
    """(the user's folders, path -> last load) from the store, also while another Moestro process has it open."""
    try:
        require_regular(home / "moestro.sqlite3")
        with closing(sqlite3.connect((home / "moestro.sqlite3").resolve().as_uri() + "?mode=ro", uri=True)) as db:
            kept = db.execute("SELECT value FROM memory WHERE key = 'folders'").fetchone()
            folders = parse_json(kept[0]) if kept else []
            return (
                list(map(str, folders)) if isinstance(folders, list) else [],
                dict(db.execute("SELECT model, max(created) FROM loads GROUP BY model").fetchall()),
            )
    except (sqlite3.Error, MoestroError, BadJson, TypeError):
        return [], {}  # nothing stored yet, or in an unknown format


def scan(packs: Path, folders: Iterable[str], used: Mapping[str, float]) -> list[Entry]:
    """Every model once, most recently used first, then by name. `used`: path -> time of the last load."""
    found: dict[Path, Entry] = {}
    times = {
        same_place(Path(str(model))): when
        for model, when in used.items()
        if model != "demo" and isinstance(when, int | float)
    }
    roots: list[tuple[Path, Where]] = [(packs, "packs"), *((Path(f), "folder") for f in folders)]
    for named, where in roots:
        try:
            root = expanded(named)
        except MoestroError as error:
            found[named] = _unusable(named, where, str(error))
            continue
        if where == "folder" and not _is_folder(root):
            problem = "There is no such folder, or it may not be read. Correct it or remove it from your folders."
            found[root] = _unusable(root, where, problem)
            continue
        for entry in _search(root, where):
            found.setdefault(same_place(Path(entry.path)), entry)
    for entry in cached():
        found.setdefault(same_place(Path(entry.path)), entry)
    for path in times:  # also packs that were loaded from other places
        if path not in found and _is_folder(path) and is_pack(str(path)) and (pack := look(path, "packs")) is not None:
            found[path] = pack
    listed = [replace(entry, used=times.get(path, 0.0)) for path, entry in found.items()]
    return sorted(listed, key=lambda e: (-e.used, e.name.lower(), e.path))


def cached() -> Iterator[Entry]:
    """Mixture-of-Experts models in the local Hugging Face cache (HF_HUB_CACHE, or where its library has it)."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    named = os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE
    try:
        folder = expanded(named)
        # huggingface_hub reads all of them, of any size
        for ref in islice(folder.glob("models--*/refs/*"), MOST_FOLDERS):
            if not ref.is_dir():
                require_regular(ref, LONGEST_REF)
        info = scan_cache_dir(folder)
    except (CacheNotFound, ValueError, OSError):
        return  # nothing downloaded yet
    except MoestroError as error:
        yield Entry("Hugging Face cache", shown(named), "cache", "?", problem=str(error))
        return
    for repo in info.repos:
        if repo.repo_type != "model":
            continue
        newest = max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified), default=None)
        if newest is None:
            continue
        snapshot = newest.snapshot_path
        if (entry := look(snapshot, "cache", repo.repo_id)) is not None:
            yield entry
        for file in sorted(islice(snapshot.rglob("*.gguf"), MOST_INSIDE)):
            if (entry := look(file, "cache", f"{repo.repo_id}/{file.relative_to(snapshot).as_posix()}")) is not None:
                yield entry
    for warning in info.warnings:
        yield Entry("Hugging Face cache", str(folder), "cache", "?", problem=str(warning).split(". ")[0])


def _search(root: Path, where: Where) -> Iterator[Entry]:
    """Candidates: a folder, its GGUF files, and the same two levels down; model folders are not descended into."""
    left, level = MOST_FOLDERS, [root]
    for _ in range(DEPTH + 1):
        deeper: list[Path] = []
        for folder in level:
            left -= 1
            if left < 0:
                return
            found = look(folder, where)
            if found is not None:
                yield found
                continue
            try:
                inside = sorted(islice(folder.iterdir(), MOST_INSIDE + 1))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                yield _unusable(folder, where, f"{reason(error)}: {shown(folder)}", folder.name)
                continue
            if len(inside) > MOST_INSIDE:
                some = f"It holds more than {MOST_INSIDE:,} files. Some of them are not listed; "
                yield _unusable(folder, where, f"{some}name the folder of the model itself.", folder.name)
            for path in inside[:MOST_INSIDE]:
                if _is_folder(path):
                    if not path.name.startswith("."):
                        deeper.append(path)
                elif path.suffix == ".gguf" and (entry := look(path, where)) is not None:
                    yield entry
        level = deeper


def _unusable(folder: Path, where: Where, problem: str, name: str = "") -> Entry:
    return Entry(shown(name or folder), shown(folder), where, "folder", problem=problem)


def same_place(path: Path) -> Path:
    """The canonical form of a path."""
    try:
        return expanded(path).resolve()
    except (OSError, RuntimeError, ValueError, MoestroError):
        return path


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # access denied
        return False
