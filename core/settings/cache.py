"""Settings of the expert cache: its size, its scope, who is evicted, who is pinned."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from core.settings.budget import Budget
from core.settings.param import Choice, Param
from core.settings.pins import Pins


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Which experts have a slot."""

    TITLE: ClassVar[str] = "Cache"

    budget: Annotated[
        Budget,
        Param(
            "Device memory Moestro may use: a share of all routed experts (50%) plus what the "
            "rest of the model needs, or total bytes (6.5GB). Moving it resizes the cache between two tokens.",
            title="Memory budget",
            parse=Budget.parse,
            resets_comparison=False,  # the slots that it pays for do
        ),
    ] = Budget(share=0.5)
    eviction: Annotated[
        Choice, Param("Which expert leaves the device when another needs its slot.", title="Cache policy")
    ] = Choice("lru")
    host_eviction: Annotated[
        Choice,
        Param(
            "Which expert leaves host memory when another needs its place. Has an effect where a pack is loaded "
            "with room for only some of its experts there.",
            title="Host cache policy",
            advanced=True,
            resets_comparison=False,
        ),
    ] = Choice("lru")
    scope: Annotated[
        Literal["layer", "global"],
        Param(
            "Whether each layer has its own slots, or all layers share one pool.", title="Cache scope", advanced=True
        ),
    ] = "layer"
    layer_slots: Annotated[
        Choice,
        Param(
            "How the slots are divided among layers that each have their own.",
            title="Slots per layer",
            advanced=True,
            active_when={"scope": ("layer",)},
        ),
    ] = Choice("uniform")
    split: Annotated[
        Choice,
        Param(
            "How much of a cached expert stays on the device when others need its slots. Has an effect where the model "
            "was loaded with several blocks per expert.",
            title="Resident part",
            in_blocks=True,
            advanced=True,
        ),
    ] = Choice("whole")
    buffer: Annotated[
        int,
        Param(
            "Experts that fit into the buffer beside the cache, out of the same budget: prefetches go there, and what "
            "is fetched of experts whose top is cached. At least as many as a token uses in a layer; 0 = as many. "
            "Has an effect where the model was loaded with several blocks per expert.",
            title="Prefetch buffer",
            low=0,
            high=4096,
            step=1,
            unit="experts",
            in_blocks=True,
            advanced=True,
        ),
    ] = 0
    bypass: Annotated[
        bool,
        Param(
            "A missing expert that is worth less to the cache policy than every expert its layer holds is computed and "
            "not kept. As many slots as a token uses in a layer are set aside for it, which all layers share. LRU and "
            "FIFO keep every newcomer: to them it is only the loss of these slots. Off: every missing expert takes "
            "another one's slot first.",
            title="Bypass",
            advanced=True,
            active_when={"scope": ("layer",)},
        ),
    ] = False
    pins: Annotated[
        Pins,
        Param(
            "Experts that are loaded at once and stay: layer:expert pairs like 0:3, 5:17, or top:2 "
            "for the 2 that a profile saw used most in every layer. Empty = none.",
            title="Pinned experts",
            parse=Pins.parse,
            advanced=True,
        ),
    ] = Pins()
