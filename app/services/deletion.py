"""Deletion of library entries: a pack's own files, or a revision in the Hugging Face cache. Foreign files stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.services.candidates import DAMAGED, Entry
from app.services.library import same_place
from core.errors import MoestroError
from core.system.reading import reason, shown
from core.system.wording import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

    from core.memory.pack.contents import Contents

CACHE_PARTS = {"blobs", "refs", "snapshots", ".no_exist"}  # what huggingface_hub has in a repository's folder
IGNORED = {".DS_Store"}  # what file managers put everywhere, and huggingface_hub ignores


def removable(entry: Entry, busy: Iterable[str]) -> None:
    """Raises MoestroError with the reason when an entry must not be deleted. `busy`: paths in use."""
    if entry.kind == DAMAGED:
        raise MoestroError(entry.problem)
    if not entry.can_delete:
        raise MoestroError("Only packs are deleted from here. Delete this model with your file manager.")
    path = same_place(Path(entry.path))
    if any(path == same_place(Path(one)) or path in same_place(Path(one)).parents for one in busy):
        raise MoestroError(f"{entry.name} is in use. Unload it, or let its import end, then delete it.")


def inspect(entry: Entry) -> Contents:
    """What `delete` would delete and leave. Raises MoestroError when the entry must not be deleted."""
    from core.memory.pack.contents import contents

    removable(entry, ())
    try:
        return (_revision_files if entry.where == "cache" else contents)(Path(entry.path))
    except OSError as error:
        raise MoestroError(
            f"{entry.path} cannot be read: {reason(error)}. Check your permissions, and refresh the list."
        ) from error


def delete(entry: Entry, busy: Iterable[str] = (), from_cache: bool = False) -> Contents:
    """Delete a pack or, with `from_cache`, a model in the Hugging Face cache; returns what was deleted and what is
    left in its folder.

    Raises MoestroError, with nothing deleted, when the entry must not be deleted.
    """
    removable(entry, busy)
    if entry.where == "cache" and not from_cache:
        raise MoestroError(
            f"{entry.name} is in the Hugging Face cache, which other programs use as well. Confirm "
            "that it is to be deleted there."
        )
    try:
        return (_delete_revision if entry.where == "cache" else _delete_pack)(Path(entry.path))
    except OSError as error:
        raise MoestroError(
            f"{entry.name} was not deleted completely: {reason(error)}. Close what uses it, and check your "
            "permissions, then delete it again."
        ) from error


def describe(what: Contents) -> str:
    """What goes, as text: "3 files, 1.2 GB: config.json, ..."."""
    count = len(what.own)
    return f"{count:,} file{'s' if count != 1 else ''}, {format_bytes(what.bytes)}: {_names(what.own)}"


def stays(what: Contents) -> str:
    """What is left, as a sentence; "" when nothing is."""
    return f"What is not the pack's stays, and the folder with it: {_names(what.foreign)}." if what.foreign else ""


def outcome(entry: Entry, what: Contents) -> str:
    """What was deleted, and what was left, as text."""
    left = f" Left in the folder: {_names(what.foreign)} ({entry.path})." if what.foreign else ""
    return f"Deleted {entry.name}: {format_bytes(what.bytes)} are free again.{left}"


def _names(files: tuple[str, ...]) -> str:
    from core.memory.pack.contents import names

    return names(files)


def _delete_pack(path: Path) -> Contents:
    from core.memory.pack import contents
    from core.memory.pack.lock import Lock

    pack = path.with_name(path.name.removesuffix(".partial"))
    lock = Lock(pack.with_name(f"{pack.name}.lock"), f"An import{{}} is writing {pack}. Cancel it, then delete it.")
    try:
        return contents.delete(path)
    finally:
        lock.release()


def _revision_files(path: Path) -> Contents:
    from core.memory.pack.contents import Contents

    _, revision, own = _revision(path)
    return Contents(own, (), revision.size_on_disk)


def _delete_revision(path: Path) -> Contents:
    """Delete a revision of a model from the Hugging Face cache through huggingface_hub."""
    from core.memory.pack.contents import Contents

    info, revision, own = _revision(path)
    strategy = info.delete_revisions(revision.commit_hash)
    freed = strategy.expected_freed_size
    strategy.execute()  # logs what it cannot delete
    if revision.snapshot_path.exists():
        raise OSError(f"{revision.snapshot_path} is still there")
    return Contents(own, (), freed)


def _revision(path: Path) -> tuple[HFCacheInfo, CachedRevisionInfo, tuple[str, ...]]:
    """(its repository as the only one of the cache, the revision, names of its files) of a model in the cache.

    Only this repository: copies of it under another name have revisions of the same name. Raises MoestroError when it
    is gone, or when its deletion would also take what huggingface_hub did not write.
    """
    from huggingface_hub import scan_cache_dir

    snapshot = next((p for p in (path, *path.parents) if p.parent.name == "snapshots"), None)
    gone = MoestroError(f"{path} is not in the Hugging Face cache any more. Refresh the list.")
    if snapshot is None:
        raise gone
    info = scan_cache_dir(snapshot.parents[2])
    repo = next((one for one in info.repos if same_place(one.repo_path) == same_place(snapshot.parents[1])), None)
    revision = next((one for one in repo.revisions if one.commit_hash == snapshot.name), None) if repo else None
    if repo is None or revision is None:
        raise gone
    foreign = sorted(shown(file.relative_to(repo.repo_path)) for file in _foreign(repo, revision))
    if foreign:
        raise MoestroError(
            f"The folder of {repo.repo_id} in the Hugging Face cache also has files that do not belong there, and they "
            f"would be lost: {_names(tuple(foreign))}. Move them out of {shown(repo.repo_path)}, then delete the model "
            "again."
        )
    own = tuple(sorted(file.file_path.relative_to(revision.snapshot_path).as_posix() for file in revision.files))
    return replace(info, repos=frozenset({repo})), revision, own


def _foreign(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> Iterator[Path]:
    """Files that huggingface_hub did not write but deletes together with a revision: links to other places, copies
    among links, and, with the last revision, everything else in the repository's folder."""
    blobs = repo.repo_path / "blobs"
    everything = len(repo.revisions) == 1
    links = {file.file_path for file in revision.files if same_place(file.blob_path.parent) == same_place(blobs)}
    for file in revision.files:
        apart = file.file_path not in links and (links or file.file_path.is_symlink())
        if apart and file.file_name not in IGNORED:
            yield file.file_path
    if everything:
        linked = {file.blob_path.name for file in revision.files}
        yield from (part for part in repo.repo_path.iterdir() if part.name not in CACHE_PARTS | IGNORED)
        for blob in blobs.iterdir() if blobs.is_dir() else ():
            if blob.name not in linked | IGNORED and not _is_hash(blob.name.split(".")[0]):
                yield blob


def _is_hash(name: str) -> bool:
    """Whether this is a name that huggingface_hub gives a blob: the hex digits of its etag."""
    return len(name) >= 32 and set(name) <= set("0123456789abcdef")
