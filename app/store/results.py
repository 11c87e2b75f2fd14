"""The results that benches and evaluations have written: `NAME-DATE-TIME.json`, each one JSON object, in
`bench/results`; an installed copy adds a folder of the user's data. Standard library only."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

FOLDERS = [Path(__file__).resolve().parents[2] / "bench" / "results"]
"""All are read; new results are written to the last."""
BOUNDS = {
    "belady": "Belady (forced admission)",
    "belady_bypass": "Belady with bypass",
    "belady_global": "Belady, one pool for all layers",
    "perfect_prefetch": "Perfect prefetch, same link",
    "resident": "Everything resident",
}
"""Titles of what no cache or prefetcher can beat, by its name in a result."""


def new_file(name: str, began: datetime) -> Path:
    """The file for a result of a bench that began at this time."""
    return FOLDERS[-1] / f"{name}-{began:%Y%m%d-%H%M%S}.json"


def files(name: str, folder: Path | None = None) -> list[Path]:
    """The result files of a bench, oldest first, by the date in their names."""
    found = [file for one in ([folder] if folder else FOLDERS) for file in one.glob(f"{name}-*.json")]
    return sorted(found, key=lambda file: file.name)


def read(file: Path) -> dict[str, Any]:
    """One result. Raises OSError, and ValueError for what is not one JSON object."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is not a result of a bench")
    return found


def results(name: str, folder: Path | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The results of a bench with their files, newest first, without smoke tests and what cannot be read."""
    for file in reversed(files(name, folder)):
        try:
            found = read(file)
        except (OSError, ValueError):
            continue
        if not found.get("small"):
            yield file, found


def newest(name: str, folder: Path | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The newest of them; None = there is none."""
    return next(results(name, folder), None)


def write(file: Path, result: Mapping[str, Any]) -> None:
    """Write atomically: an earlier file stays until the new one is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    part.replace(file)
