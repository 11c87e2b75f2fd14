"""What a worker process may do that nobody trusts. Its requests name a function of this module; the worker imports it
alone."""

import gc
import os
import signal
import struct
import sys
import time
from multiprocessing.connection import Connection

from core.system.limited_process import Answer

MUCH = 300 << 20


def prepare() -> Answer:
    return answer


def fails() -> Answer:
    raise SystemExit(5)


def answer(request: bytes) -> bytes:
    name, _, rest = request.partition(b" ")
    if name == b"echo":
        return rest
    return globals()[name.decode()]() or b"done"


def holds_the_lock() -> None:
    """In one call of C, for longer than anybody waits."""
    nine = 9
    print(nine ** (nine**nine) > 0)


def loops() -> None:
    while True:
        pass


def sleeps() -> None:
    time.sleep(3600)


def asks_for_much() -> None:
    print(len(b"a" * 10**10))


def takes_much() -> None:
    kept = b"a" * MUCH
    time.sleep(3600)
    print(len(kept))


def says_much() -> bytes:
    return b"a" * (8 << 20)


def announces_much() -> None:
    """A message of a terabyte, without end."""
    os.write(_pipe().fileno(), struct.pack("!i", -1) + struct.pack("!Q", 1 << 40))
    while True:
        os.write(_pipe().fileno(), b"a" * 4096)


def says_half() -> None:
    os.write(_pipe().fileno(), struct.pack("!i", 100) + b"a" * 50)
    time.sleep(3600)


def says_it_twice() -> bytes:
    _pipe().send_bytes(b"one more")
    return b"done"


def dies() -> None:
    os._exit(3)


def crashes() -> None:
    if sys.platform != "win32":
        os.kill(os.getpid(), signal.SIGSEGV)
    os._exit(3)


def closes_its_pipe() -> None:
    _pipe().close()
    time.sleep(3600)


def hears_nothing_more() -> None:
    """Reads none of the next request, whose size no pipe holds."""
    _pipe().send_bytes(b"done")
    time.sleep(3600)


def cannot_be_asked_to_end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _pipe() -> Connection:
    """The worker's end, as a program finds it that has broken out of its sandbox."""
    gc.unfreeze()
    return next(one for one in gc.get_objects() if isinstance(one, Connection) and one.readable and one.writable)
