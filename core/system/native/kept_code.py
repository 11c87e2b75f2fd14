"""Machine code in a folder: what one process compiled, later ones load, which takes a hundredth of the time.

A file is named by the SHA-256 of all that its code depends on, and begins with that of the code: what is not whole is
compiled again. Files that no process has used for two months are removed by the next one that compiles. Whoever can
write into the folder can run code here, as with Python's own compiled modules.
"""

import functools
import logging
import os
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

UNUSED_S = 60 * 24 * 3600.0  # since a file was written or read
NAME = 64  # characters of a file's name, the least

log = logging.getLogger("moestro.kernels")

_folder: Path | None = None


def keep_in(folder: Path | None) -> None:
    """Keep machine code in this folder, and take what is there; None = in this process only."""
    global _folder
    _folder = folder


def attach(engine: Any, *about: object) -> None:
    """Let llvmlite's execution `engine` use the folder for its module, whose code depends on `about` alone."""
    if _folder is not None:
        file = _folder / sha256("\n".join(map(str, about)).encode()).hexdigest()
        engine.set_object_cache(lambda _, code: _write(file, code), lambda _: _read(file))


def _read(file: Path) -> bytes | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    if sha256(code := content[32:]).digest() != content[:32]:
        return None
    with suppress(OSError):  # a folder of another user's
        os.utime(file)
    return code


def _write(file: Path, code: bytes) -> None:
    """As a whole, as other processes may read it meanwhile."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(sha256(code).digest() + code)
        partial.replace(file)
        _remove_unused(file.parent)
    except OSError as error:
        log.warning("Compiled kernels are not kept in %s: %s", file.parent, error)
        keep_in(None)


@functools.cache
def _remove_unused(folder: Path) -> None:
    """Once a process. Others may remove the same files, and what is no file of this module stays."""
    for file in folder.iterdir():
        with suppress(OSError):
            if len(file.name) >= NAME and time.time() - file.stat().st_mtime > UNUSED_S:
                file.unlink()
