"""Records and times a predictor's predictions while it works in the engine: how many were right, and what they cost."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from bench.harness.engines import question_of, until_ready
from bench.harness.paired import stretches
from core.engine import Engine
from core.engine.texts import Text
from core.policy.predict import LayerMap, Prediction, Predictor, View
from core.settings.param import Value
from core.settings.registry import variant, variants
from core.settings.sampling import Sampling

Predictors = Mapping[str, tuple[str, dict[str, Value]]]  # title -> (predictor, parameters)
VARIED: Predictors = {  # in addition to every predictor with its defaults
    "gate, 4 layers": ("gate", {"distance": 4}),
    "expert_map, trajectory alone": ("expert_map", {"semantic": False, "dynamic": False}),
    "expert_map, always k": ("expert_map", {"dynamic": False}),
}


def subjects() -> dict[str, tuple[str, dict[str, Value]]]:
    """Every predictor that makes predictions, with its defaults, and some with other parameters."""
    plain = {
        v.name: (v.name, {p.name: p.default for p in v.params})
        for v in variants("predictor")
        if getattr(v.make, "looks", True)
    }
    return plain | {title: (name, {**plain[name][1], **params}) for title, (name, params) in VARIED.items()}


def listen(
    engine: Engine,
    predictor: str,
    params: Mapping[str, Value],
    texts: Sequence[Text],
    tokens: int,
    answer: int,
    patient: bool,
) -> PredictorProbe:
    """Asks questions until so many tokens were decoded, at most `answer` of each. `patient`: background work is waited
    for."""
    engine.change({"predictor": "none"})
    engine.change({"predictor": predictor, **variant("predictor", predictor).full_names(params)})
    until_ready(engine.predictor_host.predictor)
    probe = engine.predictor_host.predictor = PredictorProbe(engine.predictor_host.predictor, patient)
    left = tokens
    while left > 0:
        before = left
        for text in texts:
            if left > 0:
                pieces = engine.generate(question_of(text), Sampling(max_new_tokens=min(left, answer) + 1))
                left -= sum(piece.kind == "token" for piece in pieces) - 1
        if left == before:
            break  # the model gives no answer
    return probe


class PredictorProbe(Predictor):
    """Wraps `inner`, forwards every call, and records its predictions. Only passes of one token are counted."""

    def __init__(self, inner: Predictor, patient: bool) -> None:
        self._inner = inner
        self._patient = inner.patient = patient
        self.looks, self.asks = inner.looks, inner.asks  # type: ignore[misc]
        self.starts, self.needs = inner.starts, inner.needs  # type: ignore[misc]
        self._pass = -1
        self._begun = False
        self._predicted: dict[tuple[int, int], list[Prediction]] = {}
        self._chosen: dict[tuple[int, int], list[int]] = {}
        self._heaviest: dict[tuple[int, int], list[int]] = {}  # the same, heaviest first
        self._spent_s: defaultdict[int, float] = defaultdict(float)
        self._worked_s: defaultdict[int, float] = defaultdict(float)

    def begin(self, view: View) -> Sequence[Prediction]:
        self._pass, self._begun = self._pass + 1, True
        return self._record(view, self._inner.begin)

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0 and not self._begun:
            self._pass += 1
        self._begun = False
        if len(view.ids) == 1:
            self._chosen[self._pass, view.layer] = chosen = list(view.ids[0])
            if self._patient:  # the weights are on the device, and reading them holds up the layer
                weights = view.weights[0]
                ordered = sorted(range(len(chosen)), key=lambda at: -weights[at])
                self._heaviest[self._pass, view.layer] = [chosen[at] for at in ordered]
        return self._record(view, self._inner.predict)

    def take_maps(self) -> Sequence[LayerMap]:
        return self._inner.take_maps()

    def close(self) -> None:
        self._inner.close()

    def _record(self, view: View, call: Callable[[View], Sequence[Prediction]]) -> Sequence[Prediction]:
        began_s, worked_s = time.perf_counter(), time.thread_time()
        predictions = call(view)
        self._worked_s[self._pass] += time.thread_time() - worked_s
        self._spent_s[self._pass] += time.perf_counter() - began_s
        fresh: defaultdict[tuple[int, int], list[Prediction]] = defaultdict(list)
        for prediction in predictions:
            fresh[self._pass + (prediction.layer <= view.layer), prediction.layer].append(prediction)
        self._predicted |= fresh
        return predictions

    def recall(self, layers: int, width: int = 0) -> list[float]:
        """[layers] share of chosen experts that the last prediction for each layer contained; only its `width`
        likeliest count (0 = all). 0 where nothing was predicted."""
        return [statistics.fmean(rates) if rates else 0.0 for rates in self._recalled(layers, width)]

    def blocks(self, layers: int, width: int) -> dict[str, list[float]]:
        """The same by stretches of tokens: "layer 1" ..., and of all layers but the first "mean"."""
        found = self._recalled(layers, width)
        mean = [statistics.fmean(rates) for rates in zip(*found[1:], strict=False)]
        return {**{f"layer {at}": stretches(rates) for at, rates in enumerate(found)}, "mean": stretches(mean)}

    def _recalled(self, layers: int, width: int) -> list[list[float]]:
        """[layers] recall of every token."""
        found: list[list[float]] = [[] for _ in range(layers)]
        for (number, layer), chosen in self._chosen.items():
            right = self._likeliest(number, layer, width).intersection(chosen)
            found[layer].append(len(right) / len(set(chosen)))
        return found

    def recall_by_rank(self, layers: int, width: int) -> list[list[float]]:
        """[layers][k] share of the heaviest, second heaviest ... chosen expert, by the router's weight, that was among
        the `width` likeliest of the last prediction for its layer. Only of a patient probe. 0 where nothing was
        predicted."""
        return [[statistics.fmean(rank) for rank in zip(*rows, strict=True)] for rows in self._ranked(layers, width)]

    def rank_blocks(self, layers: int, width: int) -> dict[str, list[float]]:
        """The same by rank and by stretches of tokens, mean of the layers but the first."""
        tokens = [*zip(*self._ranked(layers, width)[1:], strict=False)]  # [T][layers - 1][k]
        return {
            str(rank + 1): stretches([statistics.fmean(row[rank] for row in token) for token in tokens])
            for rank in range(width)
        }

    def _ranked(self, layers: int, width: int) -> list[list[list[bool]]]:
        found: list[list[list[bool]]] = [[] for _ in range(layers)]
        for (number, layer), chosen in self._heaviest.items():
            right = self._likeliest(number, layer, width)
            found[layer].append([expert in right for expert in chosen])
        return found

    def _likeliest(self, number: int, layer: int, width: int) -> set[int]:
        """The `width` likeliest experts of the last prediction for a layer of a pass (0 = all)."""
        named = sorted(self._predicted.get((number, layer), []), key=lambda prediction: -prediction.score)
        return {prediction.expert for prediction in named[: width or None]}

    def named(self) -> float:
        """Mean number of experts predicted per token and layer."""
        return statistics.fmean(len(self._predicted.get(at, ())) for at in self._chosen) if self._chosen else 0.0

    def ms_per_token(self) -> dict[str, float]:
        """Medians over the passes of one token, on the computing thread: "wall", including device work that it waits
        for, and "cpu", its own work alone, which other programs on the machine do not lengthen."""
        passes = sorted({number for number, _ in self._chosen})
        return {
            name: statistics.median(spent[number] for number in passes) * 1e3 if passes else 0.0
            for name, spent in (("wall", self._spent_s), ("cpu", self._worked_s))
        }
