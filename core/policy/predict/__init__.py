"""Predictors, one small file each; importing this package registers them."""

from core.policy.predict import all_next, gate, none, previous_token, recent, request, transitions
from core.policy.predict.base import Guess, Predictor, View

__all__ = ["Guess", "Predictor", "View", "all_next", "gate", "none", "previous_token", "recent", "request",
           "transitions"]
