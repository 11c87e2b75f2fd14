"""Builds everything that uses a loaded model, each part with the parts that it needs."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from core.capacity.fit import copies_gbps
from core.capacity.free_memory import free_bytes
from core.capacity.memory_accounting import Ledger
from core.capacity.sizes import SHORT_CHUNK
from core.engine.batch_trial import BatchTrial
from core.engine.draft_prefetch import DraftPrefetch
from core.engine.draft_trace import RoutingTrace
from core.engine.drafter import Drafter
from core.engine.kept_pace import layer_ms
from core.engine.loading import LoadedModel, Progress, with_buddies
from core.engine.pass_wiring import PassWiring, reference_passes, wire_passes, with_measured_workspace
from core.engine.prefix_cache import PrefixCache
from core.engine.program_trial import CLOSE, CLOSE_FP32, decided
from core.engine.quality.meter import Meter
from core.engine.settings_controller import EngineParts, MemoryParts, PredictionParts, SettingsController, begin
from core.errors import ModelError
from core.hf.hooks import Installed
from core.hf.norms import find_contexts
from core.hf.skeleton import release_weights
from core.hf.text_to_text import decoder_shape, decoder_sites
from core.hf.weighing import rules_of
from core.memory.arena import Arena
from core.memory.link_emulation import LinkEmulation
from core.memory.transfer import TransferEngine
from core.policy.eviction import policy_maker
from core.policy.throttle import Throttle
from core.profile import Profile
from core.runtime.device_decode import DeviceDecode
from core.runtime.draft_head import DraftHead, HeadSink
from core.runtime.draft_model import DraftModel
from core.runtime.expert_math import ExpertMath
from core.runtime.head_passes import ModulePasses, ProgramPasses
from core.runtime.host_compute import HostCompute
from core.runtime.kv_cache import KVCache
from core.runtime.kv_pool import KVPool
from core.runtime.measurement import MeasurementSession, PassLimits
from core.runtime.miss import MissPolicy
from core.runtime.moe_step import MoEStep
from core.runtime.pipeline import Pipeline
from core.runtime.prediction.predictor_host import PredictorHost
from core.runtime.prefetcher import Prefetcher
from core.runtime.program.experts import FastMath
from core.runtime.program.program import Program
from core.runtime.recorder import Recorder
from core.runtime.telemetry import Telemetry
from core.runtime.token_graph import TokenGraphs
from core.runtime.trace_capture import TraceCapture
from core.runtime.warmup import Threads, choose_threads, time_pass
from core.system.wording import format_bytes

log = logging.getLogger("moestro.load")
SPILLED = (
    "The GPU reads %s of the slots' %s as slowly as system memory: its driver took that in the place of memory that "
    "other programs have. Choose a smaller budget, close what else uses the GPU, or switch off the driver's fallback "
    "to system memory (NVIDIA's control panel, CUDA - Sysmem Fallback Policy)."
)
Profiles = Callable[[str], Profile | None]
"""Finds the profile of the model with this hash, if there is one."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """A loaded model and all that uses it. Answers run one pipeline, with prediction, lossy options and records;
    measuring runs another one over the same model and cache, which has none of these."""

    loaded: LoadedModel
    controller: SettingsController
    parts: EngineParts  # on which settings act
    trial: BatchTrial
    meter: Meter
    installed: Installed
    answering: Pipeline
    measuring: Pipeline

    @property
    def arena(self) -> Arena:
        """The slots' memory."""
        return self.parts.memory.arena

    @property
    def pool(self) -> KVPool:
        """The KV memory of all sequences."""
        return self.parts.memory.pool

    @property
    def kv(self) -> KVCache:
        """The KV memory of answers to one chat at a time."""
        return self.pool.chat

    @property
    def math(self) -> Sequence[ExpertMath]:
        """The arithmetic of each MoE layer."""
        return self.answering.step.math

    def reference(self) -> Pipeline:
        """Passes of the exact model by transformers' modules and products, whatever arithmetic computes. Its caller
        holds the model lock."""
        return reference_passes(self.loaded, self.measuring.hooked, self.measuring.step)

    def open_session(self) -> MeasurementSession:
        """Passes of the exact model, outside any answer. Its caller holds the model lock."""
        loaded, sizes = self.loaded, self.loaded.sizes
        chunk = min(sizes.chunk, SHORT_CHUNK) if sizes.carried else sizes.chunk
        limits = PassLimits(loaded.plan.context, chunk, sizes.carried, sizes.workspace)
        return MeasurementSession(self.measuring, loaded.sites, loaded.shape, self.kv, limits)


def wire(loaded: LoadedModel, profiles: Profiles | None, progress: Progress, cancel: threading.Event | None) -> Wiring:
    """Build and fill the cache and build the parts around it; decides on the arithmetic, and tries out how this machine
    computes fastest. Raises SettingError, BudgetError or Cancelled, after releasing the experts' memory."""
    transfers = TransferEngine(loaded.device, loaded.store.fetch, loaded.plan.tier.readers, loaded.store.is_pinned)
    try:
        kv = KVCache(loaded.model, loaded.plan.context)
        loaded = with_measured_workspace(loaded, transfers, kv)
        controller = SettingsController(
            loaded.plan.spec.settings,
            loaded.sizes,
            with_buddies(loaded, profiles(loaded.model_hash) if profiles is not None else None),
            lambda: rules_of(loaded.model, loaded.sites),
        )
        return _around(loaded, transfers, controller, kv, lambda passes: decided(passes, loaded, kv, progress, cancel))
    except BaseException:
        transfers.close()
        loaded.store.close()
        raise


def _around(
    loaded: LoadedModel,
    transfers: TransferEngine,
    controller: SettingsController,
    kv: KVCache,
    decided: Callable[[PassWiring], PassWiring],
) -> Wiring:
    plan, model, sites, shape = loaded.plan, loaded.model, loaded.sites, loaded.shape
    find_contexts(model, sites)  # by a pass through all layers, of which no answer is to wait for or can break
    link_gbps = copies_gbps(plan)
    passes = _passes(loaded, transfers, controller)
    memory = _memory(loaded, passes, transfers, kv, link_gbps)
    meter = Meter(
        loaded.device,
        passes.expert_cache,
        lambda: 1e3 * (transfers.copy_s(loaded.sizes.blob) or loaded.sizes.blob / (link_gbps * 1e9)),
    )
    predictor_host = PredictorHost(model, decoder_sites(model, sites), decoder_shape(shape))
    miss = MissPolicy(shape, passes.expert_cache, predictor_host, loaded.device)
    prediction = PredictionParts(predictor_host, TraceCapture(model, sites, shape), Throttle(), miss)
    recorder = Recorder(
        shape, passes.expert_cache, transfers, miss, prediction.capture, prediction.throttle, predictor_host
    )
    prefetcher = Prefetcher(
        passes.expert_cache, predictor_host, prediction.throttle, recorder, prediction.capture, shape.encoder_layers
    )
    modules = [site.module for site in loaded.cached_sites]
    host = HostCompute(passes.math, modules, passes.expert_cache, loaded.store, transfers)
    step = MoEStep(passes.math, passes.expert_cache, transfers, recorder, prefetcher, miss, host)
    passes.hooked.dispatch.usual = step

    passes.expert_cache.pin(controller.placed.pinned)
    passes.fill(loaded)
    if spilled := passes.arena.spilled_bytes():
        log.warning(SPILLED, *map(format_bytes, (spilled, passes.arena.bytes)))
    passes = decided(passes)
    prefetcher.program_asks = passes.hooked.program is not None and passes.hooked.program.asks
    program = passes.hooked.program if isinstance(passes.hooked.program, Program) else None
    recorder.counts_steps = program is not None
    predictor_host.use(*plan.spec.settings.prefetch.predictor, controller.profile)
    threads = _timed(loaded, passes, memory, recorder)
    host.computing = 1 if loaded.device.type == "cuda" else threads.token.most
    ledger = memory.ledger

    def graphs() -> TokenGraphs:
        def fits() -> bool:
            return ledger.used() <= ledger.budget_bytes

        return TokenGraphs(model, loaded.device, plan.context, fits, passes.hooked.by_position)

    device_decode = DeviceDecode(step, loaded.store, shape, predictor_host, prediction.capture, graphs)
    head, small = _head(loaded, passes, transfers), _draft_model(loaded, program)
    memory.pool.drafts += [one for one in (head, small) if one is not None]
    trace = RoutingTrace(shape, passes.expert_cache, recorder)
    fetching = DraftPrefetch(shape, prefetcher, host, recorder)
    drafter = Drafter(program, min(loaded.sizes.chunk - 1, kv.revocable), head, small, trace, fetching)
    parts = EngineParts(memory, prediction, Telemetry(shape), recorder, device_decode, host, drafter)
    begin(plan.spec.settings, parts)
    return Wiring(
        loaded,
        controller,
        parts,
        BatchTrial(loaded, passes.hooked, memory.pool),
        meter,
        passes.installed,
        Pipeline(passes.hooked, step, threads, device_decode),
        Pipeline(passes.hooked, passes.measured, threads),
    )


def _draft_model(loaded: LoadedModel, program: Program | None) -> DraftModel | None:
    """What guesses tokens by a dense model. Where nothing verifies them, its weights are freed."""
    plan = loaded.plan
    if plan.draft is None:
        return None
    if program is None:
        release_weights(loaded.draft)
        return None
    return DraftModel(loaded.draft, plan.draft, plan.outline.vocab, plan.spec.threads, plan.spec.dense != "checkpoint")


def _head(loaded: LoadedModel, passes: PassWiring, transfers: TransferEngine) -> DraftHead | None:
    """What guesses tokens by the model's head, in passes that are recorded apart: by native steps where these know its
    layer, and come out as its modules do."""
    head, program, context = loaded.head, passes.hooked.program, loaded.plan.context
    if head is None or not isinstance(program, Program):
        return None
    sink = HeadSink(passes.expert_cache, transfers)
    step = MoEStep(passes.math, passes.expert_cache, transfers, sink)
    found = DraftHead(head, ModulePasses(head, context), passes.hooked.dispatch, step, sink)
    try:
        close = CLOSE_FP32 if loaded.plan.dtype == torch.float32 else CLOSE
        if (off := found.prefer(ProgramPasses(head, program, context), close)) > close:
            log.info("The model's head is computed by its modules: steps differ by %.2g of the logits' size", off)
    except ModelError as error:
        log.info("The model's head is computed by its modules: %s", error)
    return found


def _passes(loaded: LoadedModel, transfers: TransferEngine, controller: SettingsController) -> PassWiring:
    """An empty cache as the settings size and divide it, with the policies that they name, and what computes with
    it."""
    settings, placed = loaded.plan.spec.settings, controller.placed
    passes = wire_passes(loaded, transfers, controller.slots, placed)
    loaded.store.use_policy(policy_maker(settings.cache.host_eviction), placed.usual)
    return passes


def _memory(
    loaded: LoadedModel, passes: PassWiring, transfers: TransferEngine, kv: KVCache, link_gbps: float
) -> MemoryParts:
    """What holds the model's memory, within the budget."""
    plan, sizes = loaded.plan, loaded.sizes
    kept = PrefixCache(kv, plan.spec.settings.kv, sizes.carried, lambda: free_bytes(torch.device("cpu"))[0])
    room = sizes.kv - (plan.draft.kv if plan.draft is not None else 0)
    pool = KVPool(loaded.model, kv, room, plan.outline.kv_bytes, plan.context)
    ledger = Ledger(sizes, passes.arena, pool, loaded.device, plan.spec.settings, lambda: kept.bytes)
    link = LinkEmulation(transfers, sizes.blob)
    return MemoryParts(passes.arena, passes.expert_cache, transfers, link, pool, kept, ledger, link_gbps)


def _timed(loaded: LoadedModel, passes: PassWiring, memory: MemoryParts, recorder: Recorder) -> Threads:
    """Choose, by timing, the products of this CPU and the number of threads, and the pace of the demo model's link."""
    plan, device = loaded.plan, loaded.device
    hooked, math = passes.hooked, passes.math
    kernels = {one.kernels for one in math if isinstance(one, FastMath)}
    dense = hooked.program.products() if hooked.program is not None else hooked.coded.products() if kernels else ()
    for products in (*dense, *[p for one in kernels for p in (one.up, one.down)]):
        products.choose(torch.get_num_threads())

    def time_one() -> float:
        return time_pass(hooked.compute, device, memory.pool.chat.fresh(), recorder, plan.context)

    own = hooked.program is not None
    threads, _ = choose_threads(device, plan.spec.threads, time_one, ours=bool(kernels), own=own)
    if plan.spec.model == "demo":  # its link is emulated, unless the user wants this machine's own
        arithmetic = "fast" if hooked.program is not None else "fast_experts" if kernels else "reference"
        threads.use("decode")
        memory.link.layer_ms = layer_ms(plan, loaded.model_hash, arithmetic, lambda: time_one() / loaded.shape.layers)
        threads.rest()
    return threads
