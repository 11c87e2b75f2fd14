"""Settings of drafts: tokens that are guessed, and verified several in a pass."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from core.settings.param import Param


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How the tokens that a pass computes beyond the next one are guessed."""

    TITLE: ClassVar[str] = "Drafts"

    source: Annotated[
        Literal["off", "lookup"],
        Param(
            "Guess the tokens that follow, and verify several of them in one pass, which fetches an expert that more "
            "than one of them needs only once. lookup: what followed the last time that the chat had the same few "
            "tokens in a row. How many are guessed is measured while answers are written: none where a wider pass "
            "costs more than it brings. In the fast arithmetic a verified token has the very bits of one computed "
            "alone, so that no token of an answer depends on it; not used elsewhere, nor by models with states, "
            "beside lossy options, while routing is recorded, or for several answers at a time.",
            title="Draft tokens",
            name="drafts",
            resets_comparison=False,
        ),
    ] = "off"
