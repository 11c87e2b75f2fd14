"""On a GPU, what a load takes is measured before the slots are filled: by a prompt and a token, with few slots.

These passes allocate the KV cache and what products need for themselves, and compile the kernels, so that no answer
waits for that and the budget is held against what torch reserves.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from core.cache.copies import CacheMemory
from core.cache.expert_cache import ExpertCache
from core.capacity.free_memory import free_bytes
from core.capacity.sizes import PREFILL_CHUNK, Sizes
from core.errors import BudgetError
from core.hf import install
from core.hf.packed_texts import packing_of
from core.memory.arena import Arena
from core.memory.transfer import TransferEngine
from core.policy.allocation.slot_allocation import Placement
from core.policy.eviction import policy_maker
from core.runtime.batch import Batch, Share
from core.runtime.kv_cache import KVCache
from core.runtime.layer_math import choose_products, make_math
from core.runtime.moe_step import MoEStep
from core.runtime.out_of_memory import shortage
from core.runtime.pipeline import Pipeline, StepDispatch
from core.runtime.processor import DeviceProcessor
from core.runtime.unrecorded import Unrecorded
from core.runtime.warmup import Threads
from core.session.loading import LoadedModel

REST = 20 << 20  # bytes: a segment of torch's allocator that is used in part


def with_measured_workspace(loaded: LoadedModel, transfers: TransferEngine, kv: KVCache) -> LoadedModel:
    """The loaded model, with the workspace that passes on its GPU were measured to take; on a CPU, as it is. Raises
    BudgetError when that leaves too little for the experts."""
    if loaded.device.type != "cuda":
        return loaded
    plan, settings = loaded.plan, loaded.plan.spec.settings.cache
    try:
        measured = _measured(loaded, transfers, kv)
    except RuntimeError as error:
        lack = shortage(error)
        if not lack:
            raise
        measured, problem = loaded.sizes, f"The GPU has no room for {lack}. Lower the context."
    else:
        room = free_bytes(loaded.device)[0] + torch.cuda.memory_reserved(loaded.device) - loaded.beside
        problem = measured.problem(settings.budget, settings.scope, room)
    if problem:
        raise BudgetError(problem)
    return replace(loaded, plan=replace(plan, sizes=measured))


def _measured(loaded: LoadedModel, transfers: TransferEngine, kv: KVCache) -> Sizes:
    """Sizes with the measured workspace, if it is more than what was reckoned with: the most that was reserved beyond
    dense weights, KV cache and slots."""
    plan, sizes, device, settings = loaded.plan, loaded.sizes, loaded.device, loaded.plan.spec.settings.cache
    shape = sizes.shape
    arena = Arena(plan.codec, device)
    placement, blocks = Placement.even(shape.layers, shape.experts, shape.top_k, settings.scope), plan.codec.blocks
    if blocks > 1:
        placement = replace(placement, transit=shape.top_k, blocks=blocks, tops=(blocks,) * shape.layers)
    expert_cache = ExpertCache(
        placement,
        sizes.slots_min(settings.scope),
        policy_maker(settings.eviction),
        CacheMemory(arena, loaded.store, transfers),
    )
    math = make_math([site.module for site in loaded.sites], plan.codec)
    metrics = Unrecorded(expert_cache, transfers)
    step = MoEStep(math, expert_cache, DeviceProcessor(transfers, metrics), metrics)
    dispatch = StepDispatch(step)
    packing = packing_of(loaded.model, [site.module for site in loaded.sites])
    pipeline = Pipeline(loaded.model, device, dispatch, step, expert_cache, Threads(), metrics, packing)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with install(loaded.model, loaded.sites, dispatch):
            expert_cache.fill()
            choose_products(math, expert_cache.sample(shape.top_k), plan.dtype)
            sequence = kv.fresh()
            prompt = max(1, min(sizes.chunk, PREFILL_CHUNK, plan.context - 1))
            for batch in (
                Batch("prefill", (Share([at % plan.outline.vocab for at in range(prompt)], sequence),)),
                Batch("decode", (Share([0], sequence),)),
            ):
                pipeline.begin(batch)
                pipeline.forward(batch)
                torch.cuda.synchronize(device)
            most = torch.cuda.max_memory_reserved(device) - loaded.beside - sizes.dense - kv.bytes - arena.bytes
    finally:
        pipeline.end()
        expert_cache.clear()
        transfers.forget()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return replace(sizes, workspace=max(most + REST, sizes.workspace))
