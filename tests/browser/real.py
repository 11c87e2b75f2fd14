"""The real engine for the dashboard's tests, made watchable: not faster than a reader, and seldom at an end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from app.host import Host
from core import plan
from core.answer import Ids
from core.config import Sampling
from core.engine import Engine
from core.runtime.sampler import Draw
from core.types import Piece

PACE_S = 0.02


class PacedEngine(Engine):
    """Waits a little after each token."""

    def generate(
        self,
        messages: Sequence[Mapping[str, str]] | str | Ids,
        sampling: Sampling | None = None,
        cancel: threading.Event | None = None,
        draw: Draw | None = None,
    ) -> Iterator[Piece]:
        with closing(super().generate(messages, sampling, cancel, draw)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                if piece.kind == "token":
                    time.sleep(PACE_S)
                yield piece


def real_host() -> Host:
    """A host whose demo model is the bundled one, or that of MOESTRO_TEST_MODEL; hot sampling seldom ends an answer."""
    if folder := os.environ.get("MOESTRO_TEST_MODEL"):
        plan.DEMO = Path(folder)
    host = Host(engine=PacedEngine)  # type: ignore[arg-type]
    host.set_sampling(temperature=2.0)
    return host
