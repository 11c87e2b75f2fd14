"""bench kinds: how fast a token and a prompt are with each kind of layer between experts, in both arithmetics and by
transformers.

Small generated models with everything resident; every round runs each subject once on the same prompt. Experts of so
few and small matrices take a small part of the time: what is compared is what lies between them.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.harness.engines import random_tokens, stats_of
from bench.harness.paired import times
from bench.harness.report import cell, grid, interval
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.models.kinds import KINDS, checkpoint_of
from bench.speed.plain import Plain
from core.engine import Engine

SETTINGS = {**RESIDENT, "predictor": "none"}
OURS, THEIRS = ("fast", "reference"), "transformers"


class Seen(NamedTuple):
    """One round of one subject."""

    decode_ms: float  # of a token, the median
    prompt_tps: float


def measure(run: Run, rounds: int = 5, tokens: int = 32, lengths: str = "512") -> Result:
    """`tokens` = decode passes a round; `lengths`: tokens of the prompt."""
    length, folder = int(lengths), run.folder()
    found = {}
    for kind in KINDS:
        path = checkpoint_of(kind, folder, run.small, run.say)
        plain = Plain(path, torch.bfloat16, torch.device("cpu"))
        engines = {
            name: run.engine(str(path), SETTINGS, endless=True, arithmetic=name, context=2 * length + tokens)
            for name in OURS
        }

        def one(name: str, number: int, plain: Plain = plain, engines: dict[str, Engine] = engines) -> Seen:
            ids = random_tokens(length, number)
            if name in engines:
                return _ours(engines[name], ids, tokens)
            seconds, _ = plain.prefill(ids, run.threads)
            passes = plain.decode(ids, tokens, "grouped_mm", run.threads)
            return Seen(median(passes), length / seconds)

        seen = run.by_turns([*OURS, THEIRS], one, rounds, what=kind)
        found[kind] = {
            "model_type": KINDS[kind][0],
            "fallback": engines["fast"].arithmetic.fallback,
            "decode_ms": {name: median(one.decode_ms for one in of) for name, of in seen.items()},
            "prompt_tps": {name: median(one.prompt_tps for one in of) for name, of in seen.items()},
            "faster": {
                f"{what} than {name}": _times(seen["fast"], seen[name], what)._asdict()
                for what in ("decode", "prompt")
                for name in ("reference", THEIRS)
            },
        }
        for engine in engines.values():
            engine.unload()
    return {"kinds": found}


def _ours(engine: Engine, ids: Sequence[int], tokens: int) -> Seen:
    stats = stats_of(engine, ids, tokens + 1)
    return Seen(stats.tpot_ms, 1e3 * len(ids) / stats.ttft_ms)


def _times(fast: Sequence[Seen], other: Sequence[Seen], what: str) -> Any:
    if what == "decode":
        return times([one.decode_ms for one in other], [one.decode_ms for one in fast])
    return times([one.prompt_tps for one in fast], [one.prompt_tps for one in other])


def table(r: Result) -> list[str]:
    rows, fallen = [], []
    for kind, one in r["kinds"].items():
        for what, unit, figures in (("decode", "ms", one["decode_ms"]), ("prompt", "tok/s", one["prompt_tps"])):
            over = [interval(one["faster"][f"{what} than {name}"]) for name in ("reference", THEIRS)]
            name, shown = f"{kind} ({one['model_type']})", [cell(figures[name], ".2f") for name in (*OURS, THEIRS)]
            rows.append((name, f"{what}, {unit}", *shown, *over))
        if one["fallback"]:
            fallen.append(f"  {kind}: the reference computed: {one['fallback']}")
    heads = "between experts", "", *OURS, THEIRS, "fast / reference", f"fast / {THEIRS}"
    return [f"Everything resident, bf16, prompts of {r['lengths']} tokens (medians):", *grid(heads, rows), *fallen]


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 4, "lengths": "24"})
