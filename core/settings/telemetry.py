"""Settings of what is measured while the model runs."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from core.settings.param import Param


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Timings and counters, and the live comparison of cache policies."""

    TITLE: ClassVar[str] = "Measuring"

    recorded: Annotated[
        Literal["off", "on", "lab"],
        Param(
            "on: record timings and counters of every token. off: do not, only to measure what that costs. lab: also "
            "ask every prefetcher that recorded routing alone cannot replay, beside the one in use, and record what "
            "each would have fetched, so that the predictor lab can test all of them on one session. Answers stay the "
            "same and nothing more is fetched, but tokens take longer: by record_ms in the exports.",
            title="Telemetry",
            name="telemetry",
            advanced=True,
            resets_comparison=False,
        ),
    ] = "on"
    regret: Annotated[
        bool,
        Param(
            "In the dashboard, the hit rates of every other cache policy, and of the best possible one, on the last "
            "512 tokens of the chat. They are computed in a process of low priority.",
            title="Compare cache policies",
            advanced=True,
            resets_comparison=False,
        ),
    ] = True

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return self.recorded != "off"
