"""A fake engine with the real one's public face, so that the dashboard's tests run anywhere in seconds."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from core.engine.arithmetic import Arithmetic
from core.engine.batch_request import BatchPiece, BatchRequest, Regrouped
from core.engine.lossy_check import check_allowed, with_substitute
from core.engine.quality.report import Quality
from core.engine.stop_text import StopText
from core.errors import ContextError
from core.metrics import METRICS, values
from core.metrics.limit import COLUMNS, Fewest, SpeedLimit, speed_limit
from core.policy.allocation.slot_allocation import check_needs
from core.policy.batching import Scheduler
from core.policy.throttle import Tried
from core.profile import Profile, check_model
from core.profile.trace.chunk import RANKED
from core.runtime.telemetry import RING, UNFETCHED
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.pins import Pins
from core.settings.sampling import Sampling
from core.types import AnswerStats, Chat, Frame, Memory, Outcome, Piece, Residence, StepRecord, TokenLogprob, Transfer
from tests import fake_lossy
from tests.fake_models import MB, SHAPE, is_pack

PAGE = 4096


class FakeEngine:
    """Answers with words from a list; its caches are random numbers from a seeded generator.

    Of a pack (a folder with moestro.json) the upper half of each layer's experts is on disk alone, unless the whole of
    host memory was asked for.
    """

    closeness: float | None = 0.0
    arithmetic = Arithmetic()
    one_at_a_time = ""
    weights = ""
    on_gpu = False
    takes_chats = True
    tried = Tried()
    text_to_text = False
    takes_tools = False
    opens_reasoning = False
    says_once = False  # ends where its words end; else it says them again and again
    words: Sequence[str] = tuple(
        f"{word} " for word in "the cache keeps what the router asks for and fetches what it lacks .".split()
    )

    def __init__(self, spec: LoadSpec, token_s: float = 0.02) -> None:
        self.spec, self.shape, self.context, self.token_s = spec, SHAPE, spec.context or 512, token_s
        self.settings, self.version, self.moment, self.busy = spec.settings, 0, 0, False
        self.model_name, self.model_hash = spec.model, "fake"
        self.profile: Profile | None = None
        self.has_disk = is_pack(spec.model) and spec.host != "all"
        self._rng, self._steps, self._born = np.random.default_rng(0), [], time.perf_counter()
        self._marks: list[tuple[int, str]] = []
        self._pending: dict[str, object] = {}
        self.waiting: list[Quality] = []  # what `audit` will say, one after the other
        self.quality: Quality | None = None
        self._tainted = False  # something was changed before in this answer
        self.kept = {"probs": False, "ranks": False, "tokens": False}
        self._request = 0

    @classmethod
    def load(
        cls,
        spec: LoadSpec,
        progress: Callable[[str, float], None] = lambda text, share: None,
        cancel: threading.Event | None = None,
        profile: Callable[[str], Profile | None] | None = None,
    ) -> FakeEngine:
        progress("Reading the model", 0.5)
        progress("Ready", 1.0)
        engine = cls(spec)
        engine.profile = profile(engine.model_hash) if profile is not None else None
        return engine

    def use_profile(self, profile: Profile | None) -> None:
        if profile is not None:
            check_model(profile, self.model_hash, self.model_name)
        self.profile = profile

    def unload(self) -> None:
        self.version += 1

    @property
    def unscored(self) -> int:
        return len(self.waiting)

    def audit(self, stop: threading.Event | None = None) -> Quality | None:
        if not self.waiting or (stop is not None and stop.is_set()):
            return None
        self.quality, self.version = self.waiting.pop(0), self.version + 1
        return self.quality

    def keep(self, *, probs: bool, ranks: bool, tokens: bool) -> None:
        self.kept = {"probs": probs, "ranks": ranks, "tokens": tokens}

    def change(self, changes: Mapping[str, object]) -> Settings:
        new = with_substitute(self.settings.with_(changes), changes, self.profile)
        check_needs(new, self.profile)
        check_allowed(new, SHAPE, self.profile)
        diff = self.settings.diff(new)
        self._marks += [(len(self._steps), f"{n} {self.settings[n]} -> {v}") for n, v in diff.items()]
        self._pending |= diff
        self.settings, self.version = new, self.version + 1
        return new

    def count_tokens(self, messages: Sequence[Mapping[str, Any]] | str | Chat) -> int:
        said = messages.messages if isinstance(messages, Chat) else messages
        return sum(len(m["content"].split()) + 3 for m in ([{"content": said}] if isinstance(said, str) else said))

    def check_length(self, messages: Sequence[Mapping[str, Any]] | str | Chat) -> None:
        said = messages.messages if isinstance(messages, Chat) else messages
        parts = [said] if isinstance(said, str) else [m["content"] for m in said]
        if sum(map(len, parts)) > 100 * self.context:
            raise ContextError("The text has more characters than the context can hold. Shorten it.")

    def _ranked(self) -> np.ndarray[Any, Any]:
        """What a predictor of all experts names in each layer for the next one: the higher the id, the likelier; none
        where the settings have no prefetcher."""
        layers = range(SHAPE.layers) if self.settings["predictor"] != "none" else range(0)
        return np.array(
            [(0, at, (at + 1) % SHAPE.layers, e, e / SHAPE.experts) for at in layers for e in range(SHAPE.experts)],
            RANKED,
        )

    def _step(self, phase: str, tokens: int) -> StepRecord:
        s, rng, now = SHAPE, self._rng, time.perf_counter() - self._born
        ids = rng.random((s.layers, tokens, s.experts)).argsort(-1)[..., : s.top_k]
        share = self.settings.cache.budget.share or 0.5
        pairs = [(layer, e) for layer in range(s.layers) for e in sorted(set(ids[layer].ravel().tolist()))]
        outcome = np.where(
            rng.random(len(pairs)) < share,
            Outcome.HIT,
            [Outcome.MISS_DISK if self.on_disk(e) else Outcome.MISS for _, e in pairs],
        ).astype(np.uint8)
        lossy = None
        if self.settings.lossy.active:
            lossy, outcome = fake_lossy.act(self.settings, s, ids, pairs, outcome, rng)
        self._tainted = lossy is not None and (self._tainted or lossy.changed > 0)
        misses = [p for p, o in zip(pairs, outcome, strict=True) if o in (Outcome.MISS, Outcome.MISS_DISK)]
        read = sum(self.on_disk(e) for _, e in misses)
        step = StepRecord(
            index=len(self._steps),
            phase=phase,
            tokens=tokens,
            started_s=now,
            total_ms=20.0,
            compute_ms=12.0,  # type: ignore[arg-type]
            stall_ms=6.0,
            idle_ms=2.0,
            copy_ms=7.0,
            ids=ids.astype(np.int16),
            layer=np.array([p[0] for p in pairs], np.int16),
            expert=np.array([p[1] for p in pairs], np.int16),
            outcome=outcome,
            demand_bytes=len(misses) * s.expert_bytes,
            disk_bytes=read * -(-s.expert_bytes // PAGE) * PAGE,
            slots=int(share * s.total),
            device_bytes=self.memory().used,
            budget_bytes=self.memory().budget,
            changes=self._pending,
            ranked=self._ranked() if self.kept["ranks"] else None,
            lossy=lossy,
            exact=not self._tainted,
            rows=((self._request, tokens),),
            transfers=tuple(
                Transfer(
                    layer,
                    e,
                    s.expert_bytes,
                    True,
                    now,
                    now + 0.001,
                    now + 0.002,
                    phase,  # type: ignore[arg-type]
                    "disk" if self.on_disk(e) else "host",
                )
                for layer, e in misses
            ),
        )
        self._pending = {}
        self._steps.append(step)
        self.version += 1
        return step

    def generate_many(
        self,
        requests: Iterable[BatchRequest | None],
        limit: int,
        cancel: threading.Event | None = None,
        *,
        by_row: bool = False,
        scheduler: Scheduler | None = None,
        pipelined: bool = False,
    ) -> Iterator[BatchPiece]:
        """A token of each in turn."""
        source, running = iter(requests), dict[Hashable, Iterator[Piece]]()
        while True:
            for one in islice(source, limit - len(running)):
                running[one.key] = self.generate(one.messages, one.sampling, cancel)
            if not running:
                return
            for key, pieces in list(running.items()):
                piece = next(pieces)
                if piece.kind == "end":
                    running.pop(key)
                yield BatchPiece(key, piece)

    @property
    def regrouped(self) -> Sequence[Regrouped]:
        return [Regrouped(0.25, 12.0, 9.5)]

    def generate(
        self,
        messages: Sequence[Mapping[str, Any]] | str | Chat,
        sampling: Sampling,
        cancel: threading.Event | None = None,
        *,
        reuse: bool = False,
        reading: Callable[[Piece], None] | None = None,
    ) -> Iterator[Piece]:
        words, stop = self.words, StopText(sampling.stop)
        start, n, reason = time.perf_counter(), 0, "length"
        sampling = sampling.drawn()
        prompt = self.count_tokens(messages)
        self.busy, self._tainted, first = True, False, len(self._steps)
        self._request += 1
        try:
            if reading is not None:
                reading(Piece("prefill", done=prompt // 2, total=prompt))
            yield Piece("prefill", done=prompt, total=prompt, step=self._step("prefill", prompt))
            for n in range(1, sampling.max_new_tokens + 1):
                if self.says_once and n > len(words):
                    n, reason = n - 1, "stop"
                    break
                if cancel is not None and cancel.wait(self.token_s):
                    reason = "cancelled"
                    break
                word = words[(n - 1) % len(words)]
                logprob = None
                if sampling.logprobs is not None:
                    logprob = TokenLogprob(
                        word, -0.5, ((word, -0.5), ("or ", -1.5), ("not ", -2.5))[: sampling.logprobs]
                    )
                step = self._step("decode", 1)
                yield Piece("token", text=stop.feed(word), token=n, step=step, logprob=logprob)
                if stop.found:
                    reason = "stop"
                    break
        finally:
            self.busy = False
        stats = self._stats(prompt, n, time.perf_counter() - start, self._steps[first:])
        stats = dataclasses.replace(stats, reason=reason, seed=sampling.seed, stop=stop.found)
        yield Piece("end", text=stop.rest(), stats=stats)

    def _stats(self, prompt: int, n: int, seconds: float, every: list[StepRecord]) -> AnswerStats:
        """Of an answer of n tokens."""
        steps = [s for s in self._steps[-n:] if s.phase == "decode"]
        hits, requests = sum(s.hits for s in steps), sum(s.requests for s in steps)
        return AnswerStats(
            prompt_tokens=prompt,
            new_tokens=n,
            ttft_ms=20.0,
            tpot_ms=20.0,
            tok_s=n / seconds,
            hit_rate=hits / requests if requests else None,
            prefill_hit_rate=0.5,
            demand_bytes=sum(s.demand_bytes for s in steps),
            prefetch_bytes=0,
            wasted_bytes=0,
            disk_misses=sum(s.disk_misses for s in steps),
            disk_bytes=sum(s.disk_bytes for s in steps),
            compute_ms=12.0,
            stall_ms=6.0,
            idle_ms=2.0,
            budget_bytes=self.memory().budget,
            device_bytes_peak=self.memory().used,
            exact=all(s.exact for s in every),
            emulated=self.settings["link"] == "emulated",
            reason="length",
            changed=sum(s.changed for s in every),
            assignments=sum(s.assignments for s in every),
            closeness=self.closeness,
            **self.arithmetic.stats(),
            weights=self.weights,
            audit=self._to_score(every),
        )

    def _to_score(self, steps: list[StepRecord]) -> int:
        if not any(s.changed for s in steps) or not self.settings["quality_rate"]:
            return 0
        self.waiting.append(fake_lossy.scored(len(self._steps), steps))
        return len(self._steps)

    def on_disk(self, expert: int) -> bool:
        return self.has_disk and expert >= SHAPE.experts // 2

    def memory(self) -> Memory:
        share = self.settings.cache.budget.share or 0.5
        experts = int(share * SHAPE.total) * SHAPE.expert_bytes
        return Memory(
            dense=4 * MB,
            experts=experts,
            kv=MB // 2,
            kv_reserved=MB,
            workspace=MB,
            budget=6 * MB + experts,
            device_total=1000 * MB,
            device_free=500 * MB,
            host=SHAPE.total * SHAPE.expert_bytes // (2 if self.has_disk else 1),
            peak=6 * MB + experts,
        )

    def manifest(self) -> dict[str, object]:
        link: dict[str, object] = {"link": "measured"}
        if self.settings["link"] == "emulated":
            gbps, latency_us = self.settings["link_gbps"], self.settings["link_latency_us"]
            link = {"link": "emulated", "link_gbps": gbps, "link_latency_us": latency_us}
        return {
            "model": self.model_name,
            "model_hash": self.model_hash,
            "format": self.spec.format,
            "device": "cpu",
            **link,
            "exact": self.closeness == 0.0 and not self.settings.lossy.active,
            "closeness": self.closeness,
            **self.arithmetic.facts(),
        }

    def limit(self, fewest: Fewest | None = None, points: int = RING) -> SpeedLimit:
        tail, known = self._steps[-RING:], {one.name: one for one in METRICS}
        columns = {name: np.array(values(tail, known[name]), float) for name in COLUMNS if name in known}
        columns["index"] = np.array([one.index for one in tail], float)
        columns["decode"] = np.array([one.phase == "decode" for one in tail], float)
        columns["unfetched"] = np.array([np.isin(one.outcome, UNFETCHED).sum() for one in tail], float)
        return speed_limit(columns, fewest, SHAPE.expert_bytes, points)

    def frame(self, layer: int = 0, points: int = 240, fewest: Fewest | None = None) -> Frame:
        s, tail = SHAPE, self._steps[-points:]
        place = (self._rng.random((s.layers, s.experts)) < (self.settings.cache.budget.share or 0.5)).astype(
            np.uint8
        ) * 2
        if self.has_disk:
            upper = place[:, s.experts // 2 :]
            upper[upper == Residence.HOST] = Residence.DISK
        coactivation = np.zeros((s.experts, s.experts), np.uint32)
        for step in self._steps[-500:]:
            for row in step.ids[layer]:
                coactivation[np.ix_(row, row)] += 1
        np.fill_diagonal(coactivation, 0)

        columns = {one.name: np.array(values(tail, one), one.array) for one in METRICS if one.frame}
        columns["step"] = np.array([t.index for t in tail], np.int32)
        columns["decode"] = np.array([t.phase == "decode" for t in tail], np.uint8)
        return Frame(
            version=self.version,
            shape=s,
            busy=self.busy,
            place=place,
            hit_rate=np.full(s.layers, 0.6, np.float32),
            coactivation=coactivation,
            window=50,
            columns=columns,
            marks=list(self._marks),
            memory=self.memory(),
            tok_s=48.0,
            tpot_ms=20.8,
            hit=0.61,
            link_gbps=0.4,
            link_peak_gbps=0.6,
            link_limit_gbps=1.0,
            passes=50,
            emulated=self.settings["link"] == "emulated",
            exact=tail[-1].exact if tail else True,
            limit=self.limit(fewest, points),
            lossy=fake_lossy.seen(self.settings, s, self._steps, tail) if self.settings.lossy.active else None,
            pinned=tuple(
                layer * s.experts + expert
                for layer, expert in Pins.parse(str(self.settings["pins"])).named
                if layer < s.layers and expert < s.experts
            ),
        )
