"""A profile with every part that predictors need, of sizes that fit an engine; its numbers are drawn, not measured."""

import numpy as np
import torch

from core.engine import Engine
from core.policy.predict.nets import estimator, path
from core.policy.predict.nets.estimator import Estimator
from core.policy.predict.nets.path import RoutingPathNet
from core.profile import Profile


def drawn_profile(engine: Engine, seed: int = 0, *, quasi: bool = False) -> Profile:
    """The same for the same seed. `quasi`: what its estimator is fed."""
    random, shape = np.random.default_rng(seed), engine.shape
    layers, experts, k, hidden = shape.layers, shape.experts, shape.top_k, shape.hidden
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        estimating, e_settings = estimator.to_tensors(Estimator(layers, experts, hidden, 16, int(quasi)))
        walking, p_settings = path.to_tensors(
            RoutingPathNet(layers, experts, torch.arange(3, 60), d_ff=32, heads=2, d_kv=8, blocks=1)
        )
    return Profile(
        model=engine.model_name,
        model_hash=engine.model_hash,
        layers=layers,
        experts=experts,
        top_k=k,
        hidden=hidden,
        tokens=64,
        source="drawn",
        created="2026-01-01T00:00:00+00:00",
        counts=random.integers(1, 50, (layers, experts)),
        defaults=(random.standard_normal((layers, experts, hidden)) * 0.1).astype(np.float16),
        gate_recall=np.array([np.nan, *([0.9, 0.3] * layers)[: layers - 1]], np.float32),
        similarity=random.random(layers - 1).astype(np.float32),
        maps=random.dirichlet(np.ones(experts), (9, layers)).astype(np.float16),
        map_keys=random.standard_normal((9, hidden)).astype(np.float16),
        nets={**estimating, **walking},
        settings={**e_settings, **p_settings},
    )
