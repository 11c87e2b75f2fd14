"""Passes in the fast arithmetic leave torch one thread: whatever runs before or after them has all again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.engine import Engine, arithmetic, wiring
from core.runtime.warmup import choose_threads
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.system.native.compile import widths

pytestmark = pytest.mark.skipif(not widths(), reason="no kernels for this CPU")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_load_chooses_among_all_threads_after_its_trials_and_after_other_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "_of_process", {})
    monkeypatch.setattr(arithmetic, "_file", None)
    offered: list[int] = []

    def offer(*about: object, own: bool = False) -> object:
        offered.append(torch.get_num_threads())
        return choose_threads(*about, own=own)  # type: ignore[arg-type]

    monkeypatch.setattr(wiring, "choose_threads", offer)
    for arithmetics in ("auto", "auto", "reference"):
        spec = LoadSpec.checked(str(model), Settings({"budget": "100%"}), context=128, arithmetic=arithmetics)
        engine = Engine.load(spec)
        try:
            assert list(engine.generate("a few words", Sampling(max_new_tokens=3, temperature=0.0)))
        finally:
            engine.unload()
        assert torch.get_num_threads() == 2
    assert offered == [2, 2, 2]
