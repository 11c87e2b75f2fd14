"""The dashboard under test: `python -m tests.browser.server PORT`, with MOESTRO_HOME set. Ctrl-C ends it.

MOESTRO_TEST_ENGINE=real serves the real engine with the bundled demo model (or the one in MOESTRO_TEST_MODEL), paced
and sampled hot so that its answers last long enough to be watched; otherwise the fake engine is served.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from app.host import Host
from app.serve import Asked, serve
from core import fit
from core.config import LoadSpec, Sampling
from core.engine import Engine
from core.errors import MoestroError
from core.types import Fit, Piece
from tests.fakes import FakeEngine, fake_estimate

LONG = 100  # tenths of a second
PACE_S = 0.02


class SlowEngine(FakeEngine):
    """Takes its time to load in int4, so that progress can be seen and cancelled."""

    @classmethod
    def load(
        cls,
        spec: LoadSpec,
        progress: Callable[[str, float], None] = lambda text, share: None,
        cancel: threading.Event | None = None,
    ) -> SlowEngine:
        for step in range(LONG if spec.format == "int4" else 0):
            progress("Packing experts", step / LONG)
            if cancel is not None and cancel.wait(0.1):
                raise MoestroError("cancelled")
        return cls(spec)


class PacedEngine(Engine):
    """The real engine, not faster than a reader."""

    def generate(
        self,
        messages: Sequence[Mapping[str, str]] | str,
        sampling: Sampling | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Piece]:
        with closing(super().generate(messages, sampling, cancel)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                if piece.kind == "token":
                    time.sleep(PACE_S)
                yield piece


def estimate(spec: LoadSpec) -> Fit:
    """The fake model is "demo"; anything else is looked at as the real engine would."""
    return fake_estimate(spec) if spec.model == "demo" else fit.estimate(spec)


def real_host() -> Host:
    """The real engine with answers that go on for long: hot sampling seldom ends one."""
    if folder := os.environ.get("MOESTRO_TEST_MODEL"):
        fit.DEMO = Path(folder)
    host = Host(engine=PacedEngine)  # type: ignore[arg-type]
    host.set_sampling(temperature=2.0)
    return host


def main() -> None:
    real = os.environ.get("MOESTRO_TEST_ENGINE") == "real"
    host = real_host() if real else Host(engine=SlowEngine, estimate=estimate)
    serve(Asked(), port=int(sys.argv[1]), browser=False, keeper=host)


if __name__ == "__main__":
    main()
