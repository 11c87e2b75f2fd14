"""Settings of what is measured while the model runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from core.settings.param import Param


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Timings and counters, and the live comparison of cache policies."""

    TITLE: ClassVar[str] = "Measuring"

    enabled: Annotated[
        bool,
        Param(
            "Record timings and counters of every token. Off only to measure their cost.",
            title="Telemetry",
            name="telemetry",
            advanced=True,
            resets_comparison=False,
        ),
    ] = True
    record_lab: Annotated[
        bool,
        Param(
            "Ask every prefetcher that recorded routing alone cannot replay, beside the one in use, and record what "
            "each would have fetched, so that the predictor lab can test all of them on one session. Answers stay the "
            "same and nothing more is fetched, but tokens take longer: by record_ms in the exports.",
            title="Record for the lab",
            advanced=True,
            active_when={"telemetry": (True,)},
            resets_comparison=False,
        ),
    ] = False
    regret: Annotated[
        bool,
        Param(
            "In the dashboard, compare the cache policy live with every other one and with the "
            "best possible one, on the very tokens of the chat. It runs beside the engine, in a process of low "
            "priority.",
            title="Compare cache policies",
            advanced=True,
            resets_comparison=False,
        ),
    ] = True
    regret_tokens: Annotated[
        int,
        Param(
            "How many of the last tokens are compared.",
            title="Window for the comparison",
            low=32,
            high=4096,
            step=32,
            unit="tokens",
            advanced=True,
            active_when={"regret": (True,)},
        ),
    ] = 512
