"""Tasks of lm-evaluation-harness under modes x residencies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.engine import Engine
from core.errors import BusyError, MoestroError
from core.measure.evaluate.harness import run_tasks
from core.measure.evaluate.modes import Mode
from core.measure.evaluate.run import Progress, restored, start_mode
from core.measure.evaluate.scorer import Scorer
from core.measure.evaluate.tally import ModeTotals


def evaluate_tasks(
    engine: Engine,
    modes: Sequence[Mode],
    residencies: Sequence[float],
    tasks: Sequence[str],
    folder: Path | None = None,
    limit: int | None = None,
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
) -> list[dict[str, Any]]:
    """One dict per residency and mode: the tasks' own figures, the share of changed assignments, and the speed. The
    engine's settings are restored afterwards. Raises SettingError without the harness, Cancelled."""
    found: list[dict[str, Any]] = []
    todo = [(share, mode) for share in residencies for mode in modes]
    with restored(engine) as base:
        for at, (share, mode) in enumerate(todo):
            progress(f"{mode.title} at {share:.4g} of the experts", at / len(todo))
            tally, problem, figures = ModeTotals(), "", dict[str, dict[str, float]]()
            try:
                start_mode(engine, mode.fitted(engine.shape.top_k).over(base.with_({"budget": f"{share * 100:g}%"})))
            except BusyError:
                raise
            except MoestroError as error:
                problem = str(error)
            if not problem:
                figures = run_tasks(Scorer(engine, cancel, tally), tasks, folder, limit)
            tpot_ms = tally.mean("total_ms")
            found.append(
                {
                    "mode": mode.name,
                    "residency": share,
                    "problem": problem,
                    "figures": figures,
                    "substituted_rate": tally.rate("changed", "assignments"),
                    "link_bytes": tally.mean("link_bytes"),
                    "tok_s": 1e3 / tpot_ms if tpot_ms else None,
                    "emulated": tally.emulated,
                }
            )
    return found
