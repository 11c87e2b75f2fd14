"""Settings of missing experts: where they are computed."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from core.settings.param import Param

MOST_THREADS = 256


@dataclass(frozen=True, slots=True)
class MissSettings:
    """Which processor computes an expert that is not on the device."""

    TITLE: ClassVar[str] = "Missing experts"

    placement: Annotated[
        Literal["wait", "host", "measured", "auto"],
        Param(
            "Where a missing expert is computed. wait: on the device, which waits until it "
            "is copied. host: by the processor, where it lies in host memory, while the device computes the resident "
            "ones. measured: as many of a layer's missing experts by each as takes the least time, by what copies and "
            "computing have taken so far, and only where tokens with it are faster than tokens that wait, which take "
            "turns at first and now and then. On a CPU, and in the fast arithmetic wherever it computes, no bit of an "
            "answer depends on it; of a model on a GPU in the reference arithmetic, the processor's sums have another "
            "order, and states are rounded to 8 bits where weights are: EXACT UP TO ROUNDING, two processors. An "
            "expert that the host computed may be copied into a slot afterwards, if the cache policy ranks it above "
            "another and the link is not behind. Within tokens that a GPU leads (gpu_decode) the host computes "
            "misses in the fast arithmetic, with host alone. Several rows at a time, of prompts, batches and guesses, "
            "wait, except on a CPU in the fast arithmetic with every expert in host memory. auto: measured, where this "
            "load can and no bit of an answer depends on it; else wait.",
            title="Where misses are computed",
            name="miss_placement",
        ),
    ] = "wait"
    host_threads: Annotated[
        int,
        Param(
            "Threads of their own that compute missing experts in host memory. More than leave the computing threads a "
            "processor each count as that many: none on a CPU that computes with all of them. 0: the computing threads "
            "do it themselves, together with the resident ones on a CPU, and on a GPU while that computes these.",
            title="Host threads",
            low=0,
            high=MOST_THREADS,
            step=1,
            unit="threads",
            advanced=True,
            active_when={"miss_placement": ("host", "measured", "auto")},
            resets_comparison=False,
        ),
    ] = 1
