"""bench pieces: what does a long prompt save by borrowing memory from the slots, so as to be read in fewer pieces?

One engine reads the same new prompts with and without borrowing, with a part of the experts resident: from the
machine's own disk, and over an emulated link on which fetching all missing experts takes as long as this machine needs
to compute a piece of the usual length, as a GPU behind a slow link has it. A CPU computes prompts so slowly that its
disk hardly matters.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

from bench.harness.engines import model_of, pack_of, random_tokens
from bench.harness.figures import medians, ratio
from bench.harness.report import grid
from bench.harness.run import Result, Run, Suite
from bench.models.fixtures import FORMATS
from bench.models.sizes import GENERATED
from core.engine import Engine
from core.engine.settings_controller import SettingsController
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord

BUDGETS = ("50%", "25%")
LENGTHS = {False: (4000,), True: (1100, 1400)}  # tokens of a prompt; True: of the smoke test
COLUMNS = {  # figure -> head, form and unit
    "pieces": ("pieces", ".0f", 1.0),
    "slots": ("slots", ".0f", 1.0),
    "seconds": ("seconds", ".2f", 1.0),
    "waiting_s": ("waiting s", ".2f", 1.0),
    "bytes": ("GB", ".2f", 1e9),
}
MODES = ("usual", "borrowed")


def measure(run: Run, rounds: int = 2) -> Result:
    lengths = LENGTHS[run.small]
    pack = pack_of(run, model_of(run, GENERATED), "bf16", format=FORMATS["bf16"])
    settings = {"budget": BUDGETS[0], "link": "own", "predictor": "none"}
    engine = run.engine(str(pack), settings, context=max(lengths) + 64, host="none")
    usual = engine.sizes.chunk
    piece_s, found = _read(engine, usual, 0)["seconds"], dict[str, Any]()
    for budget in BUDGETS:
        engine.change({"budget": budget})
        missing = engine.sizes.blob * (engine.shape.total - engine.sizes.slots(engine.settings.cache.budget))
        gbps = missing / piece_s / 1e9
        for link, speed in (("own", None), ("emulated", gbps)):
            engine.change({"link": link, **({"link_gbps": speed} if speed else {})})
            for length in lengths:

                def one(mode: str, number: int, length: int = length) -> dict[str, float]:
                    if mode == "borrowed":
                        return _read(engine, length, number)
                    with patch.object(SettingsController, "max_prefill_chunk", lambda *_: 0):  # none is longer
                        return _read(engine, length, number)

                name = f"{budget}, {link}, {length}"
                seen = run.by_turns([*MODES], one, rounds, warm=False, what=name)  # the piece was a warm-up
                pair = {key: [[row[key] for row in seen[mode]] for mode in ("borrowed", "usual")] for key in COLUMNS}
                found[name] = {
                    **{mode: medians(rows) for mode, rows in seen.items()},
                    "seconds_ratio": ratio(*pair["seconds"]),
                    "bytes_ratio": ratio(*pair["bytes"]),
                    "link_gbps": speed,
                }
    return {"found": found, "chunk": usual, "lengths": list(lengths)}


def _read(engine: Engine, length: int, seed: int) -> dict[str, float]:
    """A new prompt of random tokens, and the first token after it, by which time the slots are given back."""
    steps, began_s = dict[int, StepRecord](), time.perf_counter()
    for one in engine.generate(Ids(random_tokens(length, seed, length)), Sampling(max_new_tokens=2, temperature=0.0)):
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


def table(r: Result) -> list[str]:
    heads = [head for head, _, _ in COLUMNS.values()]
    rows = [
        (
            name,
            *(
                " > ".join(format(row[mode][key] / unit, form) for mode in MODES)
                for key, (_, form, unit) in COLUMNS.items()
            ),
            f"{row['seconds_ratio']:.3f}",
            f"{row['bytes_ratio']:.3f}",
        )
        for name, row in r["found"].items()
    ]
    return [
        f"{r['model']}: pieces of {r['chunk']} tokens, and longer ones with memory borrowed from the slots; medians of "
        f"{r['rounds']} rounds; usual > borrowed",
        *grid(("budget, link, tokens", *heads, "s ratio", "GB ratio"), rows),
    ]


SUITE = Suite(measure, table, small={"rounds": 1})
