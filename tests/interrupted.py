"""Ctrl-C in the middle of long work."""

import signal
from collections.abc import Callable
from typing import Any


def interrupted(work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, with Ctrl-C at every word of its progress."""

    def begun(*args: Any, progress: Callable[[str, float], None], **more: Any) -> Any:
        def pressed(text: str, share: float) -> None:
            progress(text, share)
            signal.raise_signal(signal.SIGINT)

        return work(*args, progress=pressed, **more)

    return begun
