"""The demo model on a GPU: its link is emulated, and said to be, until the user wants the card's own."""

from __future__ import annotations

import pytest

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.cuda.conftest import CONTEXT
from tests.fake_cuda import FakeCuda


@pytest.mark.long(0.1)
def test_a_miss_is_felt_and_marked(fake_cuda: FakeCuda) -> None:
    spec = LoadSpec.checked("demo", Settings({"budget": "50%", "eviction": "lru"}), device="cuda", context=CONTEXT)
    engine = Engine.load(spec)
    try:
        manifest = engine.manifest()
        assert manifest["link"] == "emulated" and manifest["link_gbps"] == engine.transfers.pace.gbps > 0
        layer_ms = engine.sizes.blob / engine.transfers.pace.gbps / 1e6
        assert layer_ms > 0.1, "about as long as a layer is computed, whatever the card's own link can do"
        engine.transfers.hurried = True  # nobody needs to wait here
        steps = [
            piece.step for piece in engine.generate("deque?", Sampling(max_new_tokens=4)) if piece.step is not None
        ]
        assert all(step.emulated for step in steps) and sum(step.demand_bytes for step in steps) > 0
        assert engine.frame().emulated
        engine.change({"link": "own"})
        assert not engine.transfers.pace and engine.manifest()["link"] == "measured"
    finally:
        engine.unload()
