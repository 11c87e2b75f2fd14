"""Drops files from the page cache and verifies it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

METHOD = "posix_fadvise(DONTNEED) on every file of the model before every run, checked with mincore"
NO_METHOD = "none: this system has no posix_fadvise, so files may come from the page cache"


def drop(paths: Iterable[Path]) -> int | None:
    """Drops the pages of these files, and of all files in these directories; returns the bytes that stayed cached
    (because another process maps them). None: this system cannot tell, and nothing was dropped."""
    if not hasattr(os, "posix_fadvise"):
        return None
    stayed = 0
    for file in _files(paths):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(handle)  # dirty pages cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            stayed += cached(handle)
        finally:
            os.close(handle)
    return stayed


def cached(handle: int) -> int:
    """Bytes of an open file that are in the page cache (mincore on a map of it, which reads no pages)."""
    size = os.fstat(handle).st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pages = -(-size // mmap.PAGESIZE)
    flags = ctypes.create_string_buffer(pages)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        if libc.mincore(address, size, flags):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(address, size)
    return sum(byte & 1 for byte in flags.raw) * mmap.PAGESIZE


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        yield from (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
