"""The table of lossy choices made instead of waiting for missing experts, and their reasons, from the stored events."""

import sqlite3
from collections.abc import Sequence

import numpy as np
import pandas as pd

from core.metrics.lossy_events import CHOICE, Action, Why

DEFINITIONS: dict[str, str] = {
    "load": "The loading of a model the row belongs to; see manifest.json.",
    "phase": "prefill (the prompt) or decode (one generated token a pass).",
    "layer": "Mixture-of-Experts layer, counted from 0.",
    "action": "What was done about a missing expert of a token: wait, substitute, drop, or predicted: the token's "
    "whole routing in the layer was the predicted one.",
    "why": "Why it was waited for: tae, margin (the token gates), beta (the layer gate), rho, protected, no_candidate, "
    "share (too much weight to be dropped); allowed: something else was done.",
    "count": "How often.",
}


def counted(load: int, rows: Sequence[sqlite3.Row]) -> pd.DataFrame:
    """The events of some forward passes, counted by phase, layer, action and reason."""
    filled = [row for row in rows if row["choices"]]
    if not filled:
        return pd.DataFrame(columns=list(DEFINITIONS))
    events = np.frombuffer(b"".join(row["choices"] for row in filled), CHOICE)
    phases = np.repeat([row["phase"] for row in filled], [len(row["choices"]) // CHOICE.itemsize for row in filled])
    table = pd.DataFrame(
        {
            "load": load,
            "phase": phases,
            "layer": events["layer"],
            "action": [Action(a).name.lower() for a in events["action"].tolist()],
            "why": [Why(w).name.lower() for w in events["why"].tolist()],
            "count": 1,
        }
    )
    return summed([table])


def summed(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Sum of several such tables."""
    filled = [table for table in tables if len(table)]
    if not filled:
        return pd.DataFrame(columns=list(DEFINITIONS))
    keys = [name for name in DEFINITIONS if name != "count"]
    return pd.concat(filled).groupby(keys)["count"].sum().reset_index()
