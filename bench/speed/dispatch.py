"""bench dispatch: the engine's own time for a layer, in microseconds, when nothing is copied and no expert computed.

Tiny models of ever more experts decode with everything resident, and with experts whose outputs are constants. A pass
whose experts are replaced by nothing is transformers' own share (`model`, of which `router`). What the MoE step adds to
it, and recording to that, are medians of the differences between passes that follow one another, one of each kind. What
is left to the reader of a record, or is done for 64 passes at once where nothing reads it, is timed apart (`reading`).
What each predictor adds to recording are differences between medians of rounds. `program` is a whole layer of an
answer's token in the fast arithmetic, tiny experts and recording included, where it knows the model. On a GPU these are
times of the host, which launches a layer's kernels."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace as replaced
from statistics import median
from typing import Any, cast

import torch

from bench.harness.figures import differences
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.models.generate import checkpoint
from bench.models.sizes import Sizes
from core.engine import Engine
from core.engine.wiring import Wiring
from core.runtime.batch import Batch, Share
from core.runtime.expert_math import ExpertMath
from core.runtime.moe_step import MoEStep
from core.runtime.pipeline import Pipeline
from core.settings.registry import variants
from core.system.wording import cells, grid

EXPERTS = (16, 64, 256)
LAYERS, TOP_K, HIDDEN = 16, 8, 64
GOALS = {"step": 25.0, "recording": 10.0, "program": 40.0}  # microseconds a layer
GROWTH = 1.25  # goal: the step with most experts over that with fewest
SETTINGS = {**RESIDENT, "predictor": "none"}
COLUMNS = {
    "model": "model",
    "router": "of it router",
    "step": "MoE step",
    "recording": "recording",
    "reading": "reading",
    "program": "program",
}


def measure(run: Run, rounds: int = 15, tokens: int = 24) -> Result:
    """`tokens` = passes that each subject computes in a round."""
    found, folder = dict[str, Any](), run.folder(stays=False)
    for experts in EXPERTS[: 2 if run.small else None]:
        sizes = Sizes(f"dispatch-{experts}", HIDDEN, LAYERS, experts, TOP_K, 32, 2, 1, head_dim=32)
        model = str(checkpoint(folder, sizes))
        with run.loaded(model, SETTINGS, arithmetic="reference", context=512) as engine:
            found[str(experts)] = _measured(run, engine, rounds, tokens)
        with run.loaded(model, SETTINGS, arithmetic="fast", context=512) as engine:
            found[str(experts)]["program"] = _program(run, engine, rounds, tokens)
    steps = [one["step"] for one in found.values()]
    return {
        "layers": LAYERS,
        "top_k": TOP_K,
        "experts": found,
        "growth": steps[-1] / steps[0],
        "goals": GOALS,
        "growth_goal": GROWTH,
    }


def _measured(run: Run, engine: Engine, rounds: int, tokens: int) -> dict[str, Any]:
    """Microseconds a layer, medians over all rounds."""
    wiring, seen = engine.wiring, dict[str, list[float]]()
    names = [v.name for v in variants("predictor") if not v.needs and getattr(v.make, "looks", True)]
    with stubbed(wiring.math):
        for number in run.rounds(rounds):
            figures = dict[str, list[float]]()
            with _timed([site.router for site in wiring.loaded.sites]) as spans:
                passes(wiring, [without_step(wiring)], tokens)
            figures["router"] = [sum(spans) / tokens]
            _use(engine, "none")
            wiring.parts.telemetry.activations()  # reads what the rounds before recorded
            model, step, none = passes(wiring, [without_step(wiring), wiring.measuring, wiring.answering], tokens)
            figures |= {"model": model, "none": none, "reading": [_reading(wiring) / (tokens + 1)]}
            figures |= {"step": differences(step, model), "recording": differences(none, step)}
            for name in names:
                _use(engine, name)
                (figures[name],) = passes(wiring, [wiring.answering], tokens)
            for name, seconds in figures.items() if number else ():
                seen.setdefault(name, []).extend(seconds)
    us = {name: 1e6 * median(seconds) / LAYERS for name, seconds in seen.items()}
    return {
        **{name: us[name] for name in COLUMNS if name in us},
        "predictors": {name: us[name] - us["none"] for name in names},
    }


def _program(run: Run, engine: Engine, rounds: int, tokens: int) -> float | None:
    """Microseconds a layer of an answer's token in the fast arithmetic; None where the reference computes."""
    if not engine.arithmetic.fast:
        return None
    seconds = [passes(engine.wiring, [engine.wiring.answering], tokens)[0] for _ in run.rounds(rounds)]
    return 1e6 * median([one for each in seconds[1:] for one in each]) / LAYERS


def _use(engine: Engine, predictor: str) -> None:
    engine.change({"predictor": predictor})
    engine.wiring.controller.apply(engine.wiring.parts)


@torch.inference_mode()
def passes(wiring: Wiring, pipelines: Sequence[Pipeline], tokens: int) -> list[list[float]]:
    """Seconds of each of `tokens` decoding passes of each pipeline, which take turns; the pipeline of answers records
    them, as an answer does."""
    kv, parts, spans = wiring.kv.fresh(), wiring.parts, [list[float]() for _ in pipelines]
    for at in range(tokens + 1):  # the first is discarded
        for pipeline, found in zip(pipelines, spans, strict=True):
            began_s = time.perf_counter()
            batch = Batch("decode", (Share([3 + at], kv),))
            pipeline.begin(batch)
            pipeline.forward(batch)
            if pipeline is wiring.answering:
                model_s, ledger = time.perf_counter() - began_s, parts.memory.ledger
                used = ledger.passed(decoded=True)
                parts.telemetry.add(parts.recorder.end(began_s, model_s, used, ledger.budget_bytes, {}))
            if wiring.loaded.device.type == "cuda":
                torch.cuda.synchronize(wiring.loaded.device)
            found.append(time.perf_counter() - began_s)
    for pipeline in pipelines:
        pipeline.end()
    return [found[1:] for found in spans]


class _NoStep:
    """Experts that return their input, in the place of a step."""

    prefetcher = None

    def __init__(self, step: MoEStep) -> None:
        self.expert_cache, self.sink = step.expert_cache, step.sink

    def begin(self, batch: Batch) -> None: ...
    def end(self) -> None: ...

    def __call__(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden


def _reading(wiring: Wiring) -> float:
    """Seconds that it takes to read the records of the last passes, and to count them."""
    began_s = time.perf_counter()
    wiring.parts.telemetry.activations()
    return time.perf_counter() - began_s


def without_step(wiring: Wiring) -> Pipeline:
    """Passes in which experts return their input."""
    measuring = wiring.measuring
    step = cast(MoEStep, _NoStep(measuring.step))  # which has all that a pass needs of one
    return Pipeline(measuring.hooked, step, measuring.threads)


@contextmanager
def stubbed(math: Sequence[ExpertMath]) -> Iterator[None]:
    """Inside, a token's experts are not computed."""
    own = [one.token for one in math]
    for one in math:
        one.token = replaced(one.token, multiply=lambda slots, x, counts=None, places=None: x)
        vars(one)["combine"] = lambda out, weights, dtype, tap=None: out
    try:
        yield
    finally:
        for one, token in zip(math, own, strict=True):
            one.token = token
            del vars(one)["combine"]


@contextmanager
def _timed(modules: Sequence[torch.nn.Module]) -> Iterator[list[float]]:
    """Inside, the seconds that calls of these modules take are appended to what this gives."""
    spans, began_s = list[float](), [0.0]

    def before(*_: Any) -> None:
        began_s[0] = time.perf_counter()

    def after(*_: Any) -> None:
        spans.append(time.perf_counter() - began_s[0])

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(before))
            hooks.enter_context(module.register_forward_hook(after))
        yield spans


def table(f: Result) -> list[str]:
    predictors = list(next(iter(f["experts"].values()))["predictors"])
    rows = [
        (experts, *cells(one, dict.fromkeys(COLUMNS, ".1f")), *(f"{one['predictors'][p]:.1f}" for p in predictors))
        for experts, one in f["experts"].items()
    ]
    return [
        f"microseconds a layer of {f['layers']}, top {f['top_k']}, experts not computed; {f['device']}",
        *grid(("experts", *COLUMNS.values(), *predictors), rows),
        f"  goals: MoE step {f['goals']['step']:g}, recording {f['goals']['recording']:g}, program "
        f"{f['goals']['program']:g}; the step with most "
        f"experts over that with fewest: {f['growth']:.2f} (goal {f['growth_goal']:g})",
    ]


SUITE = Suite(measure, table, small={"rounds": 2, "tokens": 4})
