"""Predictors, one small file each; importing this package registers them."""

from core.policy.predict import gate, none
from core.policy.predict.base import Guess, Predictor, View

__all__ = ["Guess", "Predictor", "View", "gate", "none"]
