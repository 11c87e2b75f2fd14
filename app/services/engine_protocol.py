"""The engine's interface for the dashboard, implemented by `core.engine.Engine` and `tests.fakes.FakeEngine`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from core.engine.arithmetic import Arithmetic
from core.engine.batch_request import BatchPiece, BatchRequest, Regrouped
from core.engine.quality.report import Quality
from core.policy.batching import Scheduler
from core.profile import Profile
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Chat, Fit, Frame, Memory, ModelShape, Piece

Progress = Callable[[str, float], None]
Estimate = Callable[[LoadSpec], Fit]
Profiles = Callable[[str], Profile | None]  # finds the profile of the model with this hash
Prompt = Sequence[Mapping[str, Any]]
AnyPrompt = Prompt | str | Chat  # a chat, a text to continue, or a chat with tools


class EngineProtocol(Protocol):
    """The public face of the engine."""

    @classmethod
    def load(
        cls,
        spec: LoadSpec,
        progress: Progress = ...,
        cancel: threading.Event | None = None,
        profile: Profiles | None = None,
    ) -> Self:
        """Load a model; `profile` finds the profile for a model hash. On error, or when `cancel` is set, frees
        everything and raises MoestroError.
        """
        ...

    @property
    def shape(self) -> ModelShape: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def context(self) -> int: ...
    @property
    def version(self) -> int: ...

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on a GPU."""

    @property
    def weights(self) -> str:
        """The format that weights were rounded to; "" = they are the checkpoint's own."""

    @property
    def closeness(self) -> float | None:
        """Largest difference of exact logits from transformers' own, as a share of the largest logit; 0.0 =
        bit-identical, None = not measured.
        """
        ...

    @property
    def arithmetic(self) -> Arithmetic:
        """What computes the model, and its distance from the reference."""
        ...

    @property
    def takes_chats(self) -> bool:
        """Whether the model answers messages; others go on with texts."""
        ...

    @property
    def text_to_text(self) -> bool:
        """Whether the model writes one text for another: it sees the last message alone."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Whether the model's chat template lists tools."""
        ...

    @property
    def opens_reasoning(self) -> bool:
        """Whether every answer to a chat starts in the middle of the model's reasoning."""
        ...

    def generate(
        self,
        messages: AnyPrompt,
        sampling: Sampling,
        cancel: threading.Event | None = None,
        *,
        reuse: bool = False,
        reading: Callable[[Piece], None] | None = None,
    ) -> Iterator[Piece]:
        """Stream an answer; with `reuse`, continue from the KV caches kept of earlier ones. `reading` gets, layer by
        layer, how much of the prompt is read. Raises ContextError before the first piece when the prompt is too long.
        """
        ...

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
        """Answer several prompts together; None = there is none now. As `core.engine.Engine.generate_many`."""
        ...

    @property
    def one_at_a_time(self) -> str:
        """Why several prompts, or long ones, are answered one at a time; "" = no reason is known."""
        ...

    @property
    def regrouped(self) -> Sequence[Regrouped]:
        """What the scheduler did, the last times."""
        ...

    @property
    def model_hash(self) -> str: ...
    @property
    def profile(self) -> Profile | None: ...

    @property
    def unscored(self) -> int:
        """Number of answers that `audit` can still score."""
        ...

    @property
    def quality(self) -> Quality | None:
        """Quality loss from lossy options, over the last scored answers."""
        ...

    def audit(self, stop: threading.Event | None = None) -> Quality | None:
        """Score the longest-waiting answer against the exact model; None when there is none or it was interrupted.
        Other users of the model have priority.
        """
        ...

    def use_profile(self, profile: Profile | None) -> None:
        """Use a calibration profile, or none. Raises MoestroError and keeps the old one."""
        ...

    def change(self, changes: Mapping[str, object]) -> Settings:
        """Change live settings, from any thread. Raises MoestroError and changes nothing."""
        ...

    def frame(self, layer: int = 0, points: int = 240) -> Frame: ...
    def memory(self) -> Memory: ...
    def manifest(self) -> dict[str, object]: ...
    def count_tokens(self, messages: AnyPrompt) -> int: ...

    def check_length(self, messages: AnyPrompt) -> None:
        """Raises ContextError for a prompt far too long for the context, without tokenising it."""
        ...

    def keep(self, *, probs: bool, ranks: bool, tokens: bool) -> None:
        """From now on step records include the routers' distributions, the prefetcher's ranking, and token ids, as
        selected.
        """
        ...

    def unload(self) -> None: ...
