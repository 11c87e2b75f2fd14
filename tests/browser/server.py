"""The dashboard under test: `python -m tests.browser.server PORT`, with MOESTRO_HOME set. Ctrl-C ends it.

MOESTRO_TEST_ENGINE=real serves the real engine, see `real.py`; otherwise the fake one, whose start takes no torch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.server import api  # what `serve` imports before it serves
from app.services.host import Host
from app.store import results
from app.ui.serve import StartOptions, serve
from core.errors import MoestroError, NotImported
from core.profile import Profile
from core.settings.loading import LoadSpec
from core.system import tasks, worker_process
from core.types import Begun, Fit, Piece
from tests.browser.lengths import ENDLESS, said, with_length
from tests.fake_evaluation import fake_compare, fake_evaluate
from tests.fake_models import fake_estimate, fake_import, is_pack
from tests.fake_profiles import fake_calibrate
from tests.fakes import FakeEngine


class SlowEngine(FakeEngine):
    """Loads in int4-g64 until it is cancelled, so that progress can be seen. Answers as long as asked. With
    MOESTRO_TEST_BASE=1 it has no chat template.
    """

    takes_chats = os.environ.get("MOESTRO_TEST_BASE") != "1"

    @classmethod
    def load(
        cls,
        spec: LoadSpec,
        progress: Callable[[str, float], None] = lambda text, share: None,
        cancel: threading.Event | None = None,
        profile: Callable[[str], Profile | None] | None = None,
    ) -> SlowEngine:
        if spec.format == "int4-g64" and cancel is not None:
            progress("Packing experts", 0.5)
            cancel.wait()
            raise MoestroError("cancelled")
        engine = super().load(spec, profile=profile)
        assert isinstance(engine, cls)
        return engine

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        if isinstance(messages, Begun):
            yield from super().generate(messages, with_length(messages.asked, sampling), cancel)
            return
        text = said(messages)
        sampling = with_length(messages, sampling) if text is None else replace(sampling, max_new_tokens=len(text))
        for piece in super().generate(messages, sampling, cancel):
            yield replace(piece, text=text[piece.token - 1]) if text and piece.token else piece


def estimate(spec: LoadSpec) -> Fit:
    """The fake model is "demo", and every pack; a GGUF file is imported first; anything else is looked at as the real
    engine would."""
    if spec.model.endswith(".gguf"):
        raise NotImported(f"{spec.model} is imported first.")
    if spec.model == "demo" or is_pack(spec.model):
        return fake_estimate(spec)
    from core.capacity import fit

    return fit.estimate(spec)


def host() -> Host:
    """The host that was asked for in the environment."""
    if os.environ.get("MOESTRO_TEST_ENGINE") != "real":
        made = Host(
            engine=SlowEngine,
            estimate=estimate,
            importing=fake_import,
            calibrating=fake_calibrate,
            evaluating=fake_evaluate,
            comparing=fake_compare,
        )
        made.chats.set_sampling(max_new_tokens=ENDLESS)
        return made
    from tests.browser.real import real_host

    return real_host()


if __name__ == "__main__":
    assert api and "torch" not in sys.modules, "torch takes seconds to import, and the page needs none of it"
    # Background processes run as the dashboard does: at the lowest priority they hardly do beside other tests.
    worker_process.WorkerProcess.__init__.__kwdefaults__["niceness"] = tasks.NICENESS = 0
    results.FOLDERS = [Path(os.environ["MOESTRO_HOME"]) / "results"]  # of benches: what a test puts there
    serve(StartOptions(), port=int(sys.argv[1]), browser=False, host=host())
