"""One pass over texts and traces that gathers every requested part."""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.engine.texts import Tokens
from core.measure.calibrate.gate_recall import GateAhead
from core.measure.calibrate.hit_curves import HitCurves
from core.measure.calibrate.likeness import Likeness
from core.measure.calibrate.maps import MapCollection
from core.measure.calibrate.outputs import Norms, Outputs, Peaks
from core.measure.calibrate.paths import Paths
from core.measure.calibrate.states import States
from core.profile.routing import Activations, Entropies
from core.profile.trace import Chunk, Trace
from core.runtime.measurement import LayerRun, MeasurementSession

WINDOW = 2048  # tokens; a longer text is read in several windows, each from its own beginning


class Observer:
    """Reads texts through a measurement session and keeps the data for `parts`. Nothing is counted twice; an
    interrupted text counts as far as it was read. `warmup`: see `core.measure.calibrate.gather.calibrate`. `states` and
    `paths`: where the training data of estimator and routing path go; the caller closes them. `paths_of_texts`: the
    latter are of the texts, too, not of recorded routing alone."""

    def __init__(
        self,
        bench: MeasurementSession,
        parts: Collection[str],
        warmup: int = 0,
        states: States | None = None,
        paths: Paths | None = None,
        paths_of_texts: bool = True,
    ) -> None:
        layers, experts, hidden, k = bench.shape.layers, bench.shape.experts, bench.shape.hidden, bench.shape.top_k
        self._bench, self.layers, self._warmup = bench, layers, warmup
        self._each: npt.NDArray[np.float64] | None = None  # [T] how much each token of the pass counts in pairs
        self._read = dict[int, int]()  # request of the trace -> its tokens so far
        self.experts, self.top_k = experts, k
        self.tokens = 0
        self.activations = Activations(layers, experts) if {"counts", "pairs"} & set(parts) else None
        self.entropies = Entropies(layers) if "tae" in parts else None
        self.paths, self._paths_of_texts = paths, paths_of_texts
        self.outputs = Outputs(layers, experts, hidden) if "defaults" in parts else None
        self.norms = Norms(layers, experts) if "norms" in parts else None
        self.peaks = Peaks(layers, experts) if "peaks" in parts else None
        self.likeness = Likeness(layers, experts, hidden) if "likeness" in parts else None
        self.ahead = GateAhead(bench.sites, self.outputs) if "gate_recall" in parts else None
        self.hits = HitCurves(bench.sites, bench.shape) if "curves" in parts else None
        self.maps = MapCollection(layers, experts, hidden) if "maps" in parts else None
        self.states = states
        self._embedded: list[torch.Tensor] = []
        self._probs: list[npt.NDArray[np.float32]] = []
        self._ids: list[npt.NDArray[Any]] = []

    def read(self, text: Tokens) -> Iterator[None]:
        """Reads one text through the model, in windows and chunks; yields after every pass. The session must
        be capturing."""
        window = min(WINDOW, self._bench.context)
        for start in range(0, len(text.ids), window):
            ids = text.ids[start : start + window]
            cache, routes = self._bench.kv.fresh(), list[npt.NDArray[Any]]()
            for at in range(0, len(ids), self._bench.chunk):
                part = ids[at : at + self._bench.chunk]
                for sample in (self.states, self.likeness):
                    if sample is not None:
                        sample.begin(len(part))
                self._each = self._counted(np.arange(at, at + len(part)))
                self._bench.run(part.tolist(), cache)
                self._passed(part, whole=at == 0)
                routes.append(np.stack(self._ids, 1))
                self._ids.clear()
                yield
            if self.paths is not None and self._paths_of_texts:
                self.paths.add(ids, np.concatenate(routes), max(0, min(text.prompt - start, len(ids))))

    def replay(self, trace: Trace) -> Iterator[None]:
        """Adds recorded routing: the parts that follow from ids and weights alone. Yields after every chunk."""
        self._read.clear()
        for chunk in trace.chunks():
            self.tokens += len(chunk.ids)
            self._each = self._counted(self._places(chunk)) if self._warmup else None
            for layer in range(self.layers):
                self._routed(layer, chunk.ids[:, layer], None if chunk.weights is None else chunk.weights[:, layer])
            if chunk.tok is not None:
                self._replayed(chunk, chunk.tok)
            yield

    def _counted(self, places: npt.NDArray[np.integer]) -> npt.NDArray[np.float64] | None:
        """How much tokens count in pairs, by their places in their texts; None = all of them 1."""
        return np.minimum((places + 1) / self._warmup, 1.0) if self._warmup else None

    def _places(self, chunk: Chunk) -> npt.NDArray[np.int64]:
        """[n] how many tokens of its request each follows."""
        found = []
        for request, size in zip(chunk.rid.tolist(), chunk.sizes.tolist(), strict=True):
            before = self._read.get(request, 0)
            found.append(np.arange(before, before + size))
            self._read[request] = before + size
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _replayed(self, chunk: Chunk, tokens: npt.NDArray[np.int32]) -> None:
        if self.paths is not None:
            rid, decode = np.repeat(chunk.rid, chunk.sizes), np.repeat(chunk.decode, chunk.sizes)
            for rows in np.split(np.arange(len(rid)), np.flatnonzero(np.diff(rid)) + 1):
                asked = int((~decode[rows]).sum()) or len(rows) // 2
                self.paths.add(tokens[rows], chunk.ids[rows], asked)

    def embedding(self, output: torch.Tensor) -> None:
        """Output of the embedding, [T, H], at the start of a pass."""
        if self.maps is not None:
            self._embedded.append(output.float().cpu())

    def layer(self, run: LayerRun) -> None:
        """Adds the next MoE layer of the pass."""
        ids = run.ids.cpu().numpy()
        self._ids.append(ids)
        self._routed(run.seen.layer, ids, run.weights.float().cpu().numpy())
        for each in (self.ahead, self.hits, self.states, self.likeness):
            if each is not None:
                each.add(run)
        for outputs in (self.outputs, self.norms, self.peaks):
            if outputs is not None:
                outputs.add(run.seen.layer, run.ids, run.outs)
        if self.maps is not None:
            self._probs.append(run.seen.probs.cpu().numpy())

    def _routed(self, layer: int, ids: npt.NDArray[Any], weights: npt.NDArray[Any] | None) -> None:
        if self.activations is not None:
            self.activations.add(layer, ids, weights, self._each)
        if self.entropies is not None and weights is not None:
            self.entropies.add(layer, weights)

    def _passed(self, tokens: npt.NDArray[np.int32], *, whole: bool) -> None:
        """Ends a pass. Every token is an iteration of its own, as in decoding; the first pass of a window (`whole`) is
        one more, as in prefill: the mean of its embeddings and of its maps."""
        self.tokens += len(tokens)
        if self.maps is not None:
            keys, maps = self._embedded.pop().numpy(), np.stack(self._probs, 1)
            self._probs.clear()
            if whole:
                keys = np.concatenate([keys.mean(0, keepdims=True), keys])
                maps = np.concatenate([maps.mean(0, keepdims=True), maps])
            self.maps.add(keys, maps)
