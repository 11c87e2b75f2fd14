"""Passes in the fast arithmetic leave torch one thread: whatever runs before or after them has all again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import arithmetic, wiring
from core.runtime.warmup import choose_threads
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from tests.loaded import loaded
from tests.threads import torch_threads

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")


def test_a_load_chooses_among_all_threads_after_its_trials_and_after_other_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "_of_process", {})
    monkeypatch.setattr(arithmetic, "_file", None)
    offered: list[int] = []

    def offer(*about: Any, **how: Any) -> Any:
        offered.append(torch.get_num_threads())
        return choose_threads(*about, **how)

    monkeypatch.setattr(wiring, "choose_threads", offer)
    with torch_threads(2):
        for arithmetics in ("auto", "auto", "reference"):
            with loaded(model, {"budget": "100%"}, context=128, arithmetic=arithmetics) as engine:
                assert list(engine.generate("a few words", Sampling(max_new_tokens=3, temperature=0.0)))
            assert torch.get_num_threads() == 2
    assert offered == [2, 2, 2]
