"""Settings of drafts: tokens that are guessed, and verified several in a pass."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from core.settings.param import Param


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How the tokens that a pass computes beyond the next one are guessed."""

    TITLE: ClassVar[str] = "Drafts"

    source: Annotated[
        Literal["off", "lookup", "mtp", "model", "auto"],
        Param(
            "Guess the tokens that follow, and verify several of them in one pass, which fetches an expert that more "
            "than one of them needs only once. lookup: what followed the last time that the chat had the same few "
            "tokens in a row. mtp: what the model's own head for further tokens says, which is loaded where this or "
            "auto is chosen before the model is, and whose experts are cached as those of one more layer. model: what "
            "a small dense model with the same tokens says, which is named when the model is loaded (draft). auto: "
            "whichever of these is worth more at each place. How many are guessed is measured while answers are "
            "written: none where guessing and a wider pass cost more than they bring. In the fast arithmetic a "
            "verified token has the very bits of one computed alone, so that no token of an answer depends on it; not "
            "used elsewhere, nor beside lossy options, while routing is recorded, or for several answers at a time.",
            title="Draft tokens",
            name="drafts",
            resets_comparison=False,
        ),
    ] = "off"

    @property
    def by_head(self) -> bool:
        """Whether the model's head may guess."""
        return self.source in ("mtp", "auto")

    @property
    def by_model(self) -> bool:
        """Whether a small dense model may."""
        return self.source in ("model", "auto")

    @property
    def by_lookup(self) -> bool:
        """Whether the text so far may."""
        return self.source in ("lookup", "auto")
