"""Settings of sampling: how the next token is drawn."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Annotated

from core.settings.param import Param, Value, checked_values, declared

ANY_SEED = -1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn, and for one request also what else ends its answer and what is reported of it.
    Build with `Sampling.checked(...)` from untrusted values."""

    temperature: Annotated[
        float,
        Param(
            "0 always takes the likeliest token; higher values vary more.",
            title="Temperature",
            low=0.0,
            high=2.0,
            step=0.05,
        ),
    ] = 0.0
    top_k: Annotated[
        int,
        Param(
            "Sample only among this many likeliest tokens. 0 = no limit.",
            title="Top-k",
            low=0,
            high=1000,
            step=1,
            advanced=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        Param(
            "Sample only among the likeliest tokens that together reach this probability; at least one.",
            title="Top-p",
            low=0.0,
            high=1.0,
            step=0.01,
            advanced=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Param(
            "Drop tokens less likely than this share of the likeliest.",
            title="Min-p",
            low=0.0,
            high=1.0,
            step=0.01,
            advanced=True,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Param(
            "Above 1 makes tokens already said less likely.",
            title="Repetition penalty",
            low=1.0,
            high=2.0,
            step=0.01,
            advanced=True,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Param(
            "Subtracted from the logit of every token that the answer has already.",
            title="Presence penalty",
            low=-2.0,
            high=2.0,
            step=0.05,
            advanced=True,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Param(
            "Subtracted from a token's logit once for each time that the answer has it already.",
            title="Frequency penalty",
            low=-2.0,
            high=2.0,
            step=0.05,
            advanced=True,
        ),
    ] = 0.0
    max_new_tokens: Annotated[
        int,
        Param(
            "The answer stops here. Takes effect with the next answer.",
            title="Maximum answer length",
            low=1,
            high=32768,
            step=1,
            unit="tokens",
        ),
    ] = 256
    seed: Annotated[
        int,
        Param(
            "The same seed and settings give the same answer. -1 = a new one for every answer, "
            "drawn at random and recorded with it.",
            title="Seed",
            low=ANY_SEED,
            high=2**63 - 1,
            step=1,
            advanced=True,
        ),
    ] = ANY_SEED
    stop: tuple[str, ...] = ()
    """Of one request: texts before the first of which its answer ends."""
    logprobs: int | None = None
    """Of one request: so many of the likeliest tokens are reported with each token's log probability; None: no log
    probability is."""
    schema: str = ""
    """Of one request: the JSON schema, as JSON, that its answer keeps to; "" = any text."""
    grammar: str = ""
    """Of one request, in place of a schema: the grammar that its answer keeps to, in the library's Lark form."""

    @property
    def settings(self) -> dict[str, Value]:
        """The settings by name, without what is of one request."""
        return {name: getattr(self, name) for name in declared(type(self))}

    def drawn(self) -> Sampling:
        """The same with a definite seed, to use and to record: its own, or a random one of 31 bits."""
        return self if self.seed != ANY_SEED else replace(self, seed=secrets.randbelow(2**31))

    @classmethod
    def checked(cls, **values: object) -> Sampling:
        """Build from untrusted values. Raises SettingError with the bounds."""
        return cls(**checked_values(cls, values, "sampling"))
