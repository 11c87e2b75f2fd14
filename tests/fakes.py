"""A fake engine with the real one's public face, so that the dashboard's tests run anywhere in seconds."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from core.engine.batch_request import BatchPiece, BatchRequest, Regrouped
from core.engine.lossy_check import check_allowed, with_substitute
from core.engine.quality.report import Quality
from core.engine.stop_text import StopText
from core.errors import ContextError
from core.policy.allocation.slot_allocation import check_needs
from core.policy.batching import Scheduler
from core.policy.throttle import Tried
from core.profile import Profile, check_model
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Begun, Chat, Piece, TokenLogprob
from tests.fake_models import SHAPE
from tests.fake_passes import FakePasses


class FakeEngine(FakePasses):
    """Answers with words from a list; its caches are random numbers from a seeded generator."""

    one_at_a_time = ""
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
        super().__init__(spec)
        self.context, self.token_s = spec.context or 512, token_s
        self.moment, self.busy = 0, False
        self.model_name, self.model_hash = spec.model, "fake"
        self.profile: Profile | None = None
        self.quality: Quality | None = None

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
    def scoring(self) -> float:
        return 0.25

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
        new = with_substitute(self.settings.with_(changes), changes, self.profile, SHAPE)
        check_needs(new, self.profile)
        check_allowed(new, SHAPE, self.profile)
        diff = self.settings.diff(new)
        self._marks += [(len(self._steps), f"{n} {self.settings[n]} -> {v}") for n, v in diff.items()]
        self._pending |= diff
        self.settings, self.version = new, self.version + 1
        return new

    def count_tokens(self, messages: Sequence[Mapping[str, Any]] | str | Chat | Begun) -> int:
        if isinstance(messages, Begun):
            return self.count_tokens(messages.asked) + len(messages.text.split())
        said = messages.messages if isinstance(messages, Chat) else messages
        return sum(len(m["content"].split()) + 3 for m in ([{"content": said}] if isinstance(said, str) else said))

    def check_length(self, messages: Sequence[Mapping[str, Any]] | str | Chat | Begun) -> None:
        messages = messages.asked if isinstance(messages, Begun) else messages
        said = messages.messages if isinstance(messages, Chat) else messages
        parts = [said] if isinstance(said, str) else [m["content"] for m in said]
        if sum(map(len, parts)) > 100 * self.context:
            raise ContextError("The text has more characters than the context can hold. Shorten it.")

    def generate_many(
        self,
        requests: Iterable[BatchRequest | None],
        limit: int,
        cancel: threading.Event | None = None,
        *,
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
        messages: Sequence[Mapping[str, Any]] | str | Chat | Begun,
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
        begun = len(messages.ids) if isinstance(messages, Begun) else 0
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
                word = words[(begun + n - 1) % len(words)]
                logprob = None
                if sampling.logprobs is not None:
                    logprob = TokenLogprob(
                        word, -0.5, ((word, -0.5), ("or ", -1.5), ("not ", -2.5))[: sampling.logprobs]
                    )
                step = self._step("decode", 1)
                yield Piece("token", text=stop.feed(word), token=begun + n, step=step, logprob=logprob)
                if stop.found:
                    reason = "stop"
                    break
        finally:
            self.busy = False
        stats = self._stats(prompt, n, time.perf_counter() - start, self._steps[first:])
        stats = dataclasses.replace(stats, begun_tokens=begun, reason=reason, seed=sampling.seed, stop=stop.found)
        yield Piece("end", text=stop.rest(), stats=stats)

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
