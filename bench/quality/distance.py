"""bench distance: how far the fast arithmetic is from the reference, by format.

Both read the same text with the same loaded weights, those outside the experts as in the checkpoint or in the same
format. The reference rounds states to the compute type after each operation, the fast arithmetic does not, so that much
of a distance may be the reference's own rounding. Where the model can be loaded in fp32 with the same experts, both are
compared with the reference there, too, and the fast arithmetic in fp32 as well: what that differs by is due to the
rounding of states to 8 bits alone. Distances are kept for later loads on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.harness.engines import model_of
from bench.harness.report import grid
from bench.harness.run import RESIDENT, Result, Run, Suite
from core.engine import Engine
from core.engine.arithmetic import Distance
from core.engine.distance import Read, divergence
from core.engine.passages import held_out, windows
from core.engine.quality.interval import share_of
from core.errors import ModelError
from core.measure.distance import measured, readers

FORMATS = "checkpoint,int8,int8-g32,int4-g32,int4-g32-sym,mxfp4"  # those that divide the demo model's sizes
BOUND = 0.002  # nats a token
FP32 = ("fp32 to fast", "to reference", "to fast fp32")  # KL
SETTINGS = {**RESIDENT, "predictor": "none"}


def measure(run: Run, model: str = "demo", formats: str = FORMATS, tokens: int = 1000) -> Result:
    name, found = model_of(run, model), list[dict[str, Any]]()
    for one in formats.split(","):
        for dense in dict.fromkeys(("checkpoint", one)):
            exact, in_fp32 = _exact(run, name, one, tokens) if dense == "checkpoint" else (None, None)
            try:
                with run.loaded(name, SETTINGS, arithmetic="fast", format=one, dense=dense) as engine:
                    row = {"format": one, "dense": dense, **engine.arithmetic.facts()}
                    if engine.arithmetic.fast:
                        row["distance"] = measured(engine, tokens).facts()
                        row["fp32"] = None
                        if exact is not None:
                            row["fp32"] = {**_beside(engine, exact, tokens), "both": in_fp32}
            except ModelError as error:
                row = {"format": one, "dense": dense, "fallback": str(error), "distance": None}
            found.append(row)
    return {"rows": found, "bound": BOUND}


def _exact(run: Run, model: str, form: str, tokens: int) -> tuple[torch.Tensor | None, float | None]:
    """Log-probabilities [n, V] of the reference in fp32, None where it cannot be loaded so; and the mean KL of the fast
    arithmetic in fp32 from it, None where that does not compute it."""
    try:
        with (
            run.loaded(model, SETTINGS, arithmetic="fast", dtype="float32", format=form) as engine,
            readers(engine) as (reference, fast),
        ):
            exact = _logprobs(engine, reference, tokens)
            if not engine.arithmetic.fast:
                return exact, None
            return exact, float(divergence(exact, _logprobs(engine, fast, tokens)).mean())
    except ModelError:
        return None, None


def _beside(engine: Engine, exact: torch.Tensor, tokens: int) -> dict[str, float]:
    """Mean KL from fp32, nats a token, of both arithmetics."""
    with readers(engine) as both:
        return {
            name: float(divergence(exact, _logprobs(engine, read, tokens)).mean())
            for name, read in zip(("reference", "fast"), both, strict=True)
        }


def _logprobs(engine: Engine, read: Read, tokens: int) -> torch.Tensor:
    pieces = windows(engine.prompt.tokenizer, engine.context, held_out(engine.model_name), tokens)
    return torch.cat([read(ids[:-1]).double().log_softmax(-1).float() for ids in pieces])


def table(f: Result) -> list[str]:
    rows = [_row(one, f["bound"]) for one in f["rows"]]
    heads = ("experts", "dense", "KL", "same token", "95 %", "perplexity", "reference's", *FP32, "")
    return [
        f"the fast arithmetic and the reference on {f['tokens']} tokens, KL in nats a token; {f['device']}",
        *grid(heads, rows),
        f"  bound: a KL of {f['bound']:g} in fp32, where that is computed, else from the reference",
    ]


def _row(one: dict[str, Any], bound: float) -> Sequence[str]:
    if one["distance"] is None:
        return (one["format"], one["dense"], *[""] * 8, f"not computed by it: {one['fallback']}")
    names = Distance.__dataclass_fields__
    distance = Distance(**{name: value for name, value in one["distance"].items() if name in names})
    share, both = share_of(distance.agreed, distance.tokens), one["fp32"]
    assert share is not None
    judged = distance.kl if both is None or both["both"] is None else both["both"]
    return (
        one["format"],
        one["dense"],
        f"{distance.kl:.5f}",
        f"{100 * share.value:.1f} %",
        f"{100 * share.low:.1f}-{100 * share.high:.1f}",
        f"{distance.perplexity:.2f}",
        f"{distance.reference_perplexity:.2f}",
        *(
            f"{both[name]:.5f}" if both is not None and both[name] is not None else ""
            for name in ("fast", "reference", "both")
        ),
        "within" if judged <= bound else "beyond",
    )


SUITE = Suite(measure, table, small={"formats": "int8", "tokens": 24})
