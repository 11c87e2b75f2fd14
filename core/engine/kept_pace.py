"""The time of a layer that the demo model's emulated link is scaled to: measured once per machine, and kept.

Timed passes differ from load to load, by what else the machine does. A link has one speed, so that figures of two loads
can be compared: the first load times the model in its formats and arithmetic, later ones find that in a file, where one
is named, else in the process. A time of a machine that was busy goes once a load is far below it.
"""

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from core import __version__
from core.capacity.plan import Plan
from core.memory.link import scaled_gbps
from core.settings.link import LinkSettings
from core.system import kept_file
from core.system.native.compile import processor

log = logging.getLogger("moestro.load")

BUSY = 0.75  # of the kept time: a load that takes less shows that the machine was busy then
TIMES = 3  # that it is timed, of which the least is kept: other programs only ever add to it
ROUNDED = 3  # digits that are kept

_file: Path | None = None
_of_process: dict[str, float] = {}  # where no file is named


def keep_in(file: Path | None) -> None:
    """Keep times in this file, and take those that are there; None = keep them for the life of the process."""
    global _file
    _file = file


def layer_ms(plan: Plan, model_hash: str, arithmetic: str, time_layer_ms: Callable[[], float]) -> float:
    """Milliseconds that a layer takes on this machine when nothing is copied: the kept time, or, where there is none or
    it is far longer, that of `time_layer_ms`, which is kept."""
    key = " ".join((model_hash, plan.format, plan.spec.dense, plan.compute_type, arithmetic, machine(plan.device)))
    kept = _of_process.get(key) if _file is None else _time(kept_file.read(_file, log).get(key))
    measured_ms = float(f"{min(time_layer_ms() for _ in range(TIMES)):.{ROUNDED}g}")
    if kept is not None and measured_ms > BUSY * kept:
        return kept
    if _file is None:
        _of_process[key] = measured_ms
        return measured_ms
    row = {
        "model": Path(plan.spec.model).name,
        "format": plan.format,
        "arithmetic": arithmetic,
        "layer_ms": measured_ms,
        "gbps": scaled_gbps(measured_ms, plan.sizes.blob, LinkSettings().latency_us),
    }
    kept_file.replace(_file, {**kept_file.read(_file, log), key: row}, log)
    return measured_ms


def kept_in(file: Path) -> list[dict[str, object]]:
    """What a file has of this version, as plain values: model, format, arithmetic, the milliseconds of a layer, and the
    bandwidth in GB/s that the link is given for it at the usual latency."""
    rows = [row for key, row in kept_file.read(file, log).items() if key.endswith(f" {__version__}")]
    return [row for row in rows if _time(row) is not None]


def machine(device: torch.device) -> str:
    """All that the time depends on besides the model, its formats and the arithmetic."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor()} x{os.cpu_count()}"
    return f"{name}, torch {torch.__version__}, {__version__}"


def _time(row: object) -> float | None:
    """The time out of a file; None where it is damaged."""
    found = row.get("layer_ms") if isinstance(row, dict) else None
    return float(found) if isinstance(found, float) and math.isfinite(found) and found > 0 else None
