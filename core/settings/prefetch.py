"""Settings of prefetching: who predicts, and when predictions are not fetched."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from core.settings.param import Choice, Param


@dataclass(frozen=True, slots=True)
class PrefetchSettings:
    """What is fetched before it is needed."""

    TITLE: ClassVar[str] = "Prefetching"

    predictor: Annotated[Choice, Param("Which experts are fetched before they are needed.", title="Prefetcher")] = (
        Choice("none")
    )
    deadline: Annotated[
        bool,
        Param(
            "Do not fetch ahead what could not arrive before its layer is reached, "
            "by the times measured so far: the link stays free for what is asked for.",
            title="Skip late prefetches",
            name="prefetch_deadline",
            advanced=True,
        ),
    ] = False
    guard: Annotated[
        bool,
        Param(
            "What is fetched ahead takes a resident expert's slot only if it is half again as likely to be needed as "
            "that one, by how many of the last passes used it. Off: it takes the slot of the expert the policy would "
            "evict, however unlikely it is itself.",
            title="Protect likely experts from prefetches",
            name="prefetch_guard",
            advanced=True,
        ),
    ] = True
    beside: Annotated[
        bool,
        Param(
            "What is fetched ahead goes into the slots that bypass sets aside, as far as they go, and no resident "
            "leaves for it. Meant for several answers at a time, which need most experts of every layer. Off: it takes "
            "the slot of a resident. Has an effect while bypass is on and each layer has its own slots.",
            title="Prefetch beside the cache",
            name="prefetch_beside",
            active_when={"bypass": (True,)},
            advanced=True,
        ),
    ] = False
    auto: Annotated[
        bool,
        Param(
            "Fetch ahead only where tokens are faster with it: blocks of tokens with it and without it take turns, at "
            "first and again after a while, and the faster way stays. Nothing is fetched ahead where the two cannot be "
            "told apart, or where copies are waited for less than 3 % of the time.",
            title="Pause when it does not pay",
            name="prefetch_auto",
            advanced=True,
        ),
    ] = False

    @property
    def compares(self) -> bool:
        """Whether tokens with prefetching and without it are compared."""
        return self.auto and self.predictor.name != "none"
