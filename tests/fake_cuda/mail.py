"""What a GPU's kernels and the host's threads tell each other within a token (core.runtime.host_join), for the race
detector: who knows what by a flag, and what is read and written in between.

A kernel that writes a flag passes on what its stream knows, and one that reads it learns what the writer knew; so does
the thread that computes for the host, in the place of whose native code a function of Python is called.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from core.memory.codec.native.team_code import functions as team_functions
from core.runtime import attend_code
from core.runtime.attend_code import EACH, FIELDS, HOME, LAST, MAIL
from core.runtime.host_join import HostJoin
from core.runtime.program.gpu.mailbox import COUNT, DONE, IDS, PUBLISHED
from tests.fake_cuda.clocks import Clock, merge

if TYPE_CHECKING:
    from tests.fake_cuda.device import FakeCuda
    from tests.fake_cuda.interpreter import Interpreter

STATE, OUTPUTS = "state", "outputs"  # kinds of regions
LONG_S = 20.0


class Flags:
    """What was known when each number was written to a flag, by its address."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        self._known: dict[tuple[int, int], Clock] = {}

    def tell(self, at: int, number: int, clock: Clock) -> None:
        with self._fake.clocks.lock:
            self._known[at, number] = dict(clock)

    def learn(self, at: int, number: int, clock: Clock) -> None:
        with self._fake.clocks.lock:
            merge(clock, self._known.get((at, number), {}))


class Mails:
    """Watches the mailboxes of all that is joined while it is `watching`."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake, self.flags = fake, Flags(fake)
        self._at: dict[int, HostJoin] = {}  # mailboxes by address
        self.attends: Callable[[Mails, int, int, int], None] = attend

    def installed(self, interpreter: Interpreter, patch: pytest.MonkeyPatch) -> Mails:
        """Watch, and annotate the interpreted kernels."""
        from core.runtime.program.gpu import hosted

        self.watching(patch)

        def load(at: Any) -> Any:
            found = real_load(at)
            address, stream = int(at.handle.data.item()), self.fake.clocks.current()
            self.flags.learn(address, int(found.handle.data.item()), stream.clock)
            return found

        def store(at: Any, value: Any) -> None:
            self.published(int(at.handle.data.item()) - PUBLISHED, int(value.handle.data.item()))
            real_store(at, value)

        def joined(given: Mapping[str, Any]) -> None:
            if given["mail"] in self._at and int(given["state"][1]):
                self._stream(given["mail"] + self._at[given["mail"]].form.out, writes=False)

        interpreter.after["_join"] = joined
        real_load, real_store = hosted.load, hosted.store
        patch.setattr(hosted, "load", load)
        patch.setattr(hosted, "store", store)
        return self

    def watching(self, patch: pytest.MonkeyPatch) -> None:
        """Watch, and have threads call `attends` in the place of native code."""
        real_init, real_close = HostJoin.__init__, HostJoin.close

        def init(join: HostJoin, *given: Any) -> None:
            real_init(join, *given)
            (mail,) = join._memory.rows
            self._at[mail.data_ptr()] = join
            races, form = self.fake.races, join.form
            races.watch(mail.data_ptr() + form.x, 4 * form.width, STATE)
            races.watch(mail.data_ptr() + form.out, 4 * form.width * form.chosen, OUTPUTS)

        def close(join: HostJoin) -> None:
            for mail, form in [(mail.data_ptr(), join.form) for mail in join._memory.rows]:
                if not join.stuck and self._at.pop(mail, None) is not None:
                    self.fake.races.freed(mail + form.x)
                    self.fake.races.freed(mail + form.out)
            real_close(join)

        patch.setattr(HostJoin, "__init__", init)
        patch.setattr(HostJoin, "close", close)
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
        called = kind(lambda team, until, plan, _: self.attends(self, team, until, plan))
        patch.setattr(attend_code, "functions", lambda: {"attend": called})

    def published(self, mail: int, number: int) -> None:
        """A kernel is about to say that it has written the state."""
        if mail in self._at:
            self._stream(mail + self._at[mail].form.x, writes=True)
            self.flags.tell(mail + PUBLISHED, number, self.fake.clocks.current().clock)

    def joined(self, mail: int, number: int) -> None:
        """A kernel has seen that the host has computed, and reads its outputs."""
        if mail in self._at:
            self.flags.learn(mail + DONE, number, self.fake.clocks.current().clock)
            self._stream(mail + self._at[mail].form.out, writes=False)

    def _stream(self, address: int, *, writes: bool) -> None:
        region = self.fake.races.region(address)
        assert region is not None
        self.fake.races.by_stream(region, writes=writes, what="kernel")

    def host(self, address: int, *, writes: bool) -> None:
        """The calling thread reads or writes the state or the outputs."""
        region = self.fake.races.region(address)
        assert region is not None
        self.fake.races.by_host(region, writes=writes, what="the host")


def number_at(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def attend(
    mails: Mails, team: int, until: int, plan: int, *, acquires: bool = True, computes_first: bool = True
) -> None:
    """As core.runtime.attend_code has it. Faults: without `acquires` the state is read whatever was published; without
    `computes_first` the host says that it has computed before it does."""
    mail, home = number_at(plan + MAIL).value, number_at(plan + HOME).value
    join, until_s = mails._at[mail], time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        number = number_at(mail + PUBLISHED).value
        if number == number_at(plan + LAST).value:
            if number_at(until).value:
                return
            time.sleep(0)
            continue
        if acquires:
            mails.flags.learn(mail + PUBLISHED, number, mails.fake.clocks.host)
        if not computes_first:
            mails.flags.tell(mail + DONE, number, mails.fake.clocks.host)
        count = number_at(mail + COUNT).value
        stop, steps, length, slots = (number_at(plan + FIELDS + 8 * (EACH * (count - 1) + i)).value for i in range(4))
        for i in range(count):
            expert = number_at(mail + IDS + 8 * i).value
            number_at(slots + 8 * i).value = number_at(home + 8 * expert).value
        mails.host(mail + join.form.x, writes=False)
        team_functions()["sequence"](team, stop, steps, length)
        mails.host(mail + join.form.out, writes=True)
        if computes_first:
            mails.flags.tell(mail + DONE, number, mails.fake.clocks.host)
        number_at(plan + LAST).value = number
        number_at(mail + DONE).value = number
    raise AssertionError("nobody dismissed the thread")
