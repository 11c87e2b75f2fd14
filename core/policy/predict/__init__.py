"""Predictors, one small file each; importing this package registers them."""

from core.policy.predict import (
    all_next,
    default_vectors,
    estimator,
    expert_map,
    gate,
    none,
    previous_token,
    random,
    recent,
    request,
    routing_path,
    stride,
    transitions,
)
from core.policy.predict.base import LayerMap, Prediction, Predictor, View
from core.policy.predict.oracle import Oracle

__all__ = [
    "LayerMap",
    "Oracle",
    "Prediction",
    "Predictor",
    "View",
    "all_next",
    "default_vectors",
    "estimator",
    "expert_map",
    "gate",
    "none",
    "previous_token",
    "random",
    "recent",
    "request",
    "routing_path",
    "stride",
    "transitions",
]
