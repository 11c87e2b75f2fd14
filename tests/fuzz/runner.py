"""Hands mutants to worker processes, ends the ones that hang, starts new ones, and collects the verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tests.fuzz.mutant import Mutant, Verdict

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 20.0
ITS_OWN: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Ctrl-C is for the one who asks, not for workers
START_S = 120.0  # imports and samples of a fresh worker, on a busy machine
Asked = Mapping[str, Any]
"""A mutant as plain JSON, or {"kind", "seed"}."""


class Worker:
    """One process, started when it is needed. `run` is called by one thread."""

    def __init__(self, folder: Path, hang_s: float = HANG_S, command: tuple[str, ...] = ()) -> None:
        self._folder, self._hang_s = folder, hang_s
        self._command = command or (sys.executable, "-m", "tests.fuzz.worker")
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._log: IO[str] | None = None

    def run(self, asked: Asked) -> tuple[Mutant, Verdict]:
        """What became of a mutant; a hang or a crash costs the process."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        mutant: Mutant | None = None
        try:
            process.stdin.write(json.dumps(dict(asked)) + "\n")
            process.stdin.flush()
            while True:
                reply = self._replies.get(timeout=START_S if mutant is None else self._hang_s)
                if reply is None:
                    break
                told = json.loads(reply)
                mutant = Mutant.of(told["mutant"])
                if "verdict" in told:
                    return mutant, Verdict(**told["verdict"])
        except (queue.Empty, BrokenPipeError):
            if mutant is not None and process.poll() is None:
                self.close()
                return mutant, Verdict("hang", f"nothing for {self._hang_s:g} s")
        self.close()
        if mutant is None:
            raise RuntimeError(f"The worker did not get as far as the mutant {dict(asked)}:\n{self._tail()}")
        return mutant, Verdict("crash", f"the process ended with {process.returncode} {self._last_error()}".strip())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.name == "posix":
                    os.killpg(self._process.pid, signal.SIGKILL)  # and what it started
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log = (self._folder / "stderr.txt").open("w", encoding="utf-8")
        home = self._folder / "home"
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "GRADIO_ANALYTICS_ENABLED": "False",
            "HF_HOME": str(home),
            "MOESTRO_HOME": str(home),
            "TMPDIR": str(self._folder),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [*self._command, str(self._folder)],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=os.name == "posix",
            creationflags=ITS_OWN,
        )
        self._replies = queue.Queue()
        threading.Thread(target=_pump, args=(self._process, self._replies), daemon=True).start()

    def _last_error(self) -> str:
        """The exception that ended a worker, if it was one: a fault of this package."""
        found = re.findall(r"^\w*(?:Error|Exception)\b.*$", self._tail(100_000), re.MULTILINE)
        return str(found[-1])[:300] if found else ""

    def _tail(self, most: int = 2000) -> str:
        try:
            return (self._folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")[-most:]
        except OSError:
            return ""


def _pump(process: subprocess.Popen[str], replies: queue.Queue[str | None]) -> None:
    for line in process.stdout:
        replies.put(line)
    process.wait()
    replies.put(None)


def run_all(
    asked: Iterable[Asked], workers: int = 2, hang_s: float = HANG_S, stop: threading.Event | None = None
) -> Iterator[tuple[Mutant, Verdict]]:
    """Verdicts as they come, in any order. `asked` is read as it is needed, so it may be endless; `stop` ends it."""
    stop = stop or threading.Event()
    source, lock = iter(asked), threading.Lock()
    done: queue.Queue[tuple[Mutant, Verdict] | BaseException | None] = queue.Queue()
    made: list[Worker] = []

    def work(worker: Worker) -> None:
        try:
            while not stop.is_set():
                with lock:
                    one = next(source, None)
                if one is None:
                    break
                done.put(worker.run(one))
            done.put(None)
        except BaseException as error:
            done.put(error)
        finally:
            worker.close()

    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:
        made = [Worker(Path(folder) / str(n), hang_s) for n in range(workers)]
        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in made]
        for thread in threads:
            thread.start()
        left = workers
        try:
            while left:
                try:
                    found = done.get(timeout=1.0)  # without an end Ctrl-C would not be heard on Windows
                except queue.Empty:
                    continue
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            stop.set()
            for worker in made:
                worker.close()
            for thread in threads:
                thread.join(HANG_S)


def cores() -> int:
    return max(1, min(4, os.cpu_count() or 1))


def each(kinds: Iterable[str], seeds: Iterable[int]) -> Iterator[Asked]:
    """All kinds in turn, a seed each."""
    names = list(kinds)
    for number, seed in enumerate(seeds):
        yield {"kind": names[number % len(names)], "seed": seed}
