"""Sizes and names as people read them, the same in the dashboard and in the terminal."""

from __future__ import annotations

from pathlib import Path

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def size(count: float) -> str:
    """Bytes with a unit and three significant digits: "7.25 GB"."""
    for unit, scale in UNITS:
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}" if abs(count) < 100 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def count(number: int) -> str:
    """A whole number with its thousands apart, in every language alike: "20 000"."""
    return f"{number:,}".replace(",", "\u202f")


def name_of(model: str) -> str:
    """How a model is called on screen: the demo, its name on the Hugging Face hub, or the last part of its path."""
    if model == "demo":
        return "Demo model (bundled)"
    path = Path(model)
    cached = next((p.parent.parent for p in (path, *path.parents) if p.parent.name == "snapshots"), None)
    if cached is not None and cached.name.startswith("models--"):
        repo = cached.name.removeprefix("models--").replace("--", "/")
        return f"{repo}/{path.name}" if path.suffix == ".gguf" else repo
    return path.name or model
