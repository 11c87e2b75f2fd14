"""Amounts of memory as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.errors import SettingError

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Budget:
    """How much device memory may be used: a share of all routed experts, or total bytes for everything."""

    share: float | None = None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read "50%", "all", "6.5GB", "800 MiB" or a plain number of bytes. Raises SettingError."""
        clean = text.strip().lower().replace(",", "")
        if clean == "all":
            return cls(share=1.0)
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", clean):
            share = float(match[1]) / 100
            if not 0 <= share <= 1:
                raise SettingError(f"budget {text!r} is not between 0 % and 100 % of the experts.")
            return cls(share=share)
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", clean):
            if match[2] in UNITS:
                return cls(bytes=int(float(match[1]) * UNITS[match[2]]))
        raise SettingError(
            f"budget {text!r} is not understood. Write a share of the experts like 50%, or bytes like 6.5GB."
        )

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.share is not None else f"{self.bytes}"


def host_memory(text: str) -> str:
    """Checks a size of the host tier: "auto", "all", "none" or bytes. Raises SettingError."""
    clean = text.strip().lower()
    if clean in ("auto", "all", "none"):
        return clean
    budget = Budget.parse(clean)
    if budget.bytes is None:
        raise SettingError(f"host memory {text!r} is not understood. Write auto, all, none, or a size like 8GB.")
    return str(budget.bytes)
