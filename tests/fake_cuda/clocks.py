"""Vector clocks of host threads and CUDA streams: what is ordered after what.

A clock maps the names of threads and streams to ticks. Work given to a stream follows what its host thread knew then,
and what the stream was given before. A thread learns what a stream did by waiting for it, and what another thread knew
by a lock, an event or a queue that both use. Reference: FastTrack, Flanagan and Freund 2009.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.fake_cuda.faults import Faults
from tests.fake_cuda.graphs import Captures
from tests.fake_cuda.memory import DeviceMemory

Clock = dict[str, int]
OWN = str(Path(__file__).parent)


class Wait(NamedTuple):
    """A thread that was held up until the device had done something: by `call`, made in `place`."""

    call: str
    place: str  # file and function that called torch
    thread: int


def merge(into: Clock, other: Clock) -> None:
    """Take over what is later in `other`."""
    for name, tick in other.items():
        if into.get(name, 0) < tick:
            into[name] = tick


class Stream:
    """Work in order. The arguments of torch's own are accepted and ignored."""

    def __init__(self, clocks: Clocks, *_: object, **__: object) -> None:
        self._clocks = clocks
        self.clock: Clock = {}
        with clocks.lock:
            self.name = f"stream {len(clocks.streams)}"
            clocks.streams.append(self)

    def issue(self) -> int:
        """One more piece of work, given by the calling thread -> its tick in the stream."""
        with self._clocks.lock:
            merge(self.clock, self._clocks.host)
            self.clock[self.name] = tick = self.clock.get(self.name, 0) + 1
            return tick

    def wait_event(self, event: Event) -> None:
        self._clocks.faults.check("stream.wait_event")
        with self._clocks.lock:
            self.issue()
            merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self._clocks.faults.check("stream.wait_stream")
        with self._clocks.lock:
            self.issue()
            merge(self.clock, other.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._clocks)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._clocks.faults.check("stream.synchronize")
        self._clocks.waited("stream.synchronize")
        with self._clocks.lock:
            self._clocks.learn(self.clock)


class Event:
    """A point in a stream. Until somebody waited for it, `query` says by chance whether it was reached."""

    def __init__(self, clocks: Clocks, enable_timing: bool = False, **_: object) -> None:
        self._clocks, self._timing = clocks, enable_timing
        self.clock: Clock = {}
        self._at: tuple[str, int] | None = None
        self._recorded_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._clocks.faults.check("event.record")
        with self._clocks.lock:
            stream = stream or self._clocks.current()
            self._at = stream.name, stream.issue()
            self.clock, self._recorded_s = dict(stream.clock), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._clocks.current()).wait_event(self)

    def query(self) -> bool:
        self._clocks.faults.check("event.query")
        self._clocks.captures.forbid()
        with self._clocks.lock:
            if not self._over() and self._clocks.draw.random() < 0.5:
                return False
            self._clocks.learn(self.clock)
            return True

    def synchronize(self) -> None:
        self._clocks.faults.check("event.synchronize")
        self._clocks.waited("event.synchronize")
        with self._clocks.lock:
            self._clocks.learn(self.clock)

    def elapsed_time(self, other: Event) -> float:
        self._clocks.faults.check("event.elapsed_time")
        if not (self._timing and other._timing):
            raise RuntimeError("CUDA error: invalid argument (an event without timing)")
        if self._at is None or other._at is None:
            raise RuntimeError("CUDA error: invalid resource handle (an event that was not recorded)")
        if not (self._over() and other._over()):
            raise RuntimeError("CUDA error: device not ready (an event that was not reached)")
        return max(1e-3, (other._recorded_s - self._recorded_s) * 1e3)

    def _over(self) -> bool:
        return self._at is None or self._clocks.done.get(self._at[0], 0) >= self._at[1]


class Clocks:
    """The clocks of one device. `lock` guards them all."""

    def __init__(self, draw: random.Random, faults: Faults, captures: Captures | None = None) -> None:
        self.draw, self.faults, self.lock = draw, faults, threading.RLock()
        self.captures = captures or Captures(faults, DeviceMemory(0))
        self.streams: list[Stream] = []
        self.done: Clock = {}  # of streams: what is known to be over
        self.default = Stream(self)
        self.waits: list[Wait] | None = None  # noted while a test wants to know
        self._local, self._names = threading.local(), itertools.count()

    @property
    def host(self) -> Clock:
        """The calling thread's clock."""
        local = self._local
        if not hasattr(local, "clock"):
            local.name, local.clock = f"thread {next(self._names)}", {}
        clock: Clock = local.clock
        return clock

    def touch(self) -> tuple[str, int]:
        """The calling thread itself does something -> its name and tick."""
        with self.lock:
            clock, name = self.host, self._local.name
            clock[name] = tick = clock.get(name, 0) + 1
            return name, tick

    def learn(self, clock: Clock) -> None:
        """The calling thread waited for what `clock` stands for."""
        merge(self.done, clock)
        merge(self.host, clock)

    def wait(self, call: str) -> None:
        """`call` makes the calling thread wait for its current stream."""
        self.waited(call)
        with self.lock:
            self.learn(self.current().clock)

    def waited(self, call: str) -> None:
        """Note that `call` holds up the calling thread, which it must not while passes are captured."""
        self.captures.forbid()
        if self.waits is None:
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and _passed_over(frame.f_code.co_filename):
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        self.waits.append(Wait(call, f"{path.parent.name}/{path.name}:{frame.f_code.co_name}", threading.get_ident()))

    def current(self, *_: object) -> Stream:
        """The calling thread's current stream."""
        stream: Stream = getattr(self._local, "stream", self.default)
        return stream

    @contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        """torch.cuda.stream."""
        before = self.current()
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def change(self, stream: Stream) -> None:
        """torch.cuda.set_stream."""
        self._local.stream = stream

    def synchronize(self, *_: object) -> None:
        """torch.cuda.synchronize."""
        self.faults.check("synchronize")
        self.waited("synchronize")
        with self.lock:
            for stream in self.streams:
                self.learn(stream.clock)


def _passed_over(file: str) -> bool:
    """Whether code in a file is the fake device's, or torch's own."""
    return file.startswith((OWN, "<")) or f"site-packages{os.sep}torch{os.sep}" in file
