"""What gates, rho and budgets allow of lossy options; the oracle is transformers' own model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.errors import SettingError
from core.metrics.lossy_events import Action, Why
from core.policy.substitute.entropy import entropy
from core.profile.routing import Entropies
from tests.engine.lossy.passes import answer, run, told
from tests.selection import layered

FORBIDDING: tuple[dict[str, object], ...] = (
    {"rho": 0},
    {"gate": "tau", "gate_tau": 1.0},
    {"gate_margin": 0.0},
    {"batch_gate": "fixed", "beta": 0.0},
    {"batch_gate": "adaptive", "beta_budget": 65536.0},
    {"protect": "top:8"},
    {"gate": "percentile", "gate_percentile": 100.0},
)


@pytest.mark.parametrize(
    "way", layered(["substitute", "drop", "substitute_drop"], quick=lambda way: way == "substitute_drop")
)
@pytest.mark.parametrize(
    "gates",
    layered(FORBIDDING, quick=lambda gates: "batch_gate" not in gates),
    ids=lambda gates: "-".join(map(str, gates)),
)
def test_what_gates_forbid_leaves_every_bit_as_it_was(
    engine: Engine, reference: Any, gates: dict[str, object], way: str
) -> None:
    logits, events = run(engine, miss=way, **gates)
    waited = [row for one in events if one for row in one.choices]
    assert waited and all(row["action"] == Action.WAIT and row["why"] != Why.ALLOWED for row in waited)
    nothing = [replace(one, choices=one.choices[:0]) for one in events if one]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(logits, told(reference, nothing), strict=True))


@pytest.mark.parametrize("order", layered(["lightest", "heaviest"], quick=lambda order: order == "lightest"))
@pytest.mark.parametrize("way", [{"miss": "drop"}, {"miss": "substitute", "substitute": "random"}], ids=str)
def test_rho_is_spent_on_the_experts_of_least_weight(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, way: dict[str, object], order: str
) -> None:
    """By default; of most weight on request. Every missing expert may be replaced here, so that only rho decides."""
    gates: list[dict[tuple[int, int, int], float]] = []  # a pass: (layer, token, expert) -> its weight
    begin, route = engine.parts.prediction.miss.begin, engine.parts.prediction.miss.route

    def begun(*phase: str) -> None:
        gates.append({})
        begin(*phase)

    def routed(layer: int, ids: torch.Tensor, weights: torch.Tensor, asked: list[list[int]]) -> Any:
        for token, (row, shares) in enumerate(zip(asked, weights.tolist(), strict=True)):
            gates[-1] |= {(layer, token, expert): share for expert, share in zip(row, shares, strict=True)}
        return route(layer, ids, weights, asked)

    monkeypatch.setattr(type(engine.parts.prediction.miss), "begin", lambda self, *phase: begun(*phase))
    monkeypatch.setattr(type(engine.parts.prediction.miss), "route", lambda self, *args: routed(*args))
    _, events = run(engine, rho=1, **way, **({} if order == "lightest" else {"rho_order": order}))
    limited = 0
    for weights, one in zip([known for known in gates if known], events, strict=True):
        lost: dict[tuple[int, int], list[Any]] = {}
        for row in one.choices:
            lost.setdefault((int(row["layer"]), int(row["token"])), []).append(row)
        for place, rows in lost.items():
            share = {int(row["expert"]): weights[(*place, int(row["expert"]))] for row in rows}
            if any(row["why"] == Why.RHO for row in rows):
                [changed] = [int(row["expert"]) for row in rows if row["action"] >= Action.SUBSTITUTE]
                assert share[changed] == (min if order == "lightest" else max)(share.values())
                limited += 1
    assert limited > 20


@pytest.mark.parametrize("temperature", layered([0.8, 0.95, 1.2], quick=lambda value: value == 0.8))
def test_percentiles_are_those_at_the_entropys_temperature(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """A profile of the very passes that follow leaves alone the share of tokens that was asked for, at any of them."""
    kept: list[np.ndarray[Any, Any]] = []  # a layer's weights [T, k]
    route = type(engine.parts.prediction.miss).route

    def routed(self: Any, layer: int, ids: torch.Tensor, weights: torch.Tensor, asked: list[list[int]]) -> Any:
        kept.append(weights.double().numpy())
        return route(self, layer, ids, weights, asked)

    monkeypatch.setattr(type(engine.parts.prediction.miss), "route", routed)
    run(engine, miss="drop", rho=0)
    layers, before = engine.shape.layers, engine.profile
    measured = Entropies(layers)
    for at, weights in enumerate(kept):
        measured.add(at % layers, weights)
    assert before is not None
    engine.use_profile(replace(before, tae=measured.percentiles(), tae_tempered=measured.tempered()))
    try:
        engine.change({"gate": "percentile", "gate_percentile": 30.0, "gate_temperature": temperature})
        limits = engine.parts.prediction.miss.thresholds
        for layer in range(layers):
            found = entropy(np.concatenate(kept[layer::layers]), temperature)
            assert (found <= limits[layer]).mean() == pytest.approx(0.3, abs=0.05)
        with pytest.raises(SettingError, match="at temperature 1 only"):
            engine.use_profile(replace(before, tae_tempered=None))
    finally:
        engine.change({"gate": "none", "gate_temperature": 1.0})
        engine.use_profile(before)


def test_an_adaptive_layer_gate_loads_what_the_budget_pays_for(engine: Engine) -> None:
    size = engine.shape.expert_bytes / 1e6
    for budget in (0.0, 3 * size, 1000 * size):
        engine.expert_cache.reshape(make_policy=engine.expert_cache.make_policy)
        engine.change({"miss": "substitute_drop", "rho": 64, "batch_gate": "adaptive", "beta_budget": budget})
        _, steps, _ = answer(engine, {})
        decode = [step for step in steps if step.phase == "decode"]
        assert all(step.demand_bytes <= budget * 1e6 for step in decode)
        changed = sum(step.changed for step in decode)
        assert (changed > 0) == (budget < 1000 * size)
