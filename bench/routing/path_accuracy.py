"""Recall and precision of what is named before a pass (ExpertFlow section 4.2, table 1): of the experts that a batch
needs by what its sequences used last (TLP), by counts from layer to layer (SLP), and by the trained network. A batch of
one is the sequence level."""

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness.paired import stretches
from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.policy.batching import batch_accuracy
from core.policy.predict.path_messages import Share, answered, asked
from core.policy.predict.path_reader import ACTIVE, PathReader, needed
from core.policy.predict.worker import WorkerTask
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord

Bools = npt.NDArray[np.bool_]
NAMES = ("TLP", "SLP", "network", "network, above one half")
FIGURES = ("accuracy", "precision", "named")


def measure(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, size: int) -> dict[str, dict[str, Any]]:
    """Answers `prompts`, `size` at a time, each with at most `tokens` tokens. Of each of NAMES: `accuracy`, which is
    recall, `precision`, how many experts of a layer are `named`, and `blocks` of each of these in stretches of passes;
    of the network also its `ms` for a pass. The engine has a profile with the network."""
    sampling, judge = Sampling(max_new_tokens=tokens, temperature=0.0), Judge(engine)
    steps: dict[int, StepRecord] = {}
    drawn: dict[int, list[int]] = {at: [] for at in range(len(prompts))}
    numbers: dict[int, int] = {}  # of the engine's requests -> the prompt
    requests = [BatchRequest(at, Ids(ids), sampling) for at, ids in enumerate(prompts)]
    for one in engine.generate_many(requests, size):
        if one.piece is not None and one.piece.step is not None:
            steps[one.piece.step.index] = one.piece.step
        if one.piece is not None and one.piece.kind == "token":
            drawn[int(str(one.key))].append(int(one.piece.token or 0))
    for step in steps.values():
        for request, _ in step.rows:
            numbers.setdefault(request, len(numbers))  # prompts are begun in their order
    texts = {request: [*prompts[at], *drawn[at]] for request, at in numbers.items()}
    for step in steps.values():
        judge.see(step, texts)
    return judge.figures()


class Judge:
    """Compares what each predictor would have named before a pass with what the pass needed."""

    def __init__(self, engine: Engine) -> None:
        assert engine.profile is not None
        shape = engine.shape
        self._size, self._top_k = (shape.layers, shape.experts), shape.top_k
        sizes, arrays = engine.profile.net("path")
        self._reader = PathReader(WorkerTask("path", {**sizes, ACTIVE: shape.top_k}, arrays))
        self._newest: dict[int, npt.NDArray[np.int16]] = {}  # [L, k]
        self._done: dict[int, int] = {}  # tokens of each request so far
        self._pairs = np.zeros((shape.layers - 1, shape.experts, shape.experts))
        self._from = np.zeros((shape.layers - 1, shape.experts))
        self._found: dict[str, dict[str, list[float]]] = {name: {one: [] for one in FIGURES} for name in NAMES}
        self._ms: list[float] = []

    def see(self, step: StepRecord, texts: dict[int, list[int]]) -> None:
        """A pass, and the tokens of every request."""
        shares = []
        for request, count in step.rows:
            done = self._done.get(request, 0)
            shares.append(Share(request, not done, texts[request][done : done + count]))
            self._done[request] = done + count
        began_s = time.perf_counter()
        found = answered(self._reader.work(asked(step.index, shares)))
        if step.phase == "decode":
            self._ms.append((time.perf_counter() - began_s) * 1e3)
            idle = found.idle.reshape(-1, *self._size)
            self._compare(step.ids, step.rows, found.active.reshape(-1, *self._size), idle)
        self._learn(step.ids)
        for (request, _), row in zip(step.rows, np.cumsum([count for _, count in step.rows]), strict=True):
            self._newest[request] = step.ids[:, row - 1]

    def figures(self) -> dict[str, dict[str, Any]]:
        """By predictor."""
        found: dict[str, dict[str, Any]] = {
            name: {
                **{figure: fmean(values) if values else 0.0 for figure, values in of.items()},
                "blocks": {figure: stretches(values) for figure, values in of.items()},
            }
            for name, of in self._found.items()
        }
        found["network"]["ms"] = fmean(self._ms) if self._ms else 0.0
        return found

    def _compare(
        self, ids: npt.NDArray[np.int16], rows: Sequence[tuple[int, int]], active: Bools, idle: npt.NDArray[np.float32]
    ) -> None:
        newest = np.stack([self._newest[request] for request, _ in rows], 1)
        named = {
            "TLP": self._union(newest),
            "SLP": self._counted(ids, newest),
            "network": active.any(0),
            "network, above one half": np.any([needed(one, 0) for one in idle], 0),
        }
        used = self._union(ids)
        for name, union in named.items():
            found, precision = self._found[name], batch_accuracy(union, used)  # the share of those named that were used
            found["accuracy"].append(batch_accuracy(used, union))
            found["precision"].append(precision if precision == precision else 0.0)  # none named
            found["named"].append(float(union.sum(1).mean()))

    def _union(self, ids: npt.NDArray[np.int16]) -> Bools:
        """[L, T, k] -> [L, E]."""
        union: Bools = np.zeros(self._size, np.bool_)
        np.put_along_axis(union, ids.reshape(len(ids), -1).astype(np.int64), True, 1)
        return union

    def _counted(self, ids: npt.NDArray[np.int16], newest: npt.NDArray[np.int16]) -> Bools:
        """What followed each token's experts of the layer before most often; in layer 0 what was used last."""
        union = self._union(newest)
        for layer in range(1, self._size[0]):
            share = self._pairs[layer - 1] / np.maximum(self._from[layer - 1], 1)[:, None]
            scores = share[ids[layer - 1]].mean(1)  # [T, E]
            union[layer] = False
            union[layer, np.argsort(-scores, 1, "stable")[:, : self._top_k]] = True
        return union

    def _learn(self, ids: npt.NDArray[np.int16]) -> None:
        for layer in range(1, self._size[0]):
            before, after = ids[layer - 1].astype(np.int64), ids[layer].astype(np.int64)
            np.add.at(self._pairs[layer - 1], (before[:, :, None], after[:, None, :]), 1)
            np.add.at(self._from[layer - 1], before, 1)
