"""What is read of a loaded engine: its parts, the model, settings, figures. Any thread may read it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from core.engine.arithmetic import Arithmetic, known
from core.engine.loading import LoadedModel
from core.engine.manifest import describe
from core.engine.model_access import ModelAccess
from core.engine.quality.report import Quality
from core.engine.wiring import Wiring
from core.metrics.limit import Fewest, SpeedLimit
from core.policy.throttle import Tried
from core.profile import Profile
from core.settings.config import Settings
from core.types import Begun, Chat, Frame, Memory

MOMENTS = 4  # a second in which frames of a long pass differ


class EngineFacts:
    """The parts of an engine, and what they say."""

    def __init__(self, loaded: LoadedModel, wiring: Wiring) -> None:
        self.loaded, self.wiring, parts = loaded, wiring, wiring.parts
        self.spec, self.context, self.device = loaded.plan.spec, loaded.plan.context, loaded.device
        self.model_name, self.model_hash = loaded.plan.spec.model, loaded.model_hash
        self.model, self.prompt, self.sizes, self.shape = loaded.model, loaded.prompt, loaded.sizes, loaded.shape
        self.expert_cache, self.transfers, self.predictor_host = (
            parts.memory.expert_cache,
            parts.memory.transfers,
            parts.prediction.predictor_host,
        )
        self.keep = wiring.parts.prediction.capture
        """Chooses what step records contain beside the routing."""
        self._controller, self.parts = wiring.controller, parts
        self.access = ModelAccess(lambda: self._controller.apply(parts), wiring.open_session, self._changed)
        self.arithmetic = _arithmetic(loaded, wiring)
        """What computes, and how far its answers are from the reference's."""

    @property
    def one_at_a_time(self) -> str:
        """Why `generate_many` answers prompts, or long ones, one at a time, for the user; "" = no reason is known. What
        the model allows is tried before prompts are first answered together."""
        return self.wiring.trial.reason

    def count_tokens(self, messages: Sequence[Mapping[str, Any]] | str | Chat | Begun) -> int:
        """Number of prompt tokens of a chat."""
        return len(self.prompt.tokens(messages))

    def check_length(self, messages: Sequence[Mapping[str, Any]] | str | Chat | Begun) -> None:
        """Raises ContextError for a text far too long for the context, without tokenising it."""
        self.prompt.check(messages, self.context)

    @property
    def takes_chats(self) -> bool:
        """Whether the model answers messages: it has a chat template, or writes a text for a text. Others go on with
        texts."""
        return self.text_to_text or self.prompt.tokenizer.chat_template is not None

    @property
    def text_to_text(self) -> bool:
        """Whether the model writes one text for another: it sees the last message alone."""
        return self.prompt.start is not None

    @property
    def takes_tools(self) -> bool:
        """Whether the model's chat template tells it of tools."""
        return self.prompt.takes_tools

    @property
    def opens_reasoning(self) -> bool:
        """Whether every answer to a chat starts in the middle of the model's reasoning."""
        return self.prompt.opens_reasoning

    @property
    def busy(self) -> bool:
        """Whether an answer is being generated, or a measurement session is open."""
        return self.access.busy

    @property
    def unscored(self) -> int:
        """Number of answers that `audit` has yet to score."""
        return self.wiring.meter.due

    @property
    def scoring(self) -> float:
        """Share of the next one that it has read."""
        return self.wiring.meter.read

    @property
    def quality(self) -> Quality | None:
        """The quality cost of lossy options over the last scored answers; None before any was scored."""
        return self.wiring.meter.quality

    @property
    def settings(self) -> Settings:
        """The requested settings; they take effect from the next forward pass on."""
        return self._controller.wanted

    @property
    def profile(self) -> Profile | None:
        """The calibration results of this model."""
        return self._controller.profile

    @property
    def version(self) -> int:
        """Increases whenever a frame would look different."""
        return self.parts.telemetry.version

    def limit(self, fewest: Fewest | None = None) -> SpeedLimit:
        """The share of the speed limit over the last decoded tokens. `fewest`: what the best cache policy would have
        missed of them, where that is known."""
        return self.parts.telemetry.limit(fewest)

    @property
    def moment(self) -> int:
        """Changes while one pass takes long, MOMENTS times a second; 0 where none does."""
        underway = self.parts.recorder.underway() if self.busy else None
        return 0 if underway is None else int(MOMENTS * underway.seconds)

    def frame(self, layer: int = 0, points: int = 240, fewest: Fewest | None = None) -> Frame:
        """The data that the live deck draws; `layer` selects the co-activation matrix, `fewest` as in `limit`."""
        pace, layer = self.transfers.pace, max(0, min(self.shape.layers - 1, layer))
        frame = self.parts.telemetry.frame(
            layer,
            points,
            self.expert_cache.places(),
            self.memory(),
            busy=self.busy,
            emulated=bool(pace),
            link_limit_gbps=pace.gbps if pace else self.wiring.parts.memory.link_gbps,
            lossy=self.parts.prediction.miss.look(layer),
            fewest=fewest,
        )
        frame.pinned = tuple(sorted(self._controller.placed.pinned))
        frame.compared = self.tried.prefetching
        frame.underway = self.parts.recorder.underway() if frame.busy else None
        return frame

    @property
    def tried(self) -> Tried:
        """What was compared while answers were written."""
        ahead, host = self.parts.prediction.throttle, self.parts.host.throttle
        return Tried(ahead.seen, ahead.waits, host.seen, host.predicted)

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def weights(self) -> str:
        """The format that weights were rounded to, for the badge; "" = they are the checkpoint's own."""
        return self.loaded.plan.weights

    @property
    def closeness(self) -> float | None:
        """Largest deviation of exact logits from transformers' own, as a share of the largest; 0.0 = bit-identical,
        None = not measured yet."""
        return self.arithmetic.closeness(self.loaded.plan.closeness)

    def memory(self) -> Memory:
        """Device bytes in use. Workspace is the size reserved for activations or, on CUDA, what torch measured if
        more."""
        store = self.loaded.store
        return self.parts.memory.ledger.memory(store.bytes, store.unpinned_bytes)

    def manifest(self) -> dict[str, object]:
        """The model, hardware, settings and versions that the figures of this load were measured with."""
        wiring = self.wiring
        return describe(
            self.loaded.plan,
            self.model_hash,
            self._controller.applied,
            self.transfers.pace,
            wiring.parts.memory.link_gbps,
            wiring.answering.threads.token.most,
            self.one_at_a_time,
            self.arithmetic,
        )

    def _changed(self) -> None:
        self.parts.telemetry.version += 1


def _arithmetic(loaded: LoadedModel, wiring: Wiring) -> Arithmetic:
    hooked = wiring.answering.hooked
    if not hooked.fast_experts:
        return Arithmetic("reference", hooked.fallback)
    name: Literal["fast", "fast_experts"] = "fast" if hooked.program is not None else "fast_experts"
    return Arithmetic(name, hooked.fallback, known(loaded.plan, loaded.model_hash))
