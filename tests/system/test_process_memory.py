"""What an engine leaves alone while it lives, and gives back when it is gone."""

import gc
import os
import platform
import subprocess
import sys
import weakref

import pytest

from core.system import process_memory

ARENAS = """
import ctypes, threading
import core  # bounds them
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
together = threading.Barrier(8)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


class Knot:
    """Holds on to itself."""

    def __init__(self) -> None:
        self.own = self


def test_freed_memory_is_given_back_at_most_twice_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trimmed = [1000.0], list[float]()
    monkeypatch.setattr(process_memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process_memory, "trim", lambda: trimmed.append(now[0]))
    monkeypatch.setattr(process_memory, "_trimmed_s", 0.0)
    for _ in range(100):
        process_memory.trim_now_and_then()
        now[0] += 1.0
    assert trimmed == [1000.0, 1031.0, 1062.0, 1093.0]


@pytest.mark.long(0.1)
def test_what_exists_with_an_engine_is_not_looked_at_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "gc", gc)  # the real one
    gc.unfreeze()
    lost, held = weakref.ref(Knot()), Knot()
    process_memory.freeze_gc()
    assert lost() is None and gc.get_freeze_count() > 0
    seen = weakref.ref(held)
    del held
    gc.collect()
    assert seen() is not None  # frozen
    process_memory.unfreeze_gc()
    assert seen() is None and gc.get_freeze_count() == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives threads arenas of their own")
def test_threads_share_two_arenas() -> None:
    def arenas(**environment: str) -> int:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | environment
        ran = subprocess.run([sys.executable, "-c", ARENAS], env=clean, capture_output=True, text=True, check=True)
        return ran.stdout.count("<heap nr=")

    assert arenas() <= 2
    assert arenas(MALLOC_ARENA_MAX="16") > 2  # the user's own setting is kept
