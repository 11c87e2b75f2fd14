"""Wires what passes over a loaded model need: a cache, the experts' arithmetic, and the hooks in the model.

On a GPU, what a load takes is measured before the slots are filled: by a prompt and a token, with few slots. These
passes allocate the KV cache and what products need for themselves, and compile the kernels, so that no answer waits for
that and the budget is held against what torch reserves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from core.cache.copies import CacheMemory
from core.cache.expert_cache import ExpertCache
from core.capacity.free_memory import free_bytes
from core.capacity.sizes import PREFILL_CHUNK, Sizes
from core.engine.arithmetic import known, objection
from core.engine.loading import LoadedModel
from core.errors import BudgetError, ModelError
from core.hf.hooks import Installed, install
from core.hf.packed_texts import packing_of
from core.hf.quantized_linear import coded_layers
from core.memory.arena import Arena
from core.memory.transfer import TransferEngine
from core.policy.allocation.slot_allocation import Placement
from core.policy.eviction import policy_maker
from core.runtime.batch import Batch, Share
from core.runtime.expert_math import ExpertMath
from core.runtime.kv_cache import KVCache
from core.runtime.moe_step import MoEStep
from core.runtime.out_of_memory import shortage
from core.runtime.pipeline import HookedModel, Pipeline, StepDispatch
from core.runtime.product_trials import choose_products, make_math
from core.runtime.program.bind import bind
from core.runtime.program.experts import ExpertKernels, FastMath, for_each
from core.runtime.program.gpu.launching import launcher_for
from core.runtime.program.gpu.program import GpuProgram
from core.runtime.program.gpu.rows import GpuMath, gpu_experts
from core.runtime.program.program import Program
from core.runtime.step_sink import NullSink
from core.runtime.warmup import Threads

UNTRIED = "the fast arithmetic has not run on a GPU yet, so that it has to be chosen by name there"
REST = 20 << 20  # bytes: a segment of torch's allocator that is used in part


@dataclass(frozen=True, slots=True)
class PassWiring:
    """What every pipeline over a loaded model shares. `measured` is the step of passes that are exact and not
    recorded."""

    arena: Arena
    expert_cache: ExpertCache
    math: list[ExpertMath]
    hooked: HookedModel
    measured: MoEStep
    installed: Installed  # the hooks, as a context manager

    def fill(self, loaded: LoadedModel) -> None:
        """Fill the cache, and choose with its slots how experts are computed."""
        self.expert_cache.fill()
        self.choose(loaded)

    def choose(self, loaded: LoadedModel) -> None:
        """Try, with slots that are filled, how this machine computes fastest."""
        choose_products(self.math, lambda layer: self.expert_cache.sample(layer, loaded.shape.top_k), loaded.plan.dtype)


def wire_passes(
    loaded: LoadedModel, transfers: TransferEngine, slots: int, placed: Placement | None = None
) -> PassWiring:
    """An empty cache of so many slots, divided as `placed` says or evenly, and what computes with it. The experts of
    the model are computed by `measured` until another step is the usual one. Raises BudgetError."""
    plan, settings, shape = loaded.plan, loaded.plan.spec.settings.cache, loaded.shape
    arena, blocks = Arena(plan.codecs, loaded.device, placed is not None and plan.paged), plan.codecs.blocks
    if placed is None:
        placed = Placement.even(shape.cached_layers, shape.experts, shape.top_k, settings.scope)
        if blocks > 1:
            placed = replace(placed, transit=shape.top_k, blocks=blocks, tops=(blocks,) * shape.layers)
    expert_cache = ExpertCache(
        placed, slots, policy_maker(settings.eviction), CacheMemory(arena, loaded.store, transfers)
    )
    modules = [site.module for site in loaded.cached_sites]
    program, math, fallback = _arithmetic(loaded, modules)
    fast = isinstance(math[0], (FastMath, GpuMath))
    measured = MoEStep(math, expert_cache, transfers, NullSink(expert_cache, transfers))
    dispatch = StepDispatch(measured)
    packing = packing_of(loaded.model, modules[: shape.layers])
    coded = coded_layers(loaded.model)
    hooked = HookedModel(loaded.model, loaded.device, dispatch, packing, program, fast, fallback, coded)
    installed = install(loaded.model, loaded.cached_sites, dispatch)
    return PassWiring(arena, expert_cache, math, hooked, measured, installed)


def _arithmetic(
    loaded: LoadedModel, modules: Sequence[Any]
) -> tuple[Program | GpuProgram | None, list[ExpertMath], str]:
    """What computes passes and experts in the arithmetic that was chosen, or in the reference one and why, where the
    fast one does not know the model, or is known to be too far from it for `auto`. It may know the experts alone: then
    there is no program."""
    plan, fallback = loaded.plan, ""
    if plan.spec.arithmetic == "auto":
        distance = known(plan, loaded.model_hash)
        fallback = (
            UNTRIED if loaded.device.type == "cuda" else objection(distance, plan.compute_type) if distance else ""
        )
    if plan.spec.arithmetic != "reference" and not fallback:
        try:
            experts, program = (_on_gpu if loaded.device.type == "cuda" else _on_cpu)(loaded, modules)
        except ModelError as error:
            fallback = str(error)
        else:
            try:
                return program(), experts, ""
            except ModelError as error:
                return None, experts, str(error)
    return None, make_math(modules, plan.codecs), fallback


Made = tuple[list[ExpertMath], Callable[[], Program | GpuProgram]]
"""What computes experts in the fast arithmetic, and what makes the program around them: both raise ModelError."""


def _on_cpu(loaded: LoadedModel, modules: Sequence[Any]) -> Made:
    plan = loaded.plan
    kernels = [*for_each(modules, plan.codecs, ExpertKernels)]
    of = zip(modules, plan.codecs, kernels, strict=True)
    experts: list[ExpertMath] = [FastMath(*one) for one in of]
    return experts, lambda: Program(bind(loaded.model, loaded.sites, plan.context), kernels)


def _on_gpu(loaded: LoadedModel, modules: Sequence[Any]) -> Made:
    plan, device = loaded.plan, loaded.device
    launcher = launcher_for(device)
    kernels = [*for_each(modules, plan.codecs, lambda module, codec: gpu_experts(module, codec, launcher))]
    of = zip(modules, plan.codecs, kernels, strict=True)
    experts: list[ExpertMath] = [GpuMath(*one) for one in of]
    return experts, lambda: GpuProgram(loaded.model, loaded.sites, plan.context, device, launcher, kernels)


def reference_passes(loaded: LoadedModel, hooked: HookedModel, step: MoEStep) -> Pipeline:
    """Passes of the exact model by transformers' modules and products, whatever computes otherwise; over the cache of
    `step`, which is filled. Their caller holds the model."""
    cache, transfers = step.expert_cache, step.transfers
    math = make_math([site.module for site in loaded.cached_sites], loaded.plan.codecs)
    choose_products(math, lambda layer: cache.sample(layer, loaded.shape.top_k), loaded.plan.dtype)
    plain = MoEStep(math, cache, transfers, NullSink(cache, transfers))
    return Pipeline(replace(hooked, program=None, fast_experts=False), plain, Threads())


def with_measured_workspace(loaded: LoadedModel, transfers: TransferEngine, kv: KVCache) -> LoadedModel:
    """The loaded model, with the workspace that passes on its GPU were measured to take; on a CPU, as it is. Raises
    BudgetError when that leaves too little for the experts."""
    if loaded.device.type != "cuda":
        return loaded
    plan, settings = loaded.plan, loaded.plan.spec.settings
    try:
        measured = _measured(loaded, transfers, kv)
    except RuntimeError as error:
        lack = shortage(error)
        if not lack:
            raise
        measured, problem = loaded.sizes, f"The GPU has no room for {lack}. Lower the context."
    else:
        room = free_bytes(loaded.device)[0] + torch.cuda.memory_reserved(loaded.device) - loaded.beside
        measured = measured.affordable(settings, settings.cache.budget)
        problem = measured.under(settings).problem(settings.cache.budget, settings.cache.scope, room)
    if problem:
        raise BudgetError(problem)
    return replace(loaded, plan=replace(plan, sizes=measured))


def _measured(loaded: LoadedModel, transfers: TransferEngine, kv: KVCache) -> Sizes:
    """Sizes with the measured workspace, if it is more than was estimated: the most that was reserved beyond dense
    weights, KV cache and slots."""
    plan, sizes, device = loaded.plan, loaded.sizes, loaded.device
    wired = wire_passes(loaded, transfers, sizes.slots_min(plan.spec.settings.cache.scope))
    pipeline = Pipeline(wired.hooked, wired.measured, Threads())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with wired.installed:
            wired.fill(loaded)
            sequence = kv.fresh()
            prompt = max(1, min(sizes.chunk, PREFILL_CHUNK, plan.context - 1))
            for batch in (
                Batch("prefill", (Share([at % plan.outline.vocab for at in range(prompt)], sequence),)),
                Batch("decode", (Share([0], sequence),)),
            ):
                pipeline.begin(batch)
                pipeline.forward(batch)
                torch.cuda.synchronize(device)
            most = torch.cuda.max_memory_reserved(device) - loaded.beside - sizes.dense - kv.bytes - wired.arena.bytes
    finally:
        pipeline.end()
        wired.expert_cache.clear()
        transfers.forget()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return replace(sizes, workspace=max(most + REST, sizes.workspace))
