"""bench dispatch: the engine's own time for a layer, in microseconds, when nothing is copied and no expert computed.

Tiny models of ever more experts decode with everything resident, and with experts whose outputs are constants. A pass
in which the experts' place is taken by nothing is transformers' own share (`model`, of which `router`). What the MoE
step adds to it, and recording to that, are medians of the differences between passes that follow one another, one of
each kind. What is left to whoever reads a record, or is done for 64 passes at once where nobody does, is timed apart
(`reading`). What the model's own code for rotary embeddings adds (core.hf.rotary takes its place), and each predictor
to recording, are differences between medians of rounds. On a GPU these are times of the host, which has to launch a
layer's kernels meanwhile. Of the demo model, experts and all, a token is timed with its own code for rotary embeddings
and without.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace as replaced
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch

from bench.generate import Sizes, checkpoint
from core.engine import Engine
from core.hf.fast_rmsnorm import restore
from core.hf.rotary import OWN, replace
from core.runtime.batch import Batch, Share
from core.runtime.expert_math import ExpertMath
from core.runtime.moe_step import MoEStep
from core.runtime.pipeline import Pipeline
from core.session.manifest import device_name, versions
from core.session.wiring import Wiring
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.registry import variants

EXPERTS = (16, 64, 256)
LAYERS, TOP_K, HIDDEN = 16, 8, 64
GOALS = {"step": 25.0, "recording": 10.0}  # microseconds a layer
GROWTH = 1.25  # goal: the step with most experts over that with fewest


def run(
    rounds: int = 15, tokens: int = 24, small: bool = False, say: Callable[[str], None] = print
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = passes that each subject computes in a round."""
    rounds, tokens = (2, 4) if small else (rounds, tokens)
    found, device = {}, ""
    with tempfile.TemporaryDirectory() as folder:
        for experts in EXPERTS[: 2 if small else None]:
            say(f"{experts} experts")
            sizes = Sizes(f"dispatch-{experts}", HIDDEN, LAYERS, experts, TOP_K, 32, 2, 1, head_dim=32)
            path = checkpoint(Path(folder), sizes)
            settings = Settings({"budget": "all", "link": "own", "predictor": "none"})
            engine = Engine.load(LoadSpec.checked(str(path), settings, context=512))
            try:
                found[str(experts)] = _measured(engine, rounds, tokens)
                device = device_name(engine.device)
            finally:
                engine.unload()
    say("the demo model")
    demo = _demo(rounds, tokens)
    steps = [one["step"] for one in found.values()]
    return {
        "layers": LAYERS,
        "top_k": TOP_K,
        "rounds": rounds,
        "tokens": tokens,
        "experts": found,
        "demo": demo,
        "growth": steps[-1] / steps[0],
        "goals": GOALS,
        "growth_goal": GROWTH,
        "threads": torch.get_num_threads(),
        "device": device,
        "versions": versions(),
    }


def _measured(engine: Engine, rounds: int, tokens: int) -> dict[str, Any]:
    """Microseconds a layer, medians over all rounds."""
    wiring, seen = engine.wiring, dict[str, list[float]]()
    names = [v.name for v in variants("predictor") if not v.needs and getattr(v.make, "looks", True)]
    with _stubbed(wiring.math):
        for number in range(rounds + 1):  # round 0 is warm-up and discarded
            figures = dict[str, list[float]]()
            (figures["alone"],) = _passes(wiring, [_through(wiring)], tokens)
            with own_rotation(wiring.loaded.model):
                (figures["own rotation"],) = _passes(wiring, [_through(wiring)], tokens)
            with _timed([site.router for site in wiring.loaded.sites]) as spans:
                _passes(wiring, [_through(wiring)], tokens)
            figures["router"] = [sum(spans) / tokens]
            engine.change({"predictor": "none"})
            wiring.controller.apply(wiring.parts)
            wiring.parts.telemetry.activations()  # reads what the rounds before recorded
            model, step, none = _passes(wiring, [_through(wiring), wiring.measuring, wiring.answering], tokens)
            figures |= {"model": model, "none": none, "reading": [_reading(wiring) / (tokens + 1)]}
            for name, more, less in (("step", step, model), ("recording", none, step)):
                figures[name] = [a - b for a, b in zip(more, less, strict=True)]
            for name in names:
                engine.change({"predictor": name})
                wiring.controller.apply(wiring.parts)
                (figures[name],) = _passes(wiring, [wiring.answering], tokens)
            for name, seconds in figures.items() if number else ():
                seen.setdefault(name, []).extend(seconds)
    engine.change({"predictor": "none"})
    us = {name: 1e6 * statistics.median(seconds) / LAYERS for name, seconds in seen.items()}
    return {
        "model": us["model"],
        "own_rotation": us["own rotation"] - us["alone"],
        "router": us["router"],
        "step": us["step"],
        "recording": us["recording"],
        "reading": us["reading"],
        "predictors": {name: us[name] - us["none"] for name in names},
    }


def _demo(rounds: int, tokens: int) -> dict[str, float]:
    """Microseconds a token of the bundled model with everything resident, medians over all rounds."""
    settings = Settings({"budget": "all", "link": "own", "predictor": "none"})
    engine, ours, own = Engine.load(LoadSpec.checked("demo", settings, context=512)), list[float](), list[float]()
    try:
        wiring = engine.wiring
        for number in range(rounds + 1):  # round 0 is warm-up and discarded
            (seconds,) = _passes(wiring, [wiring.measuring], tokens)
            with own_rotation(wiring.loaded.model):
                (seconds_own,) = _passes(wiring, [wiring.measuring], tokens)
            if number:
                ours += seconds
                own += seconds_own
    finally:
        engine.unload()
    return {"token_us": 1e6 * statistics.median(ours), "own_rotation_us": 1e6 * statistics.median(own)}


@torch.inference_mode()
def _passes(wiring: Wiring, pipelines: Sequence[Pipeline], tokens: int) -> list[list[float]]:
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
    """Experts that give back what they get, in the place of a step."""

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


def _through(wiring: Wiring) -> Pipeline:
    """Passes in which experts give back what they get."""
    measuring = wiring.measuring
    step = cast(MoEStep, _NoStep(measuring.step))  # which has all that a pass needs of one
    return Pipeline(measuring.hooked, step, measuring.threads)


@contextmanager
def own_rotation(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model's own code rotates queries and keys."""
    restore([module for module in model.modules() if isinstance(vars(module).get(OWN), MethodType)])
    try:
        yield
    finally:
        replace(model)


@contextmanager
def _stubbed(math: Sequence[ExpertMath]) -> Iterator[None]:
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

    handles = [module.register_forward_pre_hook(before) for module in modules]
    handles += [module.register_forward_hook(after) for module in modules]
    try:
        yield spans
    finally:
        for handle in handles:
            handle.remove()


def table(found: Mapping[str, Any]) -> str:
    """The result as text."""
    f = found
    predictors = list(next(iter(f["experts"].values()))["predictors"])
    lines = [
        f"microseconds a layer of {f['layers']}, top {f['top_k']}, experts not computed; {f['device']}",
        "  experts  model  of it router  own rotation  MoE step  recording  reading  " + "  ".join(predictors),
    ]
    for experts, one in f["experts"].items():
        added = "  ".join(f"{one['predictors'][name]:{len(name)}.1f}" for name in predictors)
        lines.append(
            f"  {experts:>7s} {one['model']:6.1f} {one['router']:13.1f} {one['own_rotation']:13.1f} {one['step']:9.1f} "
            f"{one['recording']:10.1f} {one['reading']:8.1f}  {added}"
        )
    demo = f["demo"]
    lines.append(
        f"  the demo model: {demo['token_us']:.0f} a token, {demo['own_rotation_us']:.0f} with its own rotation "
        f"({demo['token_us'] / demo['own_rotation_us']:.3f})"
    )
    lines.append(
        f"  goals: MoE step {f['goals']['step']:g}, recording {f['goals']['recording']:g}; the step with most experts "
        f"over that with fewest: {f['growth']:.2f} (goal {f['growth_goal']:g})"
    )
    return "\n".join(lines)
