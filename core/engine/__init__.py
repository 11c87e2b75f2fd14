"""The engine: a loaded model in use. Loading, exclusive access, settings that change while it runs, requests, prompts,
sampling, key-value caches that are kept, and what lossy options cost in quality.

`from core.engine import Engine` imports it when it is asked for: parts of this package need no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from core.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
