"""The engine: loads a MoE model within a memory budget and generates text; settings can be changed meanwhile.

One engine holds one model and generates one answer at a time; `change`, `frame` and `memory` may be called from any
thread meanwhile. The path of one token through one MoE layer is `core.runtime.moe_step`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from core.cache.expert_cache import ExpertCache
from core.capacity.fit import copies_gbps
from core.capacity.free_memory import free_bytes
from core.capacity.memory_accounting import Ledger
from core.capacity.plan import Plan, plan
from core.errors import BudgetError, ProfileError
from core.hf import install
from core.hf.weighing import rules_of
from core.memory.arena import Arena
from core.memory.transfer import TransferEngine
from core.prediction.predictor_host import PredictorHost
from core.profile import Profile, check_model
from core.profile.buddies import find
from core.quality.meter import Meter
from core.runtime.kv_cache import KVCache
from core.runtime.miss import MissPolicy
from core.runtime.moe_step import MoEStep
from core.runtime.recorder import Recorder
from core.runtime.telemetry import Telemetry
from core.runtime.trace_capture import TraceCapture
from core.runtime.warmup import choose_threads, time_pass
from core.session.answer import Answer, Ids, Prompt
from core.session.loading import Loaded, load
from core.session.manifest import describe
from core.session.model_access import ModelAccess
from core.session.sampler import Draw, Sampler
from core.session.settings_controller import EngineParts, SettingsController, begin, check_early
from core.settings.config import LoadSpec, Sampling, Settings
from core.settings.lossy import is_lossy
from core.settings.registry import create
from core.system.process_memory import settle, unsettle
from core.types import Frame, Memory, Phase, Piece, StepRecord

log = logging.getLogger("moestro.engine")
Profiles = Callable[[str], Profile | None]
"""Finds the profile of the model with this hash, if there is one."""


class Engine(ModelAccess):
    """Build with `Engine.load`. Raises MoestroError subclasses whose text is meant for the user."""

    def __init__(self, plan: Plan, loaded: Loaded, profile: Profiles | None = None) -> None:
        super().__init__()
        self.spec, self.context, self.device = plan.spec, plan.context, plan.device
        self.model_name, self.model_hash = plan.spec.model, loaded.model_hash
        self.sizes, self.shape = plan.sizes, plan.sizes.shape
        self.model, self.prompt = loaded.model, Prompt(loaded.tokenizer, loaded.model.generation_config)
        self._plan, self._store, self._sites = plan, loaded.store, loaded.sites
        self.link_gbps = copies_gbps(plan)
        self.arena = Arena(plan.codec, self.device, plan.paged)
        self.transfers = TransferEngine(self.device, self._store.fetch, workers=plan.tier.readers)
        try:
            self._controller = SettingsController(
                plan.spec.settings,
                plan.sizes,
                self._with_pack(profile(self.model_hash) if profile is not None else None),
                lambda: rules_of(self.model, self._sites),
            )
            self._build(plan, plan.spec.settings)
        except BaseException:
            self.transfers.close()
            self._store.close()
            raise

    def _build(self, plan: Plan, settings: Settings) -> None:
        """Build and fill the cache and build the parts around it; tries out how this machine computes fastest."""
        self.expert_cache = ExpertCache(
            self.shape.layers,
            self.shape.experts,
            self.arena,
            self._store,
            self.transfers,
            lambda expert_index: create(
                "eviction", *self._controller.applied.choice("eviction"), expert_index=expert_index
            ),
            str(settings["scope"]),
            self.sizes.slots(settings.budget),
            divide=self._controller.placed.divide,
        )
        self.expert_cache.hints.profile(self._controller.placed.usual, sorted(self._controller.placed.pinned))
        self.telemetry, self.recorder = Telemetry(self.shape), Recorder(self.shape, self.expert_cache, self.transfers)
        self.keep = self.recorder.capture = TraceCapture(self.model, self._sites)
        self._kv = KVCache(self.model, self.context)
        self.meter = Meter(
            self.device,
            self.expert_cache,
            lambda: 1e3 * (self.transfers.copy_s(self.sizes.blob) or self.sizes.blob / (self.link_gbps * 1e9)),
        )
        self.ledger = Ledger(self.sizes, self.arena, self._kv, self.device, settings.budget)
        self.predictor_host = PredictorHost(self.model, self._sites, self.shape)
        self._step = MoEStep(
            [s.module for s in self._sites],
            plan.codec,
            self.expert_cache,
            self.transfers,
            self.recorder,
            self.predictor_host,
            self.shape.top_k,
        )
        self._step.miss = self.recorder.miss = self.miss = MissPolicy(
            self.shape, self.expert_cache, self.predictor_host, self.device
        )
        self._installed = install(
            self.model, self._sites, lambda site, hidden, ids, weights: self._step(site.index, hidden, ids, weights)
        )
        self.predictor_host.use(*settings.choice("predictor"), self.profile)
        self.expert_cache.pin(self._controller.placed.pinned)
        self.expert_cache.fill()
        self._step.stack_if_worth_it(self.shape.hidden, plan.dtype)
        self._threads, pass_ms = choose_threads(
            self.device,
            plan.spec.threads,
            plan.codec.direct or plan.spec.dense != "checkpoint",
            lambda: time_pass(self.model, self._kv.fresh(), self.recorder),
        )
        self._parts = EngineParts(
            self.sizes,
            self.expert_cache,
            self.transfers,
            self.telemetry,
            self.recorder,
            self.ledger,
            self.predictor_host,
            self.miss,
            pass_ms / self.shape.layers if self.model_name == "demo" else 0.0,
        )
        begin(settings, self._parts)

    # ------------------------------------------------------------------ lifecycle

    @classmethod
    def load(
        cls,
        spec: LoadSpec,
        progress: Callable[[str, float], None] = lambda text, share: None,
        cancel: threading.Event | None = None,
        profile: Profiles | None = None,
    ) -> Engine:
        """Load a model as `spec` says. `profile` finds a model's profile by the model's hash; by default there is none.

        Raises ModelError, BudgetError, ContextError, SettingError, ProfileError or Cancelled, after releasing
        everything.
        """
        planned = plan(spec)
        check_early(spec.settings, planned.sizes, profile is not None)
        engine = cls(planned, load(planned, progress, cancel), profile)
        settle()
        progress("Ready", 1.0)
        return engine

    def unload(self) -> None:
        """Release all memory, threads and processes. Raises BusyError while an answer is being generated."""
        self._take("The model is answering. Stop the answer first.")
        try:
            self.meter.clear()
            self.predictor_host.close()
            self._installed.uninstall()
            self.transfers.close()
            self.expert_cache.clear()
            self._store.close()
            del self.model, self._kv, self._store
            unsettle()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        finally:
            self._give()

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        messages: Sequence[Mapping[str, str]] | str | Ids,
        sampling: Sampling | None = None,
        cancel: threading.Event | None = None,
        draw: Draw | None = None,
    ) -> Iterator[Piece]:
        """Stream an answer to a chat, or the continuation of a text. `draw` replaces the sampler.

        Raises ContextError or BusyError at the first step.
        `cancel` stops before the next token; the last piece is always "end" with the statistics.
        """
        sampling, cancel = (sampling or Sampling()).drawn(), cancel or threading.Event()
        submitted_s = time.perf_counter()
        ids = self.prompt.encode(messages, self.context)
        self._take("The model is answering another chat. Wait for it, or stop it.")
        try:
            self.telemetry.version += 1
            yield from self._answer(ids, sampling, cancel, submitted_s, draw)
        finally:
            self.expert_cache.abandon()
            self._threads.use("prefill")
            self._give()
            self.telemetry.version += 1

    def count_tokens(self, messages: Sequence[Mapping[str, str]] | str) -> int:
        """Number of prompt tokens of a chat."""
        return len(self.prompt.tokens(messages))

    def check_length(self, messages: Sequence[Mapping[str, str]] | str) -> None:
        """Raises ContextError for a text far too long for the context, without tokenising it."""
        self.prompt.check(messages, self.context)

    def fresh_cache(self) -> Any:
        """An empty KV cache for calling `engine.model` directly; it shares the memory of the one that `generate`
        uses."""
        return self._kv.fresh()

    # ------------------------------------------------------------------ settings

    @property
    def settings(self) -> Settings:
        """The requested settings; they take effect from the next forward pass on."""
        return self._controller.wanted

    def change(self, changes: Mapping[str, object]) -> Settings:
        """Change settings, now or between two tokens. Raises SettingError or BudgetError and then changes nothing."""
        new = self._controller.ask(changes, self._check)
        self._apply_if_idle()
        return new

    @property
    def profile(self) -> Profile | None:
        """The calibration results of this model."""
        return self._controller.profile

    def use_profile(self, profile: Profile | None) -> None:
        """Use a profile from the next forward pass on. Raises ProfileError when it belongs to another model, and
        SettingError when the settings need more than it contains; the old one then stays."""
        if profile is not None:
            check_model(profile, self.model_hash, self.model_name)
        self._controller.ask_profile(self._with_pack(profile))
        self._apply_if_idle()

    def _with_pack(self, profile: Profile | None) -> Profile | None:
        """The profile with the pack's buddy lists added; lists that cannot be used are logged."""
        try:
            pack = self._plan.files.path if self._plan.pack is not None else None
            return find(profile, pack, self.model_hash, self.model_name)
        except ProfileError as error:
            log.warning("%s", error)
            return profile

    def _check(self, new: Settings) -> None:
        room = free_bytes(self.device)[0] + self.ledger.used()
        if problem := self.sizes.problem(new.budget, str(new["scope"]), room):
            raise BudgetError(problem)

    # ------------------------------------------------------------------ monitoring

    @property
    def version(self) -> int:
        """Increases whenever a frame would look different."""
        return self.telemetry.version

    def frame(self, layer: int = 0, points: int = 240) -> Frame:
        """The data that the live deck draws; `layer` selects the co-activation matrix."""
        pace, layer = self.transfers.pace, max(0, min(self.shape.layers - 1, layer))
        frame = self.telemetry.frame(
            layer,
            points,
            self.expert_cache.places(),
            self.memory(),
            busy=self.busy,
            emulated=bool(pace),
            link_peak_gbps=pace.gbps if pace else self.link_gbps,
            lossy=self.miss.look(layer),
        )
        frame.pinned = tuple(sorted(self._controller.placed.pinned))
        return frame

    @property
    def closeness(self) -> float:
        """Largest deviation of exact logits from transformers' own, as a share of the largest; 0.0 = bit-identical."""
        return self._plan.closeness

    def memory(self) -> Memory:
        """Device bytes in use. Workspace is the size reserved for activations or, on CUDA, what torch measured if
        more."""
        return self.ledger.memory(self._store.bytes)

    def manifest(self) -> dict[str, object]:
        """The model, hardware, settings and versions that the figures of this load were measured with."""
        return describe(
            self._plan,
            self.model_hash,
            self._controller.applied,
            self.transfers.pace,
            self.link_gbps,
            self._threads.token.most,
        )

    def _answer(
        self, ids: list[int], sampling: Sampling, cancel: threading.Event, submitted_s: float, draw: Draw | None
    ) -> Iterator[Piece]:
        answer = Answer(
            self.prompt,
            ids,
            min(sampling.max_new_tokens, self.context - len(ids)),
            submitted_s,
            limited_by_context=sampling.max_new_tokens > self.context - len(ids),
        )
        sampler, cache, so_far = draw or Sampler(sampling, self.device), self._kv.fresh(), list(ids)
        self.predictor_host.request += 1
        self.meter.begin()
        self.recorder.has_lossy_state = False
        token = yield from self._read(ids, cache, answer, sampler, cancel)
        while token is not None and not answer.take(token):
            yield answer.piece()
            if cancel.is_set() or answer.full:
                break
            if self.recorder.has_lossy_state and not is_lossy(
                self.settings
            ):  # exact again: recompute the KV cache of the text so far
                cache, self.recorder.has_lossy_state = self._kv.fresh(), False
                yield from self._read(so_far, cache, answer, None, cancel)
            so_far.append(token)
            token, step = self._pass([token], cache, "decode", sampler, so_far)
            answer.count(step)
        yield Piece(
            "end",
            step=answer.last_step,
            stats=answer.stats(
                cancelled=cancel.is_set(),
                memory=self.memory(),
                seed=sampling.seed,
                closeness=self.closeness,
                audit=self.meter.end(ids, answer.tokens, answer.steps),
            ),
        )

    def _read(
        self, ids: list[int], cache: Any, answer: Answer, sampler: Draw | None, cancel: threading.Event
    ) -> Generator[Piece, None, int | None]:
        """Prefill an empty cache with a text; returns the next token when a sampler is given."""
        token: int | None = None
        for start in range(0, len(ids), self.sizes.chunk):
            if cancel.is_set():
                break
            chunk = ids[start : start + self.sizes.chunk]
            done = start + len(chunk)
            token, step = self._pass(chunk, cache, "prefill", sampler if done == len(ids) else None, ids)
            answer.count(step)
            yield Piece("prefill", done=done, total=len(ids), step=step)
        return token

    @torch.inference_mode()
    def _pass(
        self, ids: list[int], cache: Any, phase: Phase, sampler: Draw | None, so_far: list[int]
    ) -> tuple[int | None, StepRecord]:
        """One forward pass over `ids`; samples the next token when a sampler is given."""
        started_s = time.perf_counter()
        self._controller.apply(self._parts)
        self._threads.use(phase, len(ids))
        self.expert_cache.now += 1
        self.expert_cache.phase = phase
        self.recorder.begin()
        self.ledger.begin()
        self._step.begin(ids)
        began_s = time.perf_counter()
        inputs = torch.tensor([ids], device=self.device)
        logits = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        model_s = time.perf_counter() - began_s
        if sampler is not None:
            self.meter.keep(logits, self._controller.applied)
        token = sampler(so_far, logits) if sampler is not None else None
        step = self.recorder.end(
            phase,
            len(ids),
            started_s,
            model_s,
            self.ledger.used(),
            self.ledger.budget_bytes,
            self._controller.take_changes(),
        )
        if self.recorder.enabled:
            self.telemetry.add(step)
        step.spent(time.perf_counter() - started_s)
        return token, step
