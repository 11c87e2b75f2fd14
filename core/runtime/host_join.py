"""The host's part in a token that the GPU leads: experts without a slot are computed where they lie in host memory, and
joined within the token.

In each layer a kernel tells the host, in pinned memory, which of the chosen experts have no slot, and the state that
goes through them; the threads of a `Background` compute them by the kernels of the same arithmetic while the GPU
computes the others, and a kernel waits for their outputs (core.runtime.program.gpu.hosted). Nothing but these threads
is waited for, they call neither CUDA nor Python, and they attend before anything is launched. Who waits too long gives
up: the GPU after LIMIT_S, the host as `Background` does. The token then ends with a HostError.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from core.errors import DeviceError, HostError
from core.memory.codec.fast.background import Background
from core.memory.codec.native.team_code import LINE
from core.memory.codec.native.team_code import functions as team_functions
from core.memory.host_memory import HostMemory
from core.memory.store import ExpertStore
from core.runtime import attend_code
from core.runtime.attend_code import EACH, FIELDS, HOME, LAST, MAIL, SEQUENCE
from core.runtime.program.experts import ExpertKernels
from core.runtime.program.gpu.experts import Mail
from core.runtime.program.gpu.mailbox import LATE, mailbox
from core.system.native.compile import address

LIMIT_S = 1.0  # that a kernel waits for a layer's outputs: drivers of displays end what runs for longer than 2 s
NOT_PINNED = "the system pins no memory for what the GPU and the host tell each other"


class HostJoin:
    """For one model, its threads and its store, all of whose experts are in host memory. On the computing thread."""

    def __init__(
        self,
        kernels: ExpertKernels,
        team: Background,
        store: ExpertStore,
        experts: int,
        chosen: int,
        device: torch.device,
    ) -> None:
        """`experts` in all layers together, of which a layer's router chooses `chosen`. Raises DeviceError where there
        is no memory that both read."""
        self.team, self.form = team, mailbox(chosen, kernels.hidden)
        self.failed = ""  # why nothing can be joined any more
        self.stuck = False  # threads may still read and write what they were given
        self.lose: Callable[[str], None] = lambda why: None
        self._store, self._experts = store, experts
        self._memory = HostMemory(1, self.form.bytes, pin=True)
        if not self._memory.pinned:
            self._memory.close()
            raise DeviceError(NOT_PINNED)
        (mail,) = self._memory.rows
        mail.zero_()
        (at,) = self._memory.device_addresses()
        self._late = ctypes.c_int64.from_address(mail.data_ptr() + LATE)
        with torch.inference_mode(False):
            state = torch.zeros(3, dtype=torch.int64, device=device)
        self.mail = Mail(self.form, at, state, int(LIMIT_S * 1e9))
        self._blobs = [blob for eid in range(experts) if (blob := store.borrow(eid)) is not None]
        assert len(self._blobs) == experts, "not every expert is in host memory"
        self._home = torch.tensor([blob.data_ptr() for blob in self._blobs])
        self._plan(kernels, mail.data_ptr())

    def _plan(self, kernels: ExpertKernels, mail: int) -> None:
        """Steps for each count of experts, over the same memory."""
        chosen, form = self.form.chosen, self.form
        self._room = torch.empty(kernels.token_memory(chosen) + LINE, dtype=torch.uint8)
        memory = self._room.data_ptr()
        memory += -memory % LINE
        self._steps, numbers = [], [0] * (FIELDS // 8)
        for count in range(1, chosen + 1):
            steps, slots = kernels.begun(count)
            steps.extend(
                kernels.row(steps, count, mail + form.x, slots, mail + form.out, memory, kernels.room_at(memory, count))
            )
            self._steps.append(steps)
            numbers += [*steps.all, slots]
        assert len(numbers) == FIELDS // 8 + EACH * chosen
        numbers[MAIL // 8], numbers[HOME // 8] = mail, self._home.data_ptr()
        numbers[SEQUENCE // 8], numbers[LAST // 8] = address(team_functions()["sequence"]), 0
        self._numbers = torch.tensor(numbers)
        self._until = torch.zeros(2 * LINE // 8, dtype=torch.int64)  # a cache line of its own
        self._function = attend_code.functions()["attend"]

    @contextmanager
    def attended(self, took: Callable[[float], None] = lambda seconds: None) -> Iterator[None]:
        """Within, threads compute what the GPU publishes; at its end the GPU must have computed all that was launched.
        `took` gets the seconds that they computed. Raises HostError."""
        self._until.zero_()
        try:
            self.team.attend(address(self._function), self._until.data_ptr(), self._numbers.data_ptr())
        except HostError as error:
            self._until.fill_(1)
            self._fail(str(error), stuck=True)
            raise
        try:
            yield
        except BaseException:
            with suppress(HostError):
                self._dismiss()
            raise
        took(self._dismiss())

    def _dismiss(self) -> float:
        """End what threads do -> the seconds that they computed. Raises HostError."""
        self._until.fill_(1)
        try:
            seconds = self.team.dismissed()
        except HostError as error:
            self._fail(str(error), stuck=True)
            raise
        if self._late.value:
            late = HostError.of(f"the GPU waited {self.mail.limit_ns / 1e9:g} seconds for what it was to compute")
            self._fail(str(late), stuck=False)
            raise late
        return seconds

    def _fail(self, why: str, *, stuck: bool) -> None:
        self.stuck |= stuck
        if not self.failed:
            self.failed = why
            self.lose(why)

    def close(self) -> None:
        """Give back the memory, but not where threads may still write to it. The GPU computes nothing."""
        if self.stuck or not self._blobs:
            return
        self._blobs.clear()
        for eid in range(self._experts):
            self._store.give_back(eid)
        self._memory.close()
