"""Threads of their own that compute one run of steps while the thread that posts it goes on.

The thread that posts a run computes it itself where the others have not begun, takes part where they have, and waits
for no thread longer than TIMEOUT_S: one that has ended, or does not finish, is an error.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable

from core.errors import HostError
from core.memory.codec.fast import background_code as code
from core.memory.codec.fast.steps import Steps
from core.memory.codec.native.team_code import FIELDS, GIVE_UP, LINE
from core.memory.codec.native.team_code import functions as team_functions
from core.memory.codec.native.threads import PATIENCE, Team, acquire_team, give_up, shared_by, ticks
from core.system.native.compile import address
from core.system.native.contention import watch

TIMEOUT_S = 20.0  # many times as long as any layer takes
TURN = 4 * PATIENCE  # ticks of a wait, after which the time is looked at
REST_S = 2e-5  # between two looks of a thread that takes no part
AT_ONCE = 100  # looks before it rests where what it waits for takes about a microsecond
ATTENDING = 128  # times PATIENCE that threads spin between the steps of one token, rather than sleep
CROWDED = PATIENCE // 20  # ... that a thread spins where there are fewer processors than threads that compute


def most_threads() -> int:
    """How many threads leave the computing thread a processor."""
    counts = getattr(os, "sched_getaffinity", None)
    return max(0, (len(counts(0)) if counts is not None else os.cpu_count() or 1) - 1)


class Background:
    """`threads` that compute, at least one. For one posting thread; `close` ends them."""

    def __init__(self, threads: int) -> None:
        made, team = code.functions(), team_functions()
        self._serve, self._assist, self._post = made["serve"], made["assist"], made["post"]
        self._recall = made["recall"]
        self.threads = threads
        self._team, self._closing, self._died = Team(alone=False), False, ""
        self._memory = (ctypes.c_char * (2 * LINE + FIELDS + 8 * len(code.NAMES)))()
        self._at = -(-ctypes.addressof(self._memory) // LINE) * LINE
        self._state = ctypes.c_int64.from_address(self._at + code.STATE)
        self._number = {name: ctypes.c_int64.from_address(self._at + code.place(name)) for name in code.NAMES}
        self._sequence = address(team["sequence"])
        self._number["drain"].value = address(team["drain"])
        ctypes.c_int64.from_address(self._at + GIVE_UP).value = give_up()
        team["clock"](self._at + code.place("began"))
        self._born = time.perf_counter(), self._number["began"].value
        self._posted: Steps | None = None
        self._posted_s, self._spent = 0.0, 0
        self.took_s = self.late_s = 0.0
        """How long the last run took from its begin on, and how long after it was posted that was; 0 where the posting
        thread computed it alone."""
        self.assisted = False
        """Whether the posting thread took part in it."""
        self._called = threading.Event()
        self._leader = threading.Thread(target=self._lead, name="moestro-host", daemon=True)
        self._leader.start()

    def post(self, steps: Steps) -> None:
        """Begin to compute steps; `join` before they change or the next ones are posted. Raises HostError where the
        threads have ended."""
        assert self._posted is None, "what was posted before is still computed"
        self._require_leader()
        helpers = 0 if watch.contended else self.threads - 1
        self._posted, self._posted_s = steps, time.perf_counter()
        self._hand_over(helpers, self._sequence, *steps.all)

    def attend(self, function: int, until: int, plan: int) -> None:
        """Have the threads call a native function(team, until, plan, 0), and return once they have begun. It computes
        steps now and then, until it is told to end by what is at the address `until`; then call `dismissed`. Raises
        HostError where they do not begin in time: it may then still begin, and nothing more can be posted."""
        assert self._posted is None, "what was posted before is still computed"
        self._require_leader()
        self._team.patience, self._spent = ATTENDING * PATIENCE, self._team.spent.value
        self._hand_over(0 if watch.contended else self.threads - 1, function, until, plan, 0)
        if self._state.value == code.POSTED:
            try:
                self._await(lambda: self._state.value != code.POSTED, "begin")
            except HostError:
                self._recall(self._at)
                raise

    def dismissed(self) -> float:
        """Return when the function of `attend` has ended -> the seconds that its steps took. Raises HostError where it
        does not in time: what it writes to must then be kept, and nothing more can be posted."""
        self._team.patience = PATIENCE
        self._recall(self._at)
        if self._state.value not in (code.DONE, code.RECALLED):
            for _ in range(AT_ONCE):
                if self._state.value == code.DONE:
                    break
            else:
                self._await(lambda: self._state.value == code.DONE, "end")
        return (self._team.spent.value - self._spent) * ticks().tick_s()

    def join(self) -> None:
        """Return when the steps are computed. Raises HostError where they are not in time: what they write to must
        then be kept, and nothing more can be posted."""
        steps, self._posted = self._posted, None
        assert steps is not None, "nothing was posted"
        self.took_s = self.late_s = 0.0
        self._recall(self._at)
        if self._state.value == code.RECALLED:
            with acquire_team() as team:
                steps.run(team)
            return
        self.assisted = self._state.value != code.DONE
        if self.assisted:
            self._wait()
        began, ended = self._number["began"].value, self._number["ended"].value
        tick_s, (seconds, ticks) = self._tick_s(ended), self._born
        self.took_s = (ended - began) * tick_s
        self.late_s = max(0.0, seconds + (began - ticks) * tick_s - self._posted_s)

    def rest(self) -> None:
        """Return when the team has computed what was posted, without taking part. Raises HostError."""
        self._wait(0)

    def cancel(self) -> None:
        """Return when nothing is computed any more, whatever was posted."""
        if self._posted is None:
            return
        self._posted = None
        self._recall(self._at)
        if self._state.value != code.RECALLED:
            self._wait()

    def close(self) -> None:
        """End the threads."""
        if not self._died:
            self.cancel()
        self._closing = True
        self._called.set()
        self._team.close()
        self._leader.join(TIMEOUT_S)

    def _hand_over(self, helpers: int, function: int, stop: int, steps: int, count: int) -> None:
        """Have the leader call function(team, stop, steps, count)."""
        number = self._number
        number["team"].value = self._team.begin_steps(max(1, helpers), helpers)
        number["sequence"].value, number["stop"].value = function, stop
        number["steps"].value, number["count"].value = steps, count
        self._post(self._at)
        if not self._called.is_set():
            self._called.set()

    def _wait(self, turn: int = TURN) -> None:
        """Until what was posted is done; with a `turn`, taking part."""
        self._await(lambda: self._state.value == code.DONE, "finish", turn)

    def _await(self, over: Callable[[], bool], what: str, turn: int = 0) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not over():
            if turn:
                self._assist(self._at, turn)
            else:
                time.sleep(REST_S)
            if over():
                return
            self._require_leader()
            if time.monotonic() > until_s:
                self._died = f"it did not {what} within {TIMEOUT_S:g} seconds"
                self._require_leader()

    def _require_leader(self) -> None:
        if not self._died and not self._leader.is_alive():
            self._died = "it has ended"
        if self._died:
            raise HostError.of(self._died)

    def _tick_s(self, now: int) -> float:
        """Seconds of a tick, by all the time since this was made; `now` in ticks."""
        seconds, ticks = self._born
        return (time.perf_counter() - seconds) / max(1, now - ticks)

    def _lead(self) -> None:
        watch.helping()
        while True:
            self._called.wait()
            self._called.clear()  # before it serves: a call that comes while it gives up is not lost
            if self._closing:
                return
            crowded = shared_by() + self.threads > most_threads() + 1
            self._serve(self._at, CROWDED if crowded else PATIENCE)
