"""Importable checkpoints, each presented as plain named tensors under transformers' names."""

from pathlib import Path

from core.importing.sources.base import Source
from core.system.paths import expanded

__all__ = ["Source", "open_source"]


def open_source(path: Path) -> Source:
    """Open a model directory, a GGUF file, or a directory of one model's GGUF files.

    Reads headers only. Raises ModelError with the remedy for everything that cannot be imported.
    """
    path = expanded(path)
    if path.suffix.lower() == ".gguf" or _only_gguf(path):
        from core.importing.sources.gguf import open_gguf

        return open_gguf(path)
    from core.importing.sources.directory import open_directory

    return open_directory(path)


def _only_gguf(path: Path) -> bool:
    """Whether a directory's weights are GGUF files."""
    return path.is_dir() and any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
