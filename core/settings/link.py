"""Settings of the link that experts are copied, or read, over."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from core.settings.param import Param
from core.system.command import COMMAND


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """This machine's own link, or an emulated one."""

    TITLE: ClassVar[str] = "Link"

    kind: Annotated[
        Literal["auto", "own", "emulated"],
        Param(
            "Which link the copies go over: this machine's own, or an emulated one that paces "
            "them to the bandwidth below and marks every figure as emulated. auto = own, but for the bundled demo "
            "model an emulated one, as slow for it as PCIe is for a large model: this is measured at the first load, "
            f"kept unless a later one is far faster, and shown by `{COMMAND} doctor`, so that loads can be compared.",
            title="Link",
            name="link",
            advanced=True,
            resets_comparison=False,
        ),
    ] = "auto"
    gbps: Annotated[
        float,
        Param(
            "Bandwidth of the emulated link.",
            title="Emulated bandwidth",
            low=0.001,
            high=128.0,
            step=0.01,
            unit="GB/s",
            name="link_gbps",
            advanced=True,
            active_when={"link": ("emulated",)},
            resets_comparison=False,
        ),
    ] = 1.0
    latency_us: Annotated[
        float,
        Param(
            "Latency added to every copy of the emulated link.",
            title="Emulated latency",
            low=0.0,
            high=10000.0,
            step=1.0,
            unit="us",
            name="link_latency_us",
            advanced=True,
            active_when={"link": ("emulated",)},
            resets_comparison=False,
        ),
    ] = 10.0
    decode: Annotated[
        Literal["auto", "host", "device", "graph"],
        Param(
            "How one chat's next token is computed on a GPU. host: the host waits for every layer's router, and copies "
            "missing experts into slots before they are computed. device: the GPU looks up by itself where each expert "
            "is, and reads missing ones out of pinned host memory as it computes with them; the host learns at the "
            "token's end what was chosen, and caches by the same policies. graph: the same, and the whole token is one "
            "CUDA graph, where every layer's attention keeps the whole context. Both need the Triton kernels, every "
            "expert whole in pinned host memory (in any, where the host computes missing ones), no prefetcher, nothing "
            "lossy and no emulated link; where that is not so, tokens are computed as with host, and the log says why. "
            "Prompts, and passes over several texts, always are. auto: graph wherever it can be, in silence where it "
            "cannot. On an H100 a token of the shape of Qwen3 30B-A3B in int4 took 6 ms as a graph and 45 ms led by "
            "the host (docs/gpu.md); "
            f"`{COMMAND} accept` measures it on yours.",
            title="Decoding led by",
            name="gpu_decode",
            advanced=True,
            on_gpu=True,
            resets_comparison=False,
        ),
    ] = "auto"

    @property
    def captures(self) -> bool:
        """Whether tokens are CUDA graphs where they can be."""
        return self.decode in ("auto", "graph")
