"""Results of benches, drawn by hand."""

from __future__ import annotations

from typing import Any


class Drawn:
    """Results by bench, newest first."""

    def __init__(self, **benches: list[dict[str, Any]]) -> None:
        self._benches = benches

    def newest(self, bench: str) -> list[tuple[str, dict[str, Any]]]:
        found = self._benches.get(bench, [])
        return [(f"{bench}-{one['date'][:10].replace('-', '')}-000000.json", one) for one in found]
