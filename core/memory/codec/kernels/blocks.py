"""Tile sizes per program: chosen by shape from a small table, not autotuned on the target machine.

A program of the coded and plain row kernels is one warp: a few rows per program give thousands of programs per launch,
each with 2 to 4 kB of weights in flight. The sizes come from inspecting the compiled code for compute capabilities 8.0,
8.9 and 9.0: no register spills, 16-byte loads of weights. With int4-g64 a step has some five instructions per weight,
and the threads exchange states through shared memory, with ten barriers of the one warp
(tests/runtime/program/test_gpu_code.py).
"""

from typing import NamedTuple

TILES = {2: 512, 3: 512, 4: 512, 5: 512, 6: 512, 8: 1024}  # words of codes a program reads at a time, by bits
WIDTHS = {bits: (128, 64) if bits == 8 else (64, 32) for bits in TILES}  # words of a row, the best first: a cache line
PLAIN_ROWS = 8
PLAIN_BYTES = 512  # bytes of a row read at a time
COLUMNS = (32, 128)  # outputs and inputs
WIDEN = 512  # words
WASTE = 1.1  # ratio of words read per row, widest to narrowest, above which the narrowest width is chosen


class Tile(NamedTuple):
    """The tile of a matrix per step: `outputs` x `across` (`across` in words or inputs), computed by `warps` warps."""

    outputs: int
    across: int
    warps: int


def power(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def coded(bits: int, words: int) -> Tile:
    """Tile for rows of `words` words of codes."""
    widths = [min(width, power(words)) for width in WIDTHS[bits]]
    read = [-(-words // width) * width for width in widths]
    across = widths[0] if read[0] <= WASTE * read[-1] else widths[-1]
    return Tile(max(1, min(16, TILES[bits] // across)), across, 1)


def plain(itemsize: int, inputs: int) -> Tile:
    """Tile for rows of plain numbers."""
    return Tile(PLAIN_ROWS, min(PLAIN_BYTES // itemsize, power(inputs)), 1)


def columns(itemsize: int, inputs: int) -> Tile:
    """Tile for plain numbers stored [in, out]."""
    return Tile(COLUMNS[0], min(COLUMNS[1] * 2 // itemsize, power(inputs)), 4)


def dequantize(words: int) -> Tile:
    """Tile for dequantising rows of codes."""
    across = min(128, power(words))
    return Tile(WIDEN // across if across >= 32 else 16, across, 4)
