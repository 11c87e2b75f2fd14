"""The options of an evaluation from the page, and its stored result. `core.measure.evaluate` does the measuring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.measure.evaluate.modes import chosen, residencies
from core.measure.evaluate.rows import EvaluationRow, to_csv, to_json, with_savings

MODES = ("exact", "random", "drop_rho1", "router_ranked", "buddy_rho1", "buddy_rho3", "buddy_rho3_tae")  # preselected
RESIDENCIES = ".75, .5, .375"
QUESTIONS, TOKENS = 24, 128


@dataclass(frozen=True, slots=True)
class QualityForm:
    """The values of the form."""

    modes: tuple[str, ...] = MODES
    residencies: str = RESIDENCIES
    questions: int = QUESTIONS
    tokens: int = TOKENS

    def check(self) -> None:
        """Raises SettingError for problems that need no model."""
        chosen(",".join(self.modes))
        residencies(self.residencies)


@dataclass(frozen=True, slots=True)
class QualityResult:
    """`about` = what was measured on, as in `core.measure.evaluate.summary.about`; `whole` = it was not cut short."""

    about: Mapping[str, Any]
    rows: tuple[EvaluationRow, ...]
    whole: bool = False

    def dump(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"about": dict(self.about), "rows": [to_json(row) for row in self.rows], "whole": self.whole}

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> QualityResult:
        """Read from `dump`. Raises TypeError or KeyError for a format of another version."""
        return cls(kept["about"], tuple(EvaluationRow.read(row) for row in kept["rows"]), kept["whole"])

    def csv(self) -> str:
        """The table as CSV, with a description of what was measured on."""
        return to_csv(self.rows, self.about)


Evaluate = Callable[..., None]  # `measure`, or what stands in for it


def measure(
    engine: Any,
    form: QualityForm,
    found: Callable[[QualityResult], None],
    progress: Callable[[str, float], None],
    cancel: threading.Event,
) -> None:
    """Evaluate the loaded model with its current profile."""
    from core.measure.evaluate.run import evaluate, gather
    from core.measure.evaluate.summary import about

    material = gather(engine, form.questions, form.tokens)
    described, rows = about(engine, material), list[EvaluationRow]()

    def add(row: EvaluationRow) -> None:
        rows.append(row)
        found(QualityResult(described, tuple(with_savings(rows))))

    evaluate(
        engine,
        chosen(",".join(form.modes)),
        residencies(form.residencies),
        material,
        progress=progress,
        cancel=cancel,
        on_row=add,
    )
    found(QualityResult(described, tuple(with_savings(rows)), whole=True))


def accuracy_of(rows: Sequence[EvaluationRow]) -> str:
    """The accuracy figure: exact match where questions were answered, else agreement."""
    return "exact_match" if any(row.exact_match is not None for row in rows) else "agreement"
