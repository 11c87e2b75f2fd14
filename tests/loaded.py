"""Engines for the length of a block, unloaded at its end, and calls from within their passes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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


@contextmanager
def in_layers(engine: Engine, call: Callable[[int], object]) -> Iterator[None]:
    """Inside, `call(layer)` as the experts of a MoE layer are due."""
    with ExitStack() as hooks:
        for site in engine.loaded.sites:
            hooks.enter_context(site.module.register_forward_pre_hook(lambda *_, layer=site.index: call(layer)))
        yield
