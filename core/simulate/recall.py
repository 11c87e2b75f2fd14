"""Recall of a predictor at any width, layer by layer, without a cache or a clock."""

from dataclasses import replace

import numpy as np

from core.policy.predict.base import PredictorProfile
from core.profile.trace import Trace
from core.settings.registry import variant
from core.simulate.prefetchers import TimedConfig, predictor_for
from core.simulate.replayed import Replayed
from core.simulate.timed_replay import passes
from core.simulate.trace_view import TraceView

WIDTH = "width"  # the parameter that sets how many experts to predict


def recall(
    trace: Trace, config: TimedConfig, most: int, profile: PredictorProfile | None = None
) -> tuple[float | None, ...]:
    """[L] Recall@m: |predicted top m, intersected with selected| / k over decoded tokens; None = no prediction. A
    predictor that is run on the trace is waited for; of one replayed from it, what came in time counts.

    Of the last prediction for a layer, the `most` experts with the highest scores count; a predictor with the parameter
    WIDTH is given `most`. Raises SettingError, or TraceError for a predictor that needs more than the trace has."""
    named = {p.name for p in variant("predictor", config.predictor).params}
    predictor = predictor_for(config, trace, waited_for=True)
    if WIDTH in named and not isinstance(predictor, Replayed):
        predictor = predictor_for(replace(config, params={**config.params, WIDTH: most}), trace, waited_for=True)
    found, predicted = np.zeros((2, trace.layers)), dict[int, list[int]]()
    try:
        for ids, chunk, at, tokens in passes(trace):
            if isinstance(predictor, Replayed):
                predictor.follow(chunk, at)
            view = TraceView(trace, chunk, at, tokens, profile)
            for layer in range(-1 if predictor.starts else 0, trace.layers):
                if layer >= 0:
                    view.reach(layer)
                    chosen = np.unique(ids[:, layer])
                    hit = np.isin(chosen, predicted.pop(layer, [])[:most])
                    found[:, layer] += (hit.sum(), chosen.size) if chunk.decode[at] else 0
                predictions = predictor.predict(view) if layer >= 0 else predictor.begin(view)
                for of in {prediction.layer for prediction in predictions}:
                    best = sorted((g for g in predictions if g.layer == of), key=lambda prediction: -prediction.score)
                    predicted[of] = [prediction.expert for prediction in best]
    finally:
        predictor.close()
    return tuple(float(hit) / float(asked) if asked else None for hit, asked in found.T.tolist())
