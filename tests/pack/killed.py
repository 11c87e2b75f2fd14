"""Run as `python -m tests.pack.killed SOURCE DIRECTORY SEED`: imports that are killed (SIGKILL) between two lines.

Every child of this process imports SOURCE into a directory of its own and is killed when it has run a random number of
the importer's lines: `moments` over the whole import, and as many over the end, where a pack gets its name. Then
another child goes on and is killed too, then one that is left alone. Prints one JSON line for each child.
"""

import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers

from core.importing import import_model

OURS = (f"{os.sep}memory{os.sep}pack{os.sep}", f"{os.sep}importing{os.sep}")
READING = f"{os.sep}sources{os.sep}"  # writes nothing
LAST = 120  # lines


class Count:
    """Counts the importer's lines in this thread; at number `last`, the process is killed."""

    def __init__(self, last: int) -> None:
        self.lines, self._last = 0, last

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if READING in file or not any(part in file for part in OURS):
            return None

        if event == "line":
            self.lines += 1
            if self.lines == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def counted(source: str, out: Path, last: int) -> int:
    """Import; the number of lines that took."""
    count = Count(last)
    sys.settrace(count.trace)
    try:
        import_model(source, out, format="int8")
    finally:
        sys.settrace(None)
    return count.lines


def child(source: str, out: Path, last: int) -> tuple[int, int]:
    """(exit code or -signal, lines run) of an import in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writing, str(counted(source, out, last)).encode())
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    lines = os.read(reading, 32).decode()
    os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(lines or last)


def main(source: str, directory: Path, seed: int, moments: int = 5) -> None:
    """Kill, look, go on."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    rng = random.Random(seed)
    lines = counted(source, directory / "reference", -1)
    first = [rng.randrange(1, lines) for _ in range(moments)]
    first += [rng.randrange(lines - LAST, lines) for _ in range(moments)]
    for number, last in enumerate(first):
        out = directory / f"killed-{number}"
        for upto in (last, rng.randrange(1, lines // 2), -1):
            code, ran = child(source, out, upto)
            print(json.dumps({"out": str(out), "code": code, "lines": ran, "exists": out.exists()}), flush=True)
            if out.exists():
                break


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
