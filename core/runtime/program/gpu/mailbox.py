"""Where a GPU's kernels and the host's threads write what they tell each other, in pinned memory: one layer's missing
experts and the state that goes through them, and their outputs.

The GPU writes `ids`, `count` and `x`, and then the next number at PUBLISHED. The host writes `out`, and then the same
number at DONE. A kernel of the layer waits for that, so that nothing of it is written anew before it was read. Fields
that are waited for are in cache lines of their own.
"""

from typing import NamedTuple

LINE = 64  # bytes
PUBLISHED, LATE, COUNT, DONE = (LINE * i for i in range(4))
"""The number of the last layer that the GPU told of; of the one whose outputs it did not wait for any longer, 0 = none;
how many experts a layer misses; the number of the last layer whose outputs are there."""
IDS = 4 * LINE


class Mailbox(NamedTuple):
    """Offsets in bytes: `ids` [chosen] int64, numbers of experts in the whole model, `x` [width] fp32, and `out`
    [chosen, width] fp32, in the order of `ids`."""

    chosen: int
    width: int
    x: int
    out: int
    bytes: int


def mailbox(chosen: int, width: int) -> Mailbox:
    """For layers with so many experts a token, of states of such a width."""
    x = IDS + -(-8 * chosen // LINE) * LINE
    out = x + -(-4 * width // LINE) * LINE
    return Mailbox(chosen, width, x, out, out + 4 * chosen * width)
