"""Builds everything that uses a loaded model, each part with the parts that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from core.cache.expert_cache import ExpertCache
from core.capacity.fit import copies_gbps
from core.capacity.free_memory import free_bytes
from core.capacity.memory_accounting import Ledger
from core.capacity.sizes import SHORT_CHUNK
from core.hf import install
from core.hf.fast_linear import dense_codecs
from core.hf.hooks import Installed
from core.hf.norms import find_contexts
from core.hf.packed_texts import packing_of
from core.hf.text_to_text import decoder_shape, decoder_sites
from core.hf.weighing import rules_of
from core.memory.arena import Arena
from core.memory.codec.kernel_choice import choose
from core.memory.link_emulation import LinkEmulation
from core.memory.transfer import TransferEngine
from core.policy.eviction import policy_maker
from core.policy.prefetch.throttle import PrefetchThrottle
from core.prediction.predictor_host import PredictorHost
from core.profile import Profile
from core.quality.meter import Meter
from core.runtime.compute import ExpertMath
from core.runtime.device_decode import DeviceDecode
from core.runtime.kv_cache import KVCache
from core.runtime.kv_pool import KVPool
from core.runtime.layer_math import choose_products, make_math
from core.runtime.measurement import MeasurementSession
from core.runtime.miss import MissPolicy
from core.runtime.moe_step import MoEStep
from core.runtime.pipeline import Pipeline, StepDispatch
from core.runtime.prefetcher import Prefetcher
from core.runtime.processor import DeviceProcessor
from core.runtime.recorder import Recorder
from core.runtime.telemetry import Telemetry
from core.runtime.token_graph import TokenGraphs
from core.runtime.trace_capture import TraceCapture
from core.runtime.unrecorded import Unrecorded
from core.runtime.warmup import SHORT, Threads, choose_threads, short_prompt, time_pass
from core.session.batch_trial import BatchTrial
from core.session.kept import KeptKVs
from core.session.loading import LoadedModel, with_buddies
from core.session.settings_controller import EngineParts, SettingsController, begin
from core.session.trial_passes import with_measured_workspace

Profiles = Callable[[str], Profile | None]
"""Finds the profile of the model with this hash, if there is one."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """A loaded model and all that uses it."""

    loaded: LoadedModel
    controller: SettingsController
    parts: EngineParts  # on which settings act
    arena: Arena
    kv: KVCache
    pool: KVPool
    trial: BatchTrial
    meter: Meter
    capture: TraceCapture
    threads: Threads
    installed: Installed
    link_gbps: float
    math: list[ExpertMath]
    dispatch: StepDispatch
    answering: Pipeline
    measuring: Pipeline
    unrecorded: Unrecorded  # the metrics of `measuring`

    def open_session(self) -> MeasurementSession:
        """Passes of the exact model, outside any answer. Its caller holds the model lock."""
        loaded, sizes = self.loaded, self.loaded.sizes
        return MeasurementSession(
            self.measuring,
            self.unrecorded,
            loaded.model,
            loaded.sites,
            loaded.shape,
            loaded.device,
            loaded.plan.context,
            min(sizes.chunk, SHORT_CHUNK) if sizes.carried else sizes.chunk,
            self.parts.expert_cache,
            self.parts.transfers,
            self.kv,
            self.threads,
            sizes.carried,
            sizes.workspace,
        )


def wire(loaded: LoadedModel, profiles: Profiles | None) -> Wiring:
    """Build and fill the cache and build the parts around it; tries out how this machine computes fastest. Raises
    SettingError or BudgetError, after releasing the experts' memory."""
    transfers = TransferEngine(loaded.device, loaded.store.fetch, loaded.plan.tier.readers, loaded.store.is_pinned)
    try:
        kv = KVCache(loaded.model, loaded.plan.context)
        loaded = with_measured_workspace(loaded, transfers, kv)
        settings = loaded.plan.spec.settings
        controller = SettingsController(
            settings,
            loaded.sizes,
            with_buddies(loaded, profiles(loaded.model_hash) if profiles is not None else None),
            lambda: rules_of(loaded.model, loaded.sites),
        )
        return _around(loaded, transfers, controller, kv)
    except BaseException:
        transfers.close()
        loaded.store.close()
        raise


def _around(loaded: LoadedModel, transfers: TransferEngine, controller: SettingsController, kv: KVCache) -> Wiring:
    plan, model, sites, device = loaded.plan, loaded.model, loaded.sites, loaded.device
    settings, sizes, shape = plan.spec.settings, loaded.sizes, loaded.shape
    link_gbps = copies_gbps(plan)
    arena = Arena(plan.codec, device, plan.paged)
    expert_cache = _cache(loaded, arena, transfers, controller)
    kept = KeptKVs(kv, settings.kv, sizes.carried, lambda: free_bytes(torch.device("cpu"))[0])
    pool = KVPool(model, kv, sizes.kv, plan.outline.kv_bytes, plan.context)
    ledger = Ledger(sizes, arena, pool, device, settings.cache.budget, lambda: kept.bytes)
    meter = Meter(device, expert_cache, lambda: 1e3 * (transfers.copy_s(sizes.blob) or sizes.blob / (link_gbps * 1e9)))

    find_contexts(model, sites)  # by a pass through all layers, of which no answer is to wait for or can break
    throttle, capture = PrefetchThrottle(), TraceCapture(model, sites, shape)
    predictor_host = PredictorHost(model, decoder_sites(model, sites), decoder_shape(shape))
    miss = MissPolicy(shape, expert_cache, predictor_host, device)
    telemetry, recorder = (
        Telemetry(shape),
        Recorder(shape, expert_cache, transfers, miss, capture, throttle, predictor_host),
    )
    prefetcher = Prefetcher(expert_cache, predictor_host, throttle, recorder, capture, shape.encoder_layers)
    unrecorded = Unrecorded(expert_cache, transfers)

    math = make_math([site.module for site in sites], plan.codec)
    answer_step = MoEStep(math, expert_cache, DeviceProcessor(transfers, recorder), recorder, prefetcher, miss)
    measured_step = MoEStep(math, expert_cache, DeviceProcessor(transfers, unrecorded), unrecorded)
    dispatch = StepDispatch(answer_step)
    installed = install(model, sites, dispatch, norms=plan.spec.norms)
    packing = packing_of(model, [site.module for site in sites])

    predictor_host.use(*settings.prefetch.predictor, controller.profile)
    expert_cache.pin(controller.placed.pinned)
    expert_cache.fill()
    choose_products(math, expert_cache.sample(shape.top_k), plan.dtype)
    whole = [plan.codec.whole[0]] if plan.codec.whole is not None else []
    for codec in (plan.codec, *whole, *dense_codecs(model)) if device.type == "cpu" else ():
        choose(codec)
    coded = plan.codec.direct or plan.spec.dense != "checkpoint"

    def time_one() -> float:
        return time_pass(model, device, kv.fresh(), recorder, plan.context)

    threads, pass_ms = choose_threads(
        device,
        plan.spec.threads,
        coded,
        time_one,
        short_prompt(shape) if plan.codec.direct else SHORT,
    )
    layer_ms = 0.0
    if plan.spec.model == "demo":  # its link is emulated, unless the user wants this machine's own
        layer_ms = (pass_ms or time_one()) / shape.layers
    link = LinkEmulation(transfers, sizes.blob, layer_ms)
    device_decode = DeviceDecode(
        math,
        expert_cache,
        transfers,
        recorder,
        loaded.store,
        shape,
        device,
        miss,
        predictor_host,
        capture,
        lambda: TokenGraphs(model, device, plan.context, lambda: ledger.used() <= ledger.budget_bytes),
    )
    parts = EngineParts(
        sizes,
        expert_cache,
        transfers,
        telemetry,
        recorder,
        ledger,
        predictor_host,
        capture.shadows,
        miss,
        throttle,
        link,
        kept,
        device_decode,
    )
    begin(settings, parts)
    return Wiring(
        loaded,
        controller,
        parts,
        arena,
        kv,
        pool,
        BatchTrial(loaded, dispatch, packing, pool),
        meter,
        capture,
        threads,
        installed,
        link_gbps,
        math,
        dispatch,
        Pipeline(
            model, device, dispatch, answer_step, expert_cache, threads, recorder, packing, prefetcher, device_decode
        ),
        Pipeline(model, device, dispatch, measured_step, expert_cache, threads, unrecorded, packing),
        unrecorded,
    )


def _cache(loaded: LoadedModel, arena: Arena, transfers: TransferEngine, controller: SettingsController) -> ExpertCache:
    """An empty cache as the settings size and divide it, with the policy that they name."""
    settings, shape = loaded.plan.spec.settings, loaded.shape
    expert_cache = ExpertCache(
        shape.layers,
        shape.experts,
        arena,
        loaded.store,
        transfers,
        policy_maker(settings.cache.eviction),
        settings.cache.scope,
        loaded.sizes.slots(settings.cache.budget),
        divide=controller.placed.divide,
        blocks=loaded.plan.codec.blocks,
        transit=controller.placed.transit,
        split=loaded.plan.codec.blocks > 1,
    )
    placed = controller.placed
    expert_cache.place(placed.usual, placed.pinned, placed.divide, placed.transit, placed.tops)
    loaded.store.use_policy(policy_maker(settings.cache.host_eviction), placed.usual)
    return expert_cache
