"""Replays routing traces through the engine's own eviction policies, on expert ids alone: hit rates, bounds, predicted
speed."""

from core.simulate.clock import Clock
from core.simulate.replay import Replay, Tally
from core.simulate.run import BELADY, BELADY_BYPASS, Config, Result, simulate

__all__ = ["BELADY", "BELADY_BYPASS", "Clock", "Config", "Replay", "Result", "Tally", "simulate"]
