"""How much of a prompt is computed in one pass, where its experts do not all fit.

Every pass over a piece of a prompt needs nearly all experts, so each piece fetches whatever is missing once more. A
longer piece fetches it for more tokens, but it needs more workspace, which is borrowed from the slots: what was in them
is then missing, too, and has to come back afterwards. The pieces are those that copy the fewest bytes. That follows
from sizes and from the number of tokens alone, not from times, so that the same prompt is read in the same pieces.
"""

from collections.abc import Callable

from core.capacity.sizes import PromptPiece, Sizes

COMES_BACK = 2  # how often the experts count that make room: they leave, and come back while a token waits


def piece(sizes: Sizes, slots: int, unread: int, works: Callable[[int], bool]) -> PromptPiece:
    """The pieces in which `unread` tokens of prompts are read. `slots`: of the cache; `works`: whether it can do with
    so many. Ties: the shorter."""
    usual = PromptPiece(sizes.chunk, 0)
    fitting = [one for one in sizes.longer if works(slots - borrowed_slots(sizes, one))]
    return min((usual, *fitting), key=lambda one: _copied(sizes, slots, one, unread))


def borrowed_slots(sizes: Sizes, one: PromptPiece) -> int:
    """Slots whose bytes hold what a piece needs beyond the workspace."""
    return -(-max(0, one.extra) // sizes.slot)


def _copied(sizes: Sizes, slots: int, one: PromptPiece, unread: int) -> int:
    """Slots that are filled to read them: by each piece what is missing, and what made room for it."""
    room = borrowed_slots(sizes, one)
    passes = -(-unread // one.chunk)
    return passes * max(0, sizes.slots_all - slots + room) + COMES_BACK * room
