"""Calibration trains the networks of two predictors on what was gathered: the estimator and the routing path."""

import threading
from collections.abc import Callable, Mapping

import torch

from core.measure.calibrate.observe import Observer
from core.measure.calibrate.states import HELD_OUT
from core.memory.store import Cancelled
from core.policy.predict.nets import estimator, path
from core.policy.predict.nets.training import Progress
from core.settings.calibration import CalibrationSettings

Trained = tuple[Mapping[str, torch.Tensor], Mapping[str, object], list[float | None]]
"""Tensors and settings as a profile stores them, and the recall by layer; None where a layer has none."""


def _estimator(
    seen: Observer, settings: CalibrationSettings, progress: Progress, cancel: threading.Event
) -> Trained | None:
    """Trains the estimator on nine tokens in ten; its recall by layer is of the tenth."""
    states = seen.states
    if states is None or not states.train.count:
        return None
    states.complete(None if seen.outputs is None else seen.outputs.means())
    net = estimator.train(
        states.train,
        layers=seen.layers,
        experts=seen.experts,
        hidden=states.hidden,
        width=settings.width_for(states.hidden),
        quasi=settings.estimator_input == "quasi",
        progress=progress,
        cancel=cancel,
    )
    if net is None:
        raise Cancelled
    held_out = states.test if states.test.count else states.train
    return *estimator.to_tensors(net), _plain(estimator.recall(net, held_out, seen.top_k))


def _path(seen: Observer, settings: CalibrationSettings, progress: Progress, cancel: threading.Event) -> Trained | None:
    """Trains the path net on nine texts in ten; its recall by layer is of the tenth."""
    passages = seen.paths.passages() if seen.paths is not None else []
    if not passages:
        return None
    known = [one for i, one in enumerate(passages) if i % HELD_OUT != HELD_OUT - 1]
    net = path.train(known, experts=seen.experts, progress=progress, cancel=cancel)
    if net is None:
        raise Cancelled
    return *path.to_tensors(net), _plain(path.recall(net, passages[HELD_OUT - 1 :: HELD_OUT] or passages))


NETS: dict[str, Callable[[Observer, CalibrationSettings, Progress, threading.Event], Trained | None]] = {
    "estimator": _estimator,
    "path": _path,
}


def _plain(values: torch.Tensor) -> list[float | None]:
    return [None if value != value else round(value, 4) for value in values.tolist()]
