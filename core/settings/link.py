"""Settings of the link that experts are copied over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from core.settings.param import Param


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """This machine's own link, or an emulated one."""

    TITLE: ClassVar[str] = "Link"

    kind: Annotated[
        Literal["auto", "own", "emulated"],
        Param(
            "Which link the copies go over: this machine's own, or an emulated one that paces "
            "them to the bandwidth below and marks every figure as emulated. auto = own, but for the bundled demo "
            "model an emulated one, as slow for it as PCIe is for a large model.",
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
