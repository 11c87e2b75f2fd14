"""Predictors, one small file each; importing this package registers them."""

from importlib import import_module

from core.policy.predict.base import LayerMap, Prediction, Predictor, View
from core.policy.predict.oracle import Oracle

for _name in (
    "all_next default_vectors estimator expert_map gate none previous_token random recent request routing_path stride "
    "transitions"
).split():
    import_module(f"{__name__}.{_name}")

__all__ = ["LayerMap", "Oracle", "Prediction", "Predictor", "View"]
