"""What a page on a paper is made of: what it proposes, where that is here, and every table and figure with its answer.

An answer is read from the newest result file that has it (`bench.papers.sources`), stated with its reason where no file
can have it, or open. A change of what a result depends on takes a line in REPAIRS and its name in the rows it touches:
results older than it are then marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

HOLDS, PART, NO = "holds", "holds in part", "does not hold"
OPEN = "not measured yet"  # it can be measured here, and there is no result, or nothing prints it yet
NEVER = "not askable here"
VERDICTS = (HOLDS, PART, NO, OPEN, NEVER)
BY_CLAIM: Mapping[str, str] = {"yes": HOLDS, "in part": PART, "no": NO, "not measured": OPEN}  # bench.harness.report


@dataclass(frozen=True, slots=True)
class Repair:
    """A change after which what was measured before it is no answer. `landed`: ISO 8601; "" = it is to come."""

    what: str
    landed: str


REPAIRS: Mapping[str, Repair] = {
    "rho": Repair("rho is spent on the lightest missing experts", "2026-11-22T16:00:00+00:00"),
    "execute": Repair("predictions are executed while decoding only", "2026-11-22T16:00:00+00:00"),
    "finemoe_eviction": Repair("FineMoE's eviction goes by the whole map found", "2026-11-22T16:00:00+00:00"),
    "lcp": Repair("LCP counts tokens", "2026-11-22T16:00:00+00:00"),
    "layer0": Repair("MoEpic's layer 0 goes by the last layer's state", "2026-11-22T16:00:00+00:00"),
    "live_searches": Repair("searches answer when they do in the engine", "2026-11-22T18:21:04+00:00"),
    "residents": Repair("a prefetch displaces only what is worth less", "2026-11-22T19:00:00+00:00"),
    "path_predictor": Repair("ExpertFlow's predictor answers before the pass", "2026-11-22T19:22:26+00:00"),
    "estimator": Repair("the estimator learns from as much as a setting says", "2026-11-22T18:51:42+00:00"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """`date` and `file` = the result it was read from, "" = none; of several files, separated by commas, the oldest's
    date."""

    verdict: str
    text: str
    date: str = ""
    file: str = ""


class Results(Protocol):
    """Where answers are looked up."""

    def newest(self, bench: str) -> list[tuple[str, dict[str, Any]]]:
        """(file name, result) of a bench, newest first."""


class Source(Protocol):
    """How a row gets its answer."""

    @property
    def command(self) -> str:
        """Words of `launch.py` that measure it again; "" = none can."""

    def answer(self, results: Results) -> Answer:
        """The answer of the newest result that has one."""


@dataclass(frozen=True, slots=True)
class Row:
    """A table or figure of a paper. `asks`: what it says, in our words; `touched`: names of REPAIRS that its answer
    depends on."""

    where: str
    asks: str
    source: Source
    touched: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return self.source.command

    def before(self, answer: Answer) -> tuple[Repair, ...]:
        """The repairs that the measurement behind `answer` was made before."""
        if not answer.date:
            return ()
        made = datetime.fromisoformat(answer.date)
        repairs = [REPAIRS[name] for name in self.touched]
        return tuple(one for one in repairs if not one.landed or made < datetime.fromisoformat(one.landed))

    def missing(self, answer: Answer) -> bool:
        """Whether running the command would say more: nothing was measured, or a repair has landed since."""
        return bool(self.command) and (answer.verdict == OPEN or any(one.landed for one in self.before(answer)))


@dataclass(frozen=True, slots=True)
class Part:
    """A mechanism of a paper, and where it is here. `settings`: names of settings, and values as name=value."""

    what: str
    file: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Paper:
    """`lacks`: what of it is not here."""

    name: str
    title: str
    proposes: str
    parts: tuple[Part, ...]
    presets: tuple[str, ...]
    lacks: str
    rows: tuple[Row, ...]
