"""A reader with defects that are known, on which the tests of this package are run."""

import os
import threading
from pathlib import Path
from random import Random
from typing import Any

from core.errors import MoestroError
from tests.fuzz.changes import Change
from tests.fuzz.mutant import Mutant

FILE = "number.txt"


class Planted:
    """Reads a number. 0 is explained; of 1 to 6 each ends in another outcome."""

    name = "planted"
    samples = ("seven",)

    def make(self, sample: str, folder: Path) -> None:
        (folder / FILE).write_text("7")

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        return [{"do": "text", "file": FILE, "text": str(rng.randrange(8))}]

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        number = int((folder / FILE).read_text())
        match number:
            case 1:
                raise MoestroError("The number is 1. Write another one.")
            case 2:
                raise MoestroError(f"{folder / FILE} has KeyError('two')")
            case 3:
                return {"number": [][number]}
            case 4:
                threading.Event().wait()
            case 5:
                os.abort()
            case 6:
                bytearray(1 << 40)
        return {"number": number}

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        return ""
