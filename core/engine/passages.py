"""Running text that a model reads to be compared with itself: of the bundled ones, in windows."""

import math
from collections.abc import Sequence
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from core.engine.texts import ASSETS, Text, from_path, tokenize
from core.errors import SettingError

T = TypeVar("T")
STRETCH = 16  # positions that are one draw of a figure: neighbours are alike
WINDOW = 128  # tokens predicted in one run, each seeing those before it in the window


def held_out(model: str) -> list[Text]:
    """For the demo model, Python documentation that it was not trained on (five topics of the text of its card's
    perplexity); for all others, running text of the bundled prompts."""
    found = from_path(ASSETS / "demo" / "held_out.txt" if model == "demo" else ASSETS / "prompts.jsonl")
    return [text for text in found if isinstance(text, str)]


def windows(tokenizer: PreTrainedTokenizerBase, context: int, texts: Sequence[Text], tokens: int) -> list[list[int]]:
    """Pieces of the texts [1 + WINDOW], evenly spread over all, with `tokens` predicted tokens in all: those after each
    piece's first. Raises SettingError when the texts have fewer than two tokens."""
    width = min(WINDOW, context - 1, tokens)
    found: list[list[int]] = []
    for text in texts:
        ids = tokenize(tokenizer, text).ids.tolist()
        found += [ids[at : at + width + 1] for at in range(0, max(1, len(ids) - width), width)]
    found = [piece for piece in found if len(piece) > 1]
    if not found:
        raise SettingError("The text is too short: it needs at least two tokens. Name a longer one.")
    taken = spread(found, math.ceil(tokens / width))
    while taken and sum(len(piece) - 1 for piece in taken) > tokens:
        more = sum(len(piece) - 1 for piece in taken) - tokens
        taken[-1] = taken[-1][: max(1, len(taken[-1]) - more)]
        taken = taken if len(taken[-1]) > 1 else taken[:-1]
    return taken


def spread(things: Sequence[T], number: int) -> list[T]:
    """`number` of them at even distances; all if there are no more."""
    if number >= len(things):
        return list(things)
    return [things[int((at + 0.5) * len(things) / number)] for at in range(number)]
