"""The figures of a profile: expert load, co-activation, similarity of experts, gate entropy, and recall of
one-layer-ahead prediction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from app.ui.tabs.figures import PALETTE, accent, figure, heatmap, legend
from core.policy.substitute.list_lengths import ListRule, conditional
from core.profile import Profile

SHOWN = (5, 25, 50, 75, 95)  # percentiles of the gate entropy
MEASURES = {"cosine": "Cosine of outputs", "share": "Share of co-activations"}  # of similarity


def shares(profile: Profile) -> npt.NDArray[np.float64] | None:
    """[L, E] percent of a layer's tokens that selected each expert."""
    if profile.counts is None:
        return None
    tokens = np.maximum(profile.counts.sum(1, keepdims=True) / profile.top_k, 1)
    found: npt.NDArray[np.float64] = 100.0 * profile.counts / tokens
    return found


def together(profile: Profile, layer: int) -> npt.NDArray[np.float64] | None:
    """[E, E] log10 of (1 + tokens that selected both) in a layer: on a linear scale all but a few pairs would
    be black.
    """
    if profile.pairs is None:
        return None
    found: npt.NDArray[np.float64] = np.log10(1.0 + profile.pairs[layer].astype(np.float64))
    return found


def counts(profile: Profile, dark: bool) -> Any:
    """Heatmap, layers x experts."""
    values = shares(profile)
    if values is None:
        return None
    layers = len(values)
    made = figure(
        [heatmap(values, dark, hovertemplate="layer %{y}, expert %{x}: %{z:.3g} % of tokens<extra></extra>")],
        dark,
        "How many tokens choose each expert (%)",
        "expert",
        "layer",
        height=max(240, min(560, 110 + 14 * layers)),
    )
    made.update_yaxes(autorange="reversed", dtick=whole(layers))
    return made


def pairs(profile: Profile, layer: int, dark: bool) -> Any:
    """Heatmap, experts x experts of one layer, on a log scale."""
    layer = max(0, min(profile.layers - 1, layer))
    values = together(profile, layer)
    if values is None:
        return None
    top = float(values.max(initial=0.0))
    ticks = list(range(int(top) + 1)) or [0]
    trace = heatmap(
        values,
        dark,
        customdata=np.rint(10**values - 1),
        hovertemplate="experts %{y} and %{x}: %{customdata} tokens<extra></extra>",
    )
    trace.colorbar.update(tickvals=ticks, ticktext=[f"{10**tick:,}" for tick in ticks])
    heading = f"Chosen together in layer {layer} (tokens, log scale)"
    made = figure([trace], dark, heading, "expert", "expert", height=420)
    made.update_yaxes(autorange="reversed")
    return made


def alike(profile: Profile, layer: int, measure: str, rule: ListRule) -> tuple[str, npt.NDArray[np.float64]] | None:
    """(measure, [E, E]) similarity of a layer's experts, NaN on the diagonal: the mean cosine of their outputs, or q in
    percent. The other measure where that one was not gathered, None where neither was."""
    pairs, cosines = rule.pairs(profile), profile.likeness
    if pairs is None and cosines is None:
        return None
    if pairs is None or (measure == "cosine" and cosines is not None):
        assert cosines is not None
        measure, found = "cosine", cosines[layer].astype(np.float64)
    else:
        measure, found = "share", 100.0 * conditional(pairs[layer], rule.smoothing)
    np.fill_diagonal(found, np.nan)
    return measure, found


def similarity(profile: Profile, layer: int, measure: str, rule: ListRule, dark: bool) -> Any:
    """Heatmap, experts x experts of one layer, as in BuddyMoE figure 4; a row holds an expert's possible buddies."""
    layer = max(0, min(profile.layers - 1, layer))
    values = alike(profile, layer, measure, rule)
    if values is None:
        return None
    found, matrix = values
    what, value = (
        ("their outputs have a cosine of", "%{z:.3f}")
        if found == "cosine"
        else ("the buddy has", "%{z:.3g} % of the expert's co-activations")
    )
    trace = heatmap(
        matrix, dark, hovertemplate=f"expert %{{y}}, buddy %{{x}}: {what} {value}<extra></extra>", hoverongaps=False
    )
    heading = f"{MEASURES[found]} in layer {layer}" + (" (%)" if found == "share" else "")
    made = figure([trace], dark, heading, "buddy", "expert", height=420)
    made.update_yaxes(autorange="reversed")
    return made


def entropy(profile: Profile, dark: bool) -> Any:
    """Percentiles of the gate entropy by layer, and the share of tokens by entropy over all layers."""
    import plotly.graph_objects as go

    if profile.tae is None:
        return None
    layers = list(range(profile.layers))
    traces = []
    for at, percentile in enumerate(SHOWN):
        middle = percentile == 50
        traces.append(
            go.Scatter(
                x=layers,
                y=profile.tae[:, percentile].tolist(),
                mode="lines+markers",
                name=f"{percentile} %",
                line=dict(color=accent(dark) if middle else PALETTE[at % len(PALETTE)], width=3 if middle else 1.5),
                marker=dict(size=4),
                hovertemplate=f"layer %{{x}}: {percentile} % of tokens are below %{{y:.3f}}<extra></extra>",
            )
        )
    made = figure(traces, dark, "Gate entropy (TAE): percentiles of tokens", "layer", "TAE", 340, **legend(dark))
    made.update_yaxes(range=[0, 1.02])
    made.update_xaxes(dtick=whole(profile.layers))
    return made


def recall(profile: Profile, dark: bool) -> Any:
    """Recall@k of each layer's router applied one layer early, and of the trained predictor, if there is one."""
    import plotly.graph_objects as go

    if profile.gate_recall is None:
        return None
    layers = list(range(profile.layers))
    traces = [
        go.Bar(
            x=layers,
            y=[None if r != r else 100 * r for r in profile.gate_recall.tolist()],
            name="gate",
            marker=dict(color=accent(dark)),
            hovertemplate="layer %{x}: %{y:.1f} %<extra>gate</extra>",
        )
    ]
    trained = profile.settings.get("recall")
    for at, (name, values) in enumerate(trained.items() if isinstance(trained, dict) else ()):
        traces.append(
            go.Scatter(
                x=layers[len(layers) - len(values) :],
                y=[None if v is None else 100 * v for v in values],
                name=name,
                mode="lines+markers",
                line=dict(color=PALETTE[1 + at], width=2),
                marker=dict(size=5),
                hovertemplate=f"layer %{{x}}: %{{y:.1f}} %<extra>{name}</extra>",
            )
        )
    heading = f"Recall@{profile.top_k} of the next layer's gate, by layer"
    made = figure(traces, dark, heading, "layer", "recall (%)", 340, **legend(dark) if len(traces) > 1 else {})
    made.update_yaxes(range=[0, 102])
    made.update_xaxes(dtick=whole(profile.layers))
    return made


def whole(layers: int) -> int:
    """Interval between ticks for this number of layers."""
    return max(1, -(-layers // 12))
