"""One text that is being continued: its tokens, what of it is in the KV cache, and how its next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.session.sampler import Draw


@dataclass(slots=True)
class Sequence:
    """`ids` = the tokens so far, of which `kv` holds the first `computed`."""

    ids: list[int]
    kv: Any
    draw: Draw
    computed: int = 0

    def start_over(self, kv: Any) -> None:
        """Continue with an empty KV cache: what it held is to be computed again."""
        self.kv, self.computed = kv, 0
