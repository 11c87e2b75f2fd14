"""What `app.services.analysis.quality.measure` and `app.services.comparer.compare` do, without a model: made-up rows
that come one after the other, and two made-up sides."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.services.analysis.quality import QualityForm, QualityResult
from core.errors import MoestroError, SettingError
from core.measure.evaluate.modes import chosen, residencies
from core.measure.evaluate.rows import EvaluationRow
from core.measure.evaluate.sides import Side, Sides
from core.settings.config import Settings

ABOUT = {
    "model": "demo",
    "questions": {"seen": 2, "unseen": 1, "source": "facts"},
    "text": {"tokens": 9, "source": "a <text>"},
    "link": "emulated, 0.2 GB/s",
    "emulated": True,
    "profile": None,
}
FIGURES: dict[str, Any] = {
    "exact_match": 1.0,
    "exact_match_se": 0.1,
    "tok_s": 50.0,
    "perplexity": 9.5,
    "kl": 0.0,
    "agreement": 1.0,
    "link_bytes": 2e5,
    "substituted_rate": 0.0,
    "emulated": True,
}
SIDE = Side(5.0, (2.0,) * 96, 0.5, 1.5, 0.3, 1e5, 0.0, True)
LONG_S = 30.0
started = threading.Event()  # it stands still


def fake_evaluate(
    engine: Any,
    asked: QualityForm,
    found: Callable[[QualityResult], None],
    progress: Callable[[str, float], None],
    cancel: threading.Event,
) -> None:
    """With the mode "verify" it stands still until it is cancelled; "random" is refused."""
    before, rows = engine.settings, list[EvaluationRow]()
    try:
        for share in residencies(asked.residencies):
            for mode in chosen(",".join(asked.modes)):
                engine.change({"budget": f"{100 * share:g}%"})
                progress(mode.title, len(rows) / 4)
                if mode.name == "random":
                    raise SettingError("No luck.")
                if mode.name == "verify":
                    started.set()
                    cancel.wait(LONG_S)
                    raise MoestroError("Cancelled.")
                rows.append(EvaluationRow(mode.name, mode.title, share, **FIGURES))
                found(QualityResult(ABOUT, tuple(rows)))
    finally:
        engine.change(dict(before))
    found(QualityResult(ABOUT, tuple(rows), whole=True))


def fake_compare(
    engine: Any,
    question: str,
    a: Settings,
    b: Settings,
    *,
    names: tuple[str, str],
    tokens: int,
    rounds: int,
    progress: Callable[[str, float], None],
    cancel: threading.Event,
) -> Sides:
    """B takes 1.5 times as long. Asked to wait it stands still until it is cancelled."""
    before = engine.settings
    engine.change(dict(b))
    try:
        progress("Round 1 of 3: A", 0.25)
        if question == "Wait":
            started.set()
            cancel.wait(LONG_S)
            raise MoestroError("Cancelled.")
    finally:
        engine.change(dict(before))
    differing = {name: (a[name], b[name]) for name in a if a[name] != b[name]}
    first, second = (replace(SIDE, token_ms=(ms,) * tokens) for ms in (2.0, 3.0))
    agreed = tokens if b["miss"] == "wait" else tokens - 3
    kl = 0.0 if agreed == tokens else 0.0123
    return Sides("demo", names, question, "An <answer>", 9, rounds, differing, first, second, agreed, agreed, kl)
