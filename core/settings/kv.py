"""Settings of KV caches after their answers."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from core.settings.param import Param


@dataclass(frozen=True, slots=True)
class KVSettings:
    """What of a chat is kept, so that its next turn need not read it again."""

    TITLE: ClassVar[str] = "Chats kept ready"

    chats: Annotated[
        int,
        Param(
            "How many chats' KV caches are kept after their answers. The next turn, a regenerated answer, an edit or a "
            "request of the API continues from the longest beginning that it shares with one of them, token by token, "
            "and reads only the rest. The last one used stays in the device memory reserved for the KV cache; the "
            "others wait in host memory, beside the budget, and the oldest are dropped when that runs short. What is "
            "continued was computed in other pieces than a prompt read whole, so that in the reference arithmetic "
            "logits may differ from that in their last bits. 0: every prompt is read anew.",
            title="Chats kept",
            name="kv_chats",
            low=0,
            high=64,
            step=1,
            unit="chats",
            advanced=True,
            resets_comparison=False,
        ),
    ] = 4
