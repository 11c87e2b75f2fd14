"""The engine: loads a MoE model within a memory budget and generates text, while every knob can be turned.

One engine holds one model. One answer is generated at a time; `change`, `frame` and `memory` may be called from any
thread meanwhile. The path of one token through one MoE layer is `core.runtime.moe_step`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from core.answer import Answer, Prompt
from core.config import LoadSpec, Sampling, Settings
from core.errors import BudgetError, BusyError
from core.fit import copies_gbps
from core.hf import Installed, install, probe_router
from core.ledger import Ledger
from core.loading import Loaded, load
from core.manifest import describe
from core.memory.arena import Arena
from core.memory.link import Pace, scaled_gbps
from core.memory.transfer import TransferEngine
from core.plan import Plan, plan
from core.registry import create
from core.room import free_bytes
from core.runtime.kv import KVCache
from core.runtime.moe_step import MoEStep
from core.runtime.recorder import Recorder
from core.runtime.residency import Residency
from core.runtime.sampler import Sampler
from core.runtime.telemetry import Telemetry
from core.runtime.warmup import choose_threads, time_pass
from core.steady import settle, unsettle
from core.types import Frame, Memory, Phase, Piece, StepRecord


class Engine:
    """Build with `Engine.load`. Raises MoestroError subclasses whose text is meant for the user."""

    def __init__(self, plan: Plan, loaded: Loaded) -> None:
        self.spec, self.context, self.device = plan.spec, plan.context, plan.device
        self.model_name, self.model_hash = plan.spec.model, loaded.model_hash
        self.sizes, self.shape = plan.sizes, plan.sizes.shape
        self.model, self.prompt = loaded.model, Prompt(loaded.tokenizer, loaded.model.generation_config)
        self._plan, self._store, self._sites = plan, loaded.store, loaded.sites
        self._applied = self._wanted = plan.spec.settings
        self._run, self._change = threading.Lock(), threading.Lock()
        self._pending: dict[str, object] = {}
        self._router_call: tuple[int, tuple[Any, ...], dict[str, Any]] = (-1, (), {})
        self.link_gbps = copies_gbps(plan)
        self.arena = Arena(plan.codec, self.device, plan.paged)
        self.transfers = TransferEngine(self.device, self._store.fetch, workers=plan.tier.readers)
        try:
            self._build(plan)
        except BaseException:
            self.transfers.close()
            self._store.close()
            raise

    def _build(self, plan: Plan) -> None:
        """The cache, filled, and everything around it; how this machine computes best is tried out on the way."""
        self.residency = Residency(
            self.shape.layers, self.shape.experts, self.arena, self._store, self.transfers,
            lambda roster: create("eviction", *self._applied.choice("eviction"), roster=roster),
            str(self._applied["scope"]), self.sizes.slots(self._applied.budget))
        self.telemetry, self.recorder = Telemetry(self.shape), Recorder(self.shape, self.residency, self.transfers)
        self._kv = KVCache(self.model, self.context)
        self.ledger = Ledger(self.sizes, self.arena, self._kv, self.device, self._applied.budget)
        self._step = MoEStep([s.module for s in self._sites], plan.codec, self.residency, self.transfers,
                             self.recorder, self._probe, self.shape.top_k)
        self._installed: Installed | None = None
        self._use_predictor()
        self.residency.fill()
        self._step.stack_if_worth_it(self.shape.hidden, plan.dtype)
        self._threads, pass_ms = choose_threads(self.device, plan.spec.threads,
                                                lambda: time_pass(self.model, self._kv.fresh(), self.recorder))
        self._layer_ms = pass_ms / self.shape.layers if self.model_name == "demo" else 0.0  # "auto" scales a link to it
        self._use_link()

    # ------------------------------------------------------------------ life

    @classmethod
    def load(cls, spec: LoadSpec, progress: Callable[[str, float], None] = lambda text, share: None,
             cancel: threading.Event | None = None) -> Engine:
        """Load a model as `spec` says. Raises ModelError, BudgetError, ContextError or Cancelled, keeping nothing."""
        planned = plan(spec)
        engine = cls(planned, load(planned, progress, cancel))
        settle()
        progress("Ready", 1.0)
        return engine

    def unload(self) -> None:
        """Give everything back. Raises BusyError while an answer is being generated."""
        if not self._run.acquire(blocking=False):
            raise BusyError("The model is answering. Stop the answer first.")
        try:
            if self._installed is not None:
                self._installed.uninstall()
            self.transfers.close()
            self.residency.clear()
            self._store.close()
            del self.model, self._kv, self._store
            unsettle()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        finally:
            self._run.release()

    # ------------------------------------------------------------------ talk

    def generate(self, messages: Sequence[Mapping[str, str]] | str, sampling: Sampling | None = None,
                 cancel: threading.Event | None = None) -> Iterator[Piece]:
        """Stream an answer to a chat, or the continuation of a text.

        Raises ContextError or BusyError at the first step.
        `cancel` stops before the next token; the last piece is always "end" with the statistics.
        """
        sampling, cancel = sampling or Sampling(), cancel or threading.Event()
        submitted_s = time.perf_counter()
        ids = self.prompt.encode(messages, self.context)
        if not self._run.acquire(blocking=False):
            raise BusyError("The model is answering another chat. Wait for it, or stop it.")
        try:
            self.telemetry.version += 1
            yield from self._answer(ids, sampling, cancel, submitted_s)
        finally:
            self.residency.abandon()
            self._threads.use("prefill")
            self._run.release()
            self.telemetry.version += 1

    def count_tokens(self, messages: Sequence[Mapping[str, str]] | str) -> int:
        """Prompt tokens that a chat takes."""
        return len(self.prompt.tokens(messages))

    def fresh_cache(self) -> Any:
        """An empty KV cache for calling `engine.model` directly; it is the one that `generate` uses."""
        return self._kv.fresh()

    # ------------------------------------------------------------------ turn

    @property
    def settings(self) -> Settings:
        """What is asked for; it acts from the next forward pass on."""
        return self._wanted

    def change(self, changes: Mapping[str, object]) -> Settings:
        """Turn knobs, now or between two tokens. Raises SettingError or BudgetError and leaves everything as it was."""
        with self._change:
            new = self._wanted.with_(changes)
            room = free_bytes(self.device)[0] + self.ledger.used()
            if problem := self.sizes.problem(new.budget, str(new["scope"]), room):
                raise BudgetError(problem)
            self._wanted = new
        if self._run.acquire(blocking=False):
            try:
                self._apply()
            finally:
                self._run.release()
        return new

    # ------------------------------------------------------------------ look

    @property
    def version(self) -> int:
        """Grows whenever a frame would look different."""
        return self.telemetry.version

    @property
    def busy(self) -> bool:
        """An answer is being generated."""
        return self._run.locked()

    def frame(self, layer: int = 0, points: int = 240) -> Frame:
        """What the live deck draws; `layer` picks the co-activation matrix."""
        pace, layer = self.transfers.pace, max(0, min(self.shape.layers - 1, layer))
        return self.telemetry.frame(layer, points, self.residency.places(), self.memory(), busy=self.busy,
                                    emulated=bool(pace), link_peak_gbps=pace.gbps if pace else self.link_gbps)

    def memory(self) -> Memory:
        """Device bytes in use. Workspace is what is set aside for activations; on CUDA, what torch measured if more."""
        return self.ledger.memory(self._store.bytes)

    def manifest(self) -> dict[str, object]:
        """What the figures of this load were measured on, and with what."""
        return describe(self._plan, self.model_hash, self._applied, self.transfers.pace, self.link_gbps,
                        self._threads.decode)

    def _answer(self, ids: list[int], sampling: Sampling, cancel: threading.Event,
                submitted_s: float) -> Iterator[Piece]:
        answer = Answer(self.prompt, ids, min(sampling.max_new_tokens, self.context - len(ids)), submitted_s,
                        limited_by_context=sampling.max_new_tokens > self.context - len(ids))
        sampler, cache, so_far = Sampler(sampling, self.device), self._kv.fresh(), list(ids)
        token: int | None = None
        self._step.request += 1
        for start in range(0, len(ids), self.sizes.chunk):
            if cancel.is_set():
                break
            chunk = ids[start : start + self.sizes.chunk]
            done = start + len(chunk)
            token, step = self._pass(chunk, cache, "prefill", sampler if done == len(ids) else None, so_far)
            answer.count(step)
            yield Piece("prefill", done=done, total=len(ids), step=step)
        while token is not None and not answer.take(token):
            yield answer.piece()
            if cancel.is_set() or answer.full:
                break
            so_far.append(token)
            token, step = self._pass([token], cache, "decode", sampler, so_far)
            answer.count(step)
        yield Piece("end", step=answer.last_step,
                    stats=answer.stats(cancelled=cancel.is_set(), memory=self.memory()))

    @torch.inference_mode()
    def _pass(self, ids: list[int], cache: Any, phase: Phase, sampler: Sampler | None,
              so_far: list[int]) -> tuple[int | None, StepRecord]:
        """One forward pass over some tokens; samples the next one when a sampler is given."""
        started_s = time.perf_counter()
        self._apply()
        self._threads.use(phase)
        self.residency.now += 1
        self.residency.phase = phase
        self.recorder.begin()
        self.ledger.begin()
        began_s = time.perf_counter()
        inputs = torch.tensor([ids], device=self.device)
        logits = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        model_s = time.perf_counter() - began_s
        token = sampler(so_far, logits) if sampler is not None else None
        changes, self._pending = self._pending, {}
        step = self.recorder.end(phase, len(ids), started_s, model_s, self.ledger.used(), self.ledger.budget_bytes,
                                 changes)
        if self.recorder.enabled:
            self.telemetry.add(step)
        step.spent(time.perf_counter() - started_s)
        return token, step

    def _apply(self) -> None:
        """Make the cache what the settings say. Only between two passes, on the thread that computes."""
        old, new = self._applied, self._wanted
        if old is new:
            return
        changed, self._applied = old.diff(new), new
        for name, value in changed.items():
            self.telemetry.mark(self.recorder.index, f"{name} {old[name]} → {value}")
        self._pending |= changed
        self.recorder.enabled = bool(new["telemetry"])
        self.ledger.hold_to(new.budget)
        if any(name.startswith("link") for name in changed):
            self._use_link()
        if any(name.startswith("predictor") for name in changed):
            self._use_predictor()
        if any(name.startswith("eviction") or name == "scope" for name in changed):
            self.residency.reshape(scope=str(new["scope"]), make_policy=self.residency.make_policy)
        if "budget" in changed:
            self._resize(new)

    def _resize(self, settings: Settings) -> None:
        try:
            self.residency.reshape(slots=self.sizes.slots(settings.budget))
        except BudgetError as error:  # the device ran full while growing: keep what there is, and say so
            held = {"budget": str(self.sizes.bytes(self.residency.slots))}
            self._applied = settings.with_(held)
            self.ledger.hold_to(self._applied.budget)
            self._wanted = self._wanted.with_(held)
            self.telemetry.mark(self.recorder.index, str(error))

    def _use_link(self) -> None:
        """Pace copies, or do not. "auto" emulates for the demo model where host and device are one memory."""
        kind, latency_us = self._applied["link"], float(self._applied["link_latency_us"])
        gbps = float(self._applied["link_gbps"]) if kind == "emulated" else 0.0
        if kind == "auto" and self._layer_ms:
            gbps = scaled_gbps(self._layer_ms, self.sizes.blob, latency_us)
        pace = self.transfers.pace
        if (pace.gbps, pace.latency_us) != (gbps, latency_us):
            self.transfers.pace = Pace(gbps, latency_us)

    def _use_predictor(self) -> None:
        """Routers are watched only for a predictor that asks them."""
        self._step.predictor = create("predictor", *self._applied.choice("predictor"))
        if self._installed is not None:
            self._installed.uninstall()
        self._installed = install(self.model, self._sites,
                                  lambda site, hidden, ids, weights: self._step(site.index, hidden, ids, weights),
                                  self._observe if self._step.predictor.asks else None)

    def _observe(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._router_call = (layer, args, kwargs)

    def _probe(self, at: int, of: int) -> torch.Tensor:
        """[T, E] probabilities of layer `of`'s router, given layer `at`'s router input."""
        layer, args, kwargs = self._router_call
        assert layer == at, "the router that was watched is not the one of this layer"
        return probe_router(self._sites[of], args, kwargs)
