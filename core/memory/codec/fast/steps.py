"""Steps of a computation, written into memory and then run one after the other, each shared by all threads of the team.

A step is a kernel void(ptr arguments, i64 from, i64 to) over units that do not depend on each other.
"""

import ctypes
import struct
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Self

import torch

from core.memory.codec.native.team_code import LINE, STEP
from core.memory.codec.native.threads import Team

MOST = 512  # steps of a run
ROOM = 1 << 18  # bytes for arguments
ALONE = 1 << 30  # units that one thread computes: others would join too late
FEW = 8  # rows up to which norms and routing are computed by one thread


class Place(int):
    """An address that may be another one in later runs: `key` names it."""

    key: Hashable

    def __new__(cls, address: int, key: Hashable) -> Self:
        """The address as it is now."""
        made = super().__new__(cls, address)
        made.key = key
        return made


class Work(NamedTuple):
    """A kernel over `units`, `some` of which a thread takes at a time; its arguments are numbers of 8 bytes."""

    kernel: int
    arguments: Sequence[int]
    units: int
    some: int


def some(units: int, few: int = FEW) -> int:
    """Units that a thread takes at a time: all where they are few."""
    return ALONE if units <= few else 4


def named(fields: Sequence[str], **values: int | torch.Tensor) -> list[int]:
    """The arguments of a kernel by the names of its fields, of tensors their addresses; 0 for all others."""
    assert values.keys() <= set(fields), values.keys() - set(fields)
    given = [values.get(field, 0) for field in fields]
    return [one if isinstance(one, int) else one.data_ptr() for one in given]


class Steps:
    """Steps that are added and then run, as often as wanted. For one thread at a time."""

    def __init__(self, steps: int = MOST, room: int = ROOM) -> None:
        """Memory for so many `steps`, and so many bytes of arguments."""
        self._most, self._room = steps, room
        self._memory = (ctypes.c_char * (2 * LINE + steps * STEP.size + room))()
        self.stop = -(-ctypes.addressof(self._memory) // LINE) * LINE  # where a step writes that it is the last
        self._stop = ctypes.c_int64.from_address(self.stop)
        self._begin = self.stop + LINE
        self._offset = self._begin - ctypes.addressof(self._memory)
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget all steps and what was put."""
        self._count, self._used = 0, self._most * STEP.size
        self._places: dict[Hashable, list[int]] = {}  # where each was put

    def __enter__(self) -> Self:
        """Cleared at the end."""
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def put(self, numbers: Sequence[int]) -> int:
        """The address of some numbers of 8 bytes, until `clear`."""
        at, size = self._used, 8 * len(numbers)
        if at + size > self._most * STEP.size + self._room:
            raise ValueError("too many arguments in one run of steps")
        struct.pack_into(f"{len(numbers)}q", self._memory, self._offset + at, *numbers)
        self._used += size
        if Place in map(type, numbers):
            for i, one in enumerate(numbers):
                if isinstance(one, Place):
                    self._places.setdefault(one.key, []).append(self._begin + at + 8 * i)
        return self._begin + at

    def change(self, address: int, numbers: Sequence[int]) -> None:
        """Write other numbers in place of those that were put at an address."""
        at = self._offset + address - self._begin
        struct.pack_into(f"{len(numbers)}q", self._memory, at, *numbers)

    def move(self, key: Hashable, address: int) -> None:
        """Write another address wherever a `Place` of this key was put."""
        for at in self._places.get(key, ()):
            self.change(at, [address])

    def add(self, work: Work) -> int:
        """One step more; returns the address of its arguments."""
        if self._count == self._most:
            raise ValueError("too many steps in one run")
        at, arguments = self._offset + self._count * STEP.size, self.put(work.arguments)
        STEP.pack_into(self._memory, at, work.kernel, arguments, work.units, work.some)
        self._count += 1
        return arguments

    def extend(self, more: Iterable[Work]) -> None:
        """More steps, in order."""
        for work in more:
            self.add(work)

    @property
    def all(self) -> tuple[int, int, int]:
        """All steps, as `Team.run_steps` has them: the address of `stop`, theirs, and their number."""
        self._stop.value = 0
        return self.stop, self._begin, self._count

    def run(self, team: Team, first: int = 0, end: int | None = None) -> int:
        """Compute the steps from the `first` to the one before `end`, or to one that writes at `stop`; returns the
        number of the one after the last that was computed."""
        end = self._count if end is None else end
        self._stop.value = 0
        team.run_steps(self.stop, self._begin + first * STEP.size, end - first)
        return first + self._stop.value if self._stop.value else end


def single(kernel: int, arguments: Sequence[int], units: int) -> None:
    """Compute one step on the calling thread."""
    block = (ctypes.c_int64 * len(arguments))(*arguments)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel)(ctypes.addressof(block), 0, units)
