"""A matrix that is cut along its inputs: in a kernel, which of its slots has what of a row."""

from collections.abc import Iterator
from dataclasses import dataclass

from core.memory.codec.matrix import Matrix
from core.system.native.ir import Code


def slots_of(code: Code, matrix: Matrix) -> list[str]:
    """The addresses of a matrix's slots: %slot, or, where there are several, those that are stored there."""
    if matrix.blocks == 1:
        return ["%slot"]
    return [code.load("ptr", code.at("%slot", 8 * i), 8) for i in range(matrix.blocks)]


@dataclass(frozen=True, slots=True)
class Step:
    """Consecutive blocks of a row, that are added at once: the number of the step among all, and how many they are."""

    number: str | int
    blocks: int
    slot: str = ""  # that has all of them; "" = they may be in several, and `number` is known
    own: str | int = 0  # the number of the step in that slot

    def spans(
        self, slots: list[str], first: int, count: int, each: int, own: int
    ) -> Iterator[tuple[str, str | int, int, int]]:
        """Where numbers `first`..`first` + `count` - 1 of this step are, of which every step has `each`, and a row
        `own` in each slot: (slot, step in it, number from there on, how many)."""
        if self.slot:
            yield self.slot, self.own, first, count
            return
        assert isinstance(self.number, int)
        at, last = self.number * each + first, self.number * each + first + count
        while at < last:
            slot, begin = divmod(at, own)
            some = min(own - begin, last - at)
            yield slots[slot], 0, begin, some
            at += some
