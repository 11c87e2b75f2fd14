"""Decides at load whether the fast arithmetic computes a model, or its experts alone: its program is tried against the
model's own modules, and where the setting is `auto` the distance from the reference is measured, once. The cache has to
be filled."""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from core.engine.arithmetic import Distance, keep, known, objection
from core.engine.distance import PIECES, distance_of, never, read, within
from core.engine.loading import LoadedModel, Progress
from core.engine.pass_wiring import PassWiring, reference_passes
from core.engine.passages import WINDOW, held_out, windows
from core.runtime.kv_cache import KVCache
from core.runtime.moe_step import MoEStep
from core.runtime.pipeline import HookedModel, Pipeline, Stop
from core.runtime.product_trials import make_math
from core.runtime.warmup import Threads

log = logging.getLogger("moestro.load")

TRIED = 12  # random tokens of the program's trial
CLOSE, CLOSE_FP32 = 0.1, 0.01  # median distance of their logits from the modules'; measured: .005 to .03, and 1e-6
WHOLLY = "This model is computed in the reference arithmetic: %s."
PARTLY = "Of this model the experts alone are computed in the fast arithmetic: %s."
MEASURING = "Measuring how far the fast arithmetic is from the reference (once)"


def decided(
    passes: PassWiring, loaded: LoadedModel, kv: KVCache, progress: Progress, cancel: threading.Event | None
) -> PassWiring:
    """The wiring in the arithmetic that computes, with the reason where that is the reference and was not chosen.
    Raises Cancelled."""
    auto = loaded.plan.spec.arithmetic == "auto"
    if passes.hooked.program is not None:
        passes = _tried(passes, loaded, kv)
    if auto and passes.hooked.fast_experts and known(loaded.plan, loaded.model_hash) is None:
        stop = never if cancel is None else cancel.is_set
        found = _measured(passes, loaded, kv, progress, stop)
        log.info("The fast arithmetic's distance from the reference: %s.", found)
        keep(loaded.plan, loaded.model_hash, found)
        if why := objection(found, loaded.plan.compute_type):
            passes = _by_reference(passes, loaded, why)
    if passes.hooked.fallback:
        level, what = logging.INFO if auto else logging.WARNING, PARTLY if passes.hooked.fast_experts else WHOLLY
        log.log(level, what, passes.hooked.fallback)
    return passes


def _tried(passes: PassWiring, loaded: LoadedModel, kv: KVCache) -> PassWiring:
    """The wiring after a trial of its program: logits of a short text against those of the model's own modules, with
    experts in the fast arithmetic in both. Where they differ by more than rounding, all but these is computed by the
    modules."""
    hooked, plan = passes.hooked, loaded.plan
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(plan.outline.vocab, (min(TRIED, plan.context - 1),), generator=draw).tolist()
    found, wanted = (
        _logits(one, passes.measured, tokens, kv).float() for one in (hooked, replace(hooked, program=None))
    )
    off = float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())
    if off < (CLOSE_FP32 if plan.dtype == torch.float32 else CLOSE):
        return passes
    why = f"its logits differ from those of the model's own modules by {off:.2g} of their size"
    return replace(passes, hooked=replace(hooked, program=None, fallback=why))


def _measured(passes: PassWiring, loaded: LoadedModel, kv: KVCache, progress: Progress, stop: Stop) -> Distance:
    """The distance of the fast arithmetic from the reference, in bounded time."""
    plan = loaded.plan
    pieces = windows(loaded.prompt.tokenizer, plan.context, held_out(plan.spec.model), PIECES * WINDOW)
    both = (
        reference_passes(loaded, passes.hooked, passes.measured),
        Pipeline(passes.hooked, passes.measured, Threads(own=passes.hooked.program is not None)),
    )
    chunk = loaded.sizes.chunk if loaded.sizes.carried else plan.context

    def shown() -> Iterator[Sequence[int]]:
        for at, ids in enumerate(within(pieces)):
            progress(MEASURING, at / len(pieces))
            yield ids

    try:
        found = distance_of(shown(), *(partial(read, one, kv, chunk=chunk, stop=stop) for one in both))
        passes.expert_cache.start_over()
        return found
    finally:
        for one in both:
            one.end()


def _by_reference(passes: PassWiring, loaded: LoadedModel, fallback: str) -> PassWiring:
    """The wiring in the reference arithmetic, and why."""
    passes.math[:] = make_math([site.module for site in loaded.cached_sites], loaded.plan.codecs)  # of every step
    passes.choose(loaded)
    return replace(passes, hooked=replace(passes.hooked, program=None, fast_experts=False, fallback=fallback))


def _logits(hooked: HookedModel, step: MoEStep, tokens: Sequence[int], kv: KVCache) -> torch.Tensor:
    """[T, V] of a text."""
    pipeline = Pipeline(hooked, step, Threads())
    try:
        return read(pipeline, kv, tokens, len(tokens))
    finally:
        pipeline.end()
