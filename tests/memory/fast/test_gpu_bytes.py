"""The instructions of NVIDIA's GPUs for four bytes at once, run here one after the other as their manual describes
them, give what the equal expressions do, which Triton's interpreter runs."""

import itertools
import re
from collections.abc import Callable

import pytest

from core.memory.codec.fast.layout import meaning
from core.memory.codec.matrix import Matrix, Part

pytest.importorskip("triton", reason="the package triton is not installed")
import torch

from core.memory.codec.fast.gpu import integers
from core.memory.codec.fast.gpu.form import form

MASK = 0xFFFFFFFF


def permuted(low: int, high: int, which: int) -> int:
    """prmt: each of the four lowest digits of `which` chooses a byte."""
    both = low | high << 32
    digits = [which >> 4 * i & 15 for i in range(4)]
    assert max(digits) < 8, "the sign of a byte is not asked for"
    return sum((both >> 8 * digit & 255) << 8 * i for i, digit in enumerate(digits))


DOES: dict[str, Callable[..., int]] = {
    "shr.u32": lambda a, b: a >> b,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "prmt.b32": permuted,
}


def run(assembly: str, *given: int) -> int:
    """$0 after the instructions, which get $1, $2 ..."""
    known = {f"${i}": one for i, one in enumerate(given, 1)}
    for line in assembly.strip("{}").split(";"):
        if not (line := line.strip()) or line.startswith(".reg"):
            continue
        name, into, *sources = re.split(r",? +", line)
        values = [known[one] if one in known else int(one, 0) for one in sources]
        known[into] = DOES[name](*values) & MASK
    return known["$0"]


def word(*four: int) -> int:
    return int.from_bytes(bytes(four), "little")


@pytest.mark.parametrize("step", [1, 2, 4])
def test_masked_bytes_are_shifted_and_others_are_not(step: int) -> None:
    """What comes in from the next byte is above the bits that are kept, for all that is shifted at most."""
    for some in itertools.product((0x00, 0xA5, 0xFF), repeat=4):
        for masks in itertools.product((0, 255), repeat=4):
            got = run(integers.moving(step), word(*some), word(*masks)).to_bytes(4, "little")
            for byte, mask, one in zip(some, masks, got, strict=True):
                kept = 255 >> step if mask else 255
                assert one & kept == (byte >> step if mask else byte)


@pytest.mark.parametrize(("low", "steps"), [(15, (4,)), (3, (4, 2)), (1, (4, 2, 1))])
def test_codes_are_taken_out_of_bytes(low: int, steps: tuple[int, ...]) -> None:
    for byte, beside in zip(range(256), itertools.cycle((0, 255, 165)), strict=False):
        for shifts in itertools.product((0, 1), repeat=len(steps)):
            found = word(beside, byte, beside, byte)
            for step, shift in zip(steps, shifts, strict=True):
                found = run(integers.moving(step), found, word(0, 255 * shift, 255, 255 * shift))
            got = run(integers.keeping(low), found).to_bytes(4, "little")
            by = sum(step * shift for step, shift in zip(steps, shifts, strict=True))
            assert got[1] == got[3] == byte >> by & low


@pytest.mark.parametrize("table", ["mxfp4", "iq4_nl", "nf4"])
def test_entries_of_tables_are_found(table: str) -> None:
    one = Matrix(1, 64, False, 4, 32, table, Part(0, torch.uint8), None, Part(32, torch.uint8), None, None)
    entries, assembly = meaning(one).entries, integers.finding(form(one).table)
    for a, b in itertools.product(range(16), repeat=2):
        got = run(assembly, word(a, b, b, a)).to_bytes(4, "little")
        assert [*got] == [entries[code] & 255 for code in (a, b, b, a)]
