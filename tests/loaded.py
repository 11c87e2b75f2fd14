"""Engines for the length of a block: unloaded at its end, whatever happens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec


@contextmanager
def unloading(engine: Engine) -> Iterator[Engine]:
    """As contextlib.closing."""
    try:
        yield engine
    finally:
        engine.unload()


@contextmanager
def loaded(model: Path | str, settings: Mapping[str, object], **how: object) -> Iterator[Engine]:
    """The engine of a model with these settings, and choices of the load."""
    with unloading(Engine.load(LoadSpec.checked(str(model), Settings(settings), **how))) as engine:
        yield engine
