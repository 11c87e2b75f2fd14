"""Pinned experts: how they are written, and which experts that means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import SettingError
from core.system.command import COMMAND

# Setting -> the meaning of `top` by a profile.
MOST = {"pins": "used most", "protect": "with the largest outputs"}


@dataclass(frozen=True, slots=True)
class Pins:
    """Parsed pins: single experts as (layer, expert), and the `top` most used of every layer."""

    named: tuple[tuple[int, int], ...] = ()
    top: int = 0

    @classmethod
    def parse(cls, text: str, name: str = "pins") -> Pins:
        """Read "0:3, 5:17, top:2"; "" or "none" names nothing. `name` = the setting. Raises SettingError."""
        named, top = set[tuple[int, int]](), 0
        for word in text.lower().replace(",", " ").replace(";", " ").split():
            if match := re.fullmatch(r"(top|\d{1,6}):(\d{1,6})", word):
                if match[1] == "top":
                    top = max(top, int(match[2]))
                else:
                    named.add((int(match[1]), int(match[2])))
            elif word != "none":
                raise SettingError(
                    f"{name} {word!r} is not understood. Write layer:expert pairs like 0:3, 5:17, or "
                    f"top:2 for the 2 of every layer that a profile saw {MOST[name]}."
                )
        return cls(tuple(sorted(named)), top)

    def __str__(self) -> str:
        words = [f"{layer}:{expert}" for layer, expert in self.named]
        return ", ".join([*words, f"top:{self.top}"] if self.top else words)

    def eids(
        self, layers: int, experts: int, counts: npt.NDArray[Any] | None = None, name: str = "pins"
    ) -> frozenset[int]:
        """The eids of the pinned experts. `counts` [layers, experts] = a profile's values for ranking `top`. Raises
        SettingError for experts that the model does not have, and for `top` without a profile."""
        for layer, expert in self.named:
            if layer >= layers or expert >= experts:
                what = f"layer {layer}" if layer >= layers else f"expert {expert}"
                raise SettingError(
                    f"{name} {layer}:{expert} names {what}, but this model has layers 0 to {layers - 1} "
                    f"with experts 0 to {experts - 1}."
                )
        if self.top > experts:
            raise SettingError(f"{name} top:{self.top} is more than the {experts} experts that a layer has.")
        found = {layer * experts + expert for layer, expert in self.named}
        if self.top:
            if counts is None:
                raise SettingError(
                    f"{name} top:{self.top} needs a profile of this model, which says which experts are "
                    f"{MOST[name]}. Run `{COMMAND} calibrate`, or open the Calibrate tab."
                )
            most = np.argsort(-counts, 1, kind="stable")[:, : self.top]
            found.update((most + np.arange(layers)[:, None] * experts).ravel().tolist())
        return frozenset(found)
