"""Models split into several GGUF files, by their names: NAME-00001-of-00003.gguf. Standard library only.

A name may claim up to 99,999 parts. Nothing here takes longer for parts that do not exist.
"""

import os
import re
from collections.abc import Mapping
from itertools import count as numbers_from
from itertools import islice
from pathlib import Path
from typing import NamedTuple

NAME = re.compile(r"(?s)(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})\.gguf")


class Part(NamedTuple):
    """One file's place in a split model: `number` from 1 to `total`."""

    stem: str
    number: int
    total: int

    def name(self, number: int) -> str:
        """The file name of the model's part of that number."""
        return f"{self.stem}-{number:05}-of-{self.total:05}.gguf"


Parts = Mapping[tuple[str, int], frozenset[int]]  # (stem, total) -> numbers of the parts that are there


def part_of(name: str) -> Part | None:
    """The part that a file of this name is; None for a model in one file."""
    found = NAME.fullmatch(name)
    return Part(found["stem"], int(found["number"]), int(found["total"])) if found else None


def parts_in(folder: Path) -> Parts:
    """The parts in a folder, from one listing of it. Raises OSError."""
    found: dict[tuple[str, int], set[int]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            part = part_of(entry.name)
            if part is not None and 1 <= part.number <= part.total and entry.is_file():
                found.setdefault((part.stem, part.total), set()).add(part.number)
    return {key: frozenset(numbers) for key, numbers in found.items()}


def missing(part: Part, there: frozenset[int], most: int) -> list[str]:
    """The names of the first `most` parts of a model that are not among those `there`."""
    absent = (number for number in islice(numbers_from(1), part.total) if number not in there)
    return [part.name(number) for number in islice(absent, most)]
