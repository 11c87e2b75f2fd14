"""bench pieces: what does it save that a long prompt borrows memory from the slots, so as to be read in fewer pieces?

One engine reads the same new prompts with and without borrowing, by turns, with a part of the experts resident: over
the machine's own disk, and over an emulated link on which fetching all missing experts takes as long as this machine
needs to compute a piece of the usual length, as a GPU behind a slow link has it. A CPU computes prompts so slowly that
its disk hardly matters.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.generate import FULL, SMALL, checkpoint
from bench.prefill import pack_of
from bench.subject import subject
from core.engine import Engine
from core.session.settings_controller import SettingsController
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord

BUDGETS = ("50%", "25%")
LENGTHS = {False: (4000,), True: (1100, 1400)}  # tokens of a prompt; True: of the smoke test
COLUMNS = (  # key, form and unit
    ("pieces", "3.0f", 1.0),
    ("slots", "5.0f", 1.0),
    ("seconds", "6.2f", 1.0),
    ("waiting_s", "6.2f", 1.0),
    ("bytes", "6.2f", 1e9),
)
MODES = ("usual", "borrowed")


def run(
    rounds: int = 2, keep: Path | None = None, small: bool = False, say: Callable[[str], None] = print
) -> dict[str, object]:
    """Measures; returns the result as plain data. Without `keep` the files go to a temporary directory."""
    if keep is None:
        with tempfile.TemporaryDirectory() as made:
            return run(rounds, Path(made), small, say)
    lengths, rounds = LENGTHS[small], 1 if small else rounds
    model = checkpoint(keep, SMALL if small else FULL, say=say)
    settings = Settings({"budget": BUDGETS[0], "link": "own", "predictor": "none"})
    spec = LoadSpec.checked(str(pack_of(model, "bf16", say)), settings, context=max(lengths) + 64, host="none")
    engine = Engine.load(spec)
    try:
        usual = engine.sizes.chunk
        pace = usual / _read(engine, usual, 0)["seconds"]  # tokens a second
        found: dict[str, Any] = {}
        for budget in BUDGETS:
            engine.change({"budget": budget})
            missing = engine.sizes.blob * (engine.shape.total - engine.sizes.slots(engine.settings.cache.budget))
            gbps = missing / (usual / pace) / 1e9
            for link in ("own", "emulated"):
                engine.change({"link": link, **({"link_gbps": gbps} if link == "emulated" else {})})
                for length in lengths:
                    name = f"{budget}, {link}, {length}"
                    say(name)
                    found[name] = {**_row(engine, length, rounds), "link_gbps": gbps if link == "emulated" else None}
        return {**subject(engine), "found": found, "chunk": usual, "rounds": rounds, "lengths": list(lengths)}
    finally:
        engine.unload()


def _row(engine: Engine, length: int, rounds: int) -> dict[str, Any]:
    """Both ways by turns; medians of the rounds, and of their own ratios."""
    seen: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):  # the pace was a warm-up
        for mode in MODES:
            with nullcontext() if mode == "borrowed" else patch.object(SettingsController, "longer_piece", _none):
                seen[mode].append(_read(engine, length, number + 1))
    pairs = [*zip(seen["usual"], seen["borrowed"], strict=True)]
    return {
        **{mode: {key: median(one[key] for one in all_of) for key in all_of[0]} for mode, all_of in seen.items()},
        "seconds_ratio": median(borrowed["seconds"] / usual["seconds"] for usual, borrowed in pairs),
        "bytes_ratio": median(borrowed["bytes"] / max(1.0, usual["bytes"]) for usual, borrowed in pairs),
    }


def _none(*args: object) -> int:
    """In place of the length of a piece that would borrow memory: none does."""
    return 0


def _read(engine: Engine, length: int, seed: int) -> dict[str, float]:
    """A new prompt of random tokens, and the first token after it, which finds the slots given back."""
    ids = np.random.default_rng((seed, length)).integers(3, 4000, length).tolist()
    steps, began_s = dict[int, StepRecord](), time.perf_counter()
    for one in engine.generate(Ids(ids), Sampling(max_new_tokens=2, temperature=0.0)):
        if one.step is not None:
            steps[one.step.index] = one.step
    read = [one for one in steps.values() if one.phase == "prefill"]
    return {
        "seconds": time.perf_counter() - began_s,
        "waiting_s": sum(one.stall_ms for one in read) / 1e3,
        "bytes": float(sum(one.demand_bytes + one.prefetch_bytes for one in steps.values())),
        "pieces": float(len(read)),
        "slots": float(min(one.slots for one in read)),
    }


def table(found: Mapping[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"{found['model']}: pieces of {found['chunk']} tokens, and longer ones with memory borrowed from the slots",
        f"medians of {found['rounds']} rounds; usual > borrowed",
        "",
        f"  {'budget, link, tokens':24s} {'pieces':>10s} {'slots':>13s} {'seconds':>15s} {'waiting s':>15s} {'GB':>15s}"
        f" {'s ratio':>8s} {'GB ratio':>8s}",
    ]
    for name, row in found["found"].items():
        both = [
            f"{row['usual'][key] / scale:{form}} > {row['borrowed'][key] / scale:{form}}"
            for key, form, scale in COLUMNS
        ]
        lines.append(f"  {name:24s} {'  '.join(both)}  {row['seconds_ratio']:7.3f}  {row['bytes_ratio']:7.3f}")
    return "\n".join(lines)
