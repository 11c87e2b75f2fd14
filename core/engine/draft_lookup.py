"""Guesses the tokens that follow a text: what came after the last place where it had the same tokens in a row."""

from collections.abc import Sequence
from typing import NamedTuple

SHORTEST, LONGEST = 2, 32  # tokens in a row that must be the same, and that are compared
REPEATED = 4  # tokens in a row that stood there before: the text repeats itself
PLACES = 4  # the latest ones of each few tokens that are compared


class Guess(NamedTuple):
    """Tokens that may follow, how many before them were the same at the place that they are from, and its number in the
    text."""

    tokens: list[int]
    matched: int
    place: int = -1


class Lookup:
    """Of one text, which grows: an index of its tokens by the `SHORTEST` before each. Source: prompt lookup decoding
    (Saxena, 2023), here with the longest match in place of the first."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._known = SHORTEST  # tokens that the index has, and the fewest that it can have

    def guess(self, ids: Sequence[int], most: int) -> Guess | None:
        """At most `most` tokens to follow `ids` [T], which begin with those of the call before; None where nothing in
        them is a guess."""
        self._add(ids)
        if most < 1 or len(ids) < SHORTEST:
            return None
        matched, best = 0, 0
        for place in reversed(self._places.get(tuple(ids[-SHORTEST:]), ())):
            same = _same(ids, place)
            if same > matched:
                matched, best = same, place
        if not matched:
            return None
        tokens = list(ids[best : best + most])
        for at in range(most - len(tokens)):  # where the match reaches up to here, it goes on as it began
            tokens.append(tokens[at])
        return Guess(tokens, matched, best)

    def repeats(self, ids: Sequence[int]) -> bool:
        """Whether the last `REPEATED` of `ids` [T] stood in the same order before. Far quicker than a guess."""
        self._add(ids)
        places = self._places.get(tuple(ids[-SHORTEST:]))
        return places is not None and _same(ids, places[-1]) >= REPEATED

    def _add(self, ids: Sequence[int]) -> None:
        for at in range(self._known, len(ids)):
            places = self._places.setdefault(tuple(ids[at - SHORTEST : at]), [])
            places.append(at)
            del places[:-PLACES]
        self._known = max(self._known, len(ids))


def _same(ids: Sequence[int], place: int) -> int:
    """How many tokens before `place` are the last of all."""
    count, most = SHORTEST, min(LONGEST, place)
    while count < most and ids[place - 1 - count] == ids[-1 - count]:
        count += 1
    return count
