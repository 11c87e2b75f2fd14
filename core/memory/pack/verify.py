"""Verification of a pack: a quick check at every opening, and a full byte-for-byte check on request."""

import hashlib
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from core.errors import ModelError
from core.memory.pack.manifest import DENSE, Manifest, layer_file
from core.memory.pack.manifest_json import PackFile
from core.memory.pack.pagefile import PageFile
from core.memory.pack.remedies import REPAIR, damaged, unreadable
from core.memory.pages import aligned

CHUNK = 4 << 20  # bytes hashed at a time
HEADER_LIMIT = 100 << 20  # as in safetensors itself


class VerifyResult(NamedTuple):
    """Result of a full verification: the pack's manifest if valid, bytes read, and the problems in words."""

    manifest: Manifest | None
    bytes: int
    problems: tuple[str, ...]


def check(pack: Path) -> Manifest:
    """Quick check: manifest, size of every file, content of the small ones, header of the dense weights.

    Takes milliseconds; reads no weights. Raises ModelError with the problem and the remedy.
    """
    manifest = Manifest.load(pack)
    for name, entry in manifest.files.items():
        if problem := _quick(pack / name, entry):
            raise ModelError(problem)
    return manifest


def check_dense(pack: Path, manifest: Manifest) -> None:
    """Verify the checksum of the dense weights, reading all of them. Raises ModelError when it does not match."""
    try:
        if file_hash(pack / DENSE) != manifest.files[DENSE].sha256:
            raise ModelError(damaged(pack / DENSE, ": it is not what was written"))
    except OSError as error:
        raise ModelError(unreadable(pack / DENSE, error)) from None


def _quick(file: Path, entry: PackFile) -> str:
    """The problem of a file as far as it can be found without reading weights, or ""."""
    try:
        found = file.stat()
        size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            return damaged(file, ": it is not a regular file")
        if size != entry.bytes:
            return damaged(file, f": it has {size:,} bytes instead of {entry.bytes:,}")
        if entry.head and head_hash(file) != entry.head:
            return damaged(file, ": its header is not what was written")
        if entry.sha256 and not entry.head and file_hash(file) != entry.sha256:
            return damaged(file, ": it is not what was written")
    except FileNotFoundError:
        return f"{file} is missing. Put it back. Otherwise: {REPAIR[0].lower()}{REPAIR[1:]}"
    except OSError as error:
        return unreadable(file, error)
    return ""


def verify(pack: Path, progress: Callable[[str, int, int], None] = lambda text, done, total: None) -> VerifyResult:
    """Read everything and compare it with its checksums. `progress(file, bytes done, total bytes)`.

    Continues after a problem, so that all are found. A damaged pack raises nothing.
    """
    try:
        manifest = Manifest.load(pack)
    except ModelError as error:
        return VerifyResult(None, 0, (str(error),))
    problems: list[str] = []
    done = 0
    layers = {layer_file(layer): layer for layer in range(manifest.layers)}
    for name, entry in manifest.files.items():
        file = pack / name
        problem = _quick(file, entry)
        try:
            if name in layers and not problem:
                for size, wrong in _blobs(file, manifest, layers[name]):
                    problems += [wrong] if wrong else []
                    progress(name, done + size, manifest.bytes)
            elif entry.head and not problem:
                whole = hashlib.sha256()
                for size, chunk in _chunks(file):
                    whole.update(chunk)
                    progress(name, done + size, manifest.bytes)
                problem = "" if whole.hexdigest() == entry.sha256 else damaged(file, ": it is not what was written")
        except EOFError as error:
            problem = damaged(file, f": {error}")
        except OSError as error:
            problem = unreadable(file, error)
        problems += [problem] if problem else []
        done += entry.bytes
        progress(name, done, manifest.bytes)
    return VerifyResult(manifest, done, tuple(problems))


def _blobs(file: Path, manifest: Manifest, layer: int) -> Iterator[tuple[int, str]]:
    """Yields (bytes read so far, the problem or "") after every expert of a layer."""
    size = manifest.kind(layer).padded_bytes
    buffer = aligned(size).numpy().data
    pages = PageFile(file)
    try:
        for expert, stated in enumerate(manifest.sums[layer]):
            pages.read(buffer, expert * size)
            good = zlib.crc32(buffer) == stated
            yield (
                (expert + 1) * size,
                "" if good else damaged(file, f": expert {expert} of MoE layer {layer} is not what was written"),
            )
    finally:
        pages.close()


def _chunks(file: Path) -> Iterator[tuple[int, memoryview]]:
    """Yields (bytes read so far, the latest chunk)."""
    buffer = memoryview(bytearray(CHUNK))
    done = 0
    with file.open("rb", buffering=0) as handle:
        while got := handle.readinto(buffer):
            done += got
            yield done, buffer[:got]


def file_hash(file: Path) -> str:
    """sha256 of a file. Raises OSError."""
    digest = hashlib.sha256()
    for _, chunk in _chunks(file):
        digest.update(chunk)
    return digest.hexdigest()


def head_hash(file: Path) -> str:
    """sha256 of a safetensors file's header, its length included. Raises OSError."""
    with file.open("rb") as handle:
        length = handle.read(8)
        return hashlib.sha256(length + handle.read(min(int.from_bytes(length, "little"), HEADER_LIMIT))).hexdigest()
