"""bench distance: how far the fast arithmetic is from the reference, by format.

Both read the same text with the same loaded weights, those outside the experts as in the checkpoint or in the same
format. The reference rounds states to the compute type after each operation, the fast arithmetic does not, so that much
of a distance may be the reference's own rounding. Where the model can be loaded in fp32 with the same experts, both are
compared with the reference there, too, and the fast arithmetic in fp32 as well: what that differs by is due to the
rounding of states to 8 bits alone. Distances are kept for later loads on this machine."""

from collections.abc import Sequence
from typing import Any

import torch

from bench.harness.engines import model_of
from bench.harness.run import RESIDENT, Result, Run, Suite
from core.engine import Engine
from core.engine.arithmetic import BOUND, ROUNDING_BF16, objection
from core.engine.distance import Read, divergence
from core.engine.passages import held_out, windows
from core.errors import ModelError
from core.measure.distance import measured, readers
from core.system.wording import grid

FORMATS = "checkpoint,int8,int8-g32,int4-g32,int4-g32-sym,mxfp4,nvfp4"  # those that divide the demo model's sizes
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
                        distance = measured(engine, tokens)
                        row["distance"] = distance.facts()
                        row["objection"] = objection(distance, engine.loaded.plan.compute_type)
                        row["fp32"] = None
                        if exact is not None:
                            row["fp32"] = {**_beside(engine, exact, tokens), "both": in_fp32}
            except ModelError as error:
                row = {"format": one, "dense": dense, "fallback": str(error), "distance": None}
            found.append(row)
    return {"rows": found}


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
    heads = ("experts", "dense", "KL", "up to", "same token", "95 %", "perplexity", "reference's", *FP32, "auto")
    return [
        f"the fast arithmetic and the reference on {f['tokens']} tokens, KL in nats a token; {f['device']}",
        *grid(heads, [_row(one) for one in f["rows"]]),
        f"  (up to: the end of the 95 % interval; auto takes fast where that is within {BOUND:g}, in bfloat16 "
        f"{BOUND + ROUNDING_BF16:g})",
    ]


def _row(one: dict[str, Any]) -> Sequence[str]:
    found, fp32 = one["distance"], one.get("fp32") or {}
    if found is None:
        return (one["format"], one["dense"], *[""] * 9, f"the reference: {one['fallback']}")
    return (
        one["format"],
        one["dense"],
        f"{found['kl']:.5f}",
        f"{found['kl_high']:.5f}",
        f"{100 * found['agreement']:.1f} %",
        f"{100 * found['agreement_low']:.1f}-{100 * found['agreement_high']:.1f}",
        f"{found['perplexity']:.2f}",
        f"{found['reference_perplexity']:.2f}",
        *("" if (kl := fp32.get(name)) is None else f"{kl:.5f}" for name in ("fast", "reference", "both")),
        "the reference" if one["objection"] else "fast",
    )


SUITE = Suite(measure, table, small={"formats": "int8", "tokens": 24})
