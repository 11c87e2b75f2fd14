"""Replays routing traces through the engine's own eviction policies, on expert ids alone: hit rates, bounds, predicted
speed."""

from core.simulate.clock import Clock
from core.simulate.replay import Replay, Tally
from core.simulate.run import BELADY, Config, Result, simulate

__all__ = ["BELADY", "Clock", "Config", "Replay", "Result", "Tally", "simulate"]
