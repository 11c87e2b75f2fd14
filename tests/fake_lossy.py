"""What the fake engine does while something lossy is on: some of what it misses is replaced, and it says so."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from core.engine.quality.report import Quality
from core.metrics.lossy_events import CHOICE, Action, Lossy, LossyLook, Why
from core.runtime.lossy_look import look
from core.runtime.telemetry import mean
from core.settings.param import Value
from core.types import ModelShape, Outcome, StepRecord

Outcomes = npt.NDArray[np.uint8]
OUTCOME_OF = {Action.SUBSTITUTE: Outcome.SUBSTITUTED, Action.DROP: Outcome.DROPPED, Action.PREDICTED: Outcome.PREDICTED}


def act(
    settings: Mapping[str, Value],
    shape: ModelShape,
    ids: npt.NDArray[Any],
    pairs: list[tuple[int, int]],
    outcome: Outcomes,
    rng: np.random.Generator,
) -> tuple[Lossy, Outcomes]:
    """Replace every second missing expert, if the settings replace any; what was done, and the outcomes with it."""
    rows, outcome = [], outcome.copy()
    missed = outcome >= Outcome.MISS
    for at, (layer, expert) in enumerate(pairs):
        if missed[at]:
            action = _action(settings, at)
            outcome[at] = OUTCOME_OF.get(action, outcome[at])
            to = int(rng.integers(shape.experts)) if action in (Action.SUBSTITUTE, Action.PREDICTED) else -1
            rows += [
                (layer, token, expert, to, action, Why.RHO if action == Action.WAIT else Why.ALLOWED)
                for token in np.where(ids[layer] == expert)[0]
            ]
    layers = [layer for layer, _ in pairs]
    asked = np.bincount(layers, minlength=shape.layers)
    delta = (np.bincount(layers, missed, shape.layers) / asked).astype(np.float32)
    gated = settings["batch_gate"] != "none"
    beta = np.full(shape.layers, settings["beta"] if gated else np.nan, np.float32)
    tae = rng.beta(6, 2, (shape.layers, ids.shape[1])).astype(np.float16)
    return Lossy(np.array(rows, CHOICE), delta, beta, tae), outcome


def _action(settings: Mapping[str, Value], at: int) -> Action:
    if settings["execute"] != "off":
        return Action.PREDICTED
    if at % 2 or settings["rho"] == 0 or settings["miss"] == "wait":
        return Action.WAIT
    drops = settings["miss"] == "drop" or (settings["miss"] == "substitute_drop" and at % 4 == 0)
    return Action.DROP if drops else Action.SUBSTITUTE


def seen(
    settings: Mapping[str, Value], shape: ModelShape, steps: list[StepRecord], tail: list[StepRecord]
) -> LossyLook:
    """For a frame. Only buddies have a matrix."""
    tau = float(settings["gate_tau"]) if settings["gate"] == "tau" else np.nan
    buddies = None
    if settings["substitute"] == "buddy" and str(settings["miss"]).startswith("substitute"):
        buddies = np.zeros((shape.experts, shape.experts), np.float32)
        buddies[5, 7], buddies[5, 2] = 0.62, 0.31
    delta, beta = (
        np.array([mean(getattr(s.lossy, name)) if s.lossy is not None else np.nan for s in tail], np.float32)
        for name in ("delta", "beta")
    )
    return look(steps[-50:], delta, beta, shape.layers, [tau] * shape.layers, buddies)


def scored(number: int, steps: list[StepRecord]) -> Quality:
    """What the exact model is said to have thought of an answer."""
    return Quality(
        answer=number,
        tokens=len(steps),
        scored=len(steps) // 2,
        kl=0.031,
        kl_most=0.4,
        agreement=0.96,
        perplexity=4.2,
        saved_ms=1.5,
        changed=sum(step.changed for step in steps),
        assignments=sum(step.assignments for step in steps),
    )
