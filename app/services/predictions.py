"""How well MoEpic's latency model predicts a token's time: of the last answers of each model, in its profile."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from app.store.private import open_private, private_folder
from core.profile import profile_path
from core.system.reading import BadJson, parse_json

log = logging.getLogger("moestro.app")
MOST = 32  # answers kept: the last ones
BYTES = 1 << 16  # of a file that is read, at most


class Prediction(NamedTuple):
    """Time per decoded token of one answer, in milliseconds."""

    predicted_ms: float
    measured_ms: float

    @property
    def off(self) -> float:
        """How far the prediction was from what was measured, as a share of that."""
        return abs(self.predicted_ms - self.measured_ms) / self.measured_ms


def predictions_path(folder: Path, model_hash: str) -> Path:
    """The file of a model's predictions in a data folder."""
    return profile_path(folder, model_hash).with_suffix(".predictions.json")


def read_predictions(folder: Path, model_hash: str) -> list[Prediction]:
    """Those kept of a model, oldest first; none where the file is missing or damaged."""
    path = predictions_path(folder, model_hash)
    try:
        if not path.is_file() or path.stat().st_size > BYTES:
            return []
        rows = parse_json(path.read_text(encoding="utf-8"))
        found = [Prediction(float(predicted), float(measured)) for predicted, measured in rows]
    except (OSError, UnicodeError, BadJson, TypeError, ValueError) as error:
        log.warning("the predictions in %s cannot be read: %s", path, error)
        return []
    return [one for one in found if one.measured_ms > 0 and math.isfinite(one.off)][-MOST:]


def so_far(found: Sequence[Prediction]) -> str:
    """What they came to, as a sentence; "" = there are none."""
    if not found:
        return ""
    off = statistics.median(one.off for one in found)
    return f"Predictions so far: median {off:.0%} off over {len(found)} answer{'s' * (len(found) > 1)}."


def keep_prediction(folder: Path, model_hash: str, one: Prediction) -> None:
    """Add one to those of a model. Raises OSError, keeping the old file."""
    path = predictions_path(folder, model_hash)
    kept = [*read_predictions(folder, model_hash), one][-MOST:]
    fresh = path.with_name(f"{path.name}.new")
    private_folder(path.parent)
    with open_private(fresh) as file:
        file.write(json.dumps([[round(ms, 4) for ms in each] for each in kept]).encode())
    fresh.replace(path)
