"""The words of this package: a mutant, what became of it, and what a kind of mutant has to be able to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol

from tests.fuzz.changes import Change

Outcome = Literal["clear error", "same", "explained", "unexplained", "unclear error", "exception", "hang", "crash"]
GOOD: tuple[Outcome, ...] = ("clear error", "same", "explained")


@dataclass(frozen=True)
class Mutant:
    """Changes to a sample of a kind. With `seed`, they were drawn from (kind, seed)."""

    kind: str
    sample: str
    changes: tuple[Change, ...]
    seed: int | None = None

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Mutant:
        return cls(plain["kind"], plain["sample"], tuple(plain["changes"]), plain.get("seed"))

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def writes(self, end: str = "") -> bool:
        """Whether bytes of a file whose name ends so were written to."""
        return any(c["do"] in ("flip", "write", "zero") and str(c.get("file")).endswith(end) for c in self.changes)

    def __str__(self) -> str:
        return f"{self.kind} {self.seed if self.seed is not None else ''} {self.sample}: {json.dumps(self.changes)}"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. `detail`: the message, or what differs; `where`: innermost frames of an exception."""

    outcome: Outcome
    detail: str = ""
    where: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in GOOD


class Kind(Protocol):
    """One format, or one way in."""

    name: str
    samples: tuple[str, ...]

    def make(self, sample: str, folder: Path) -> None:
        """Write a whole sample into an empty folder, the same each time."""

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        """Changes to this sample, which lies in `folder`."""

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        """Read the mutant in `folder` as Moestro does; what was seen, by name: arrays, numbers, texts. Raises
        MoestroError for what is refused; any other exception is a finding."""

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        """Why what was seen is not what the whole sample gives (`whole`), "" if the file itself explains it."""
