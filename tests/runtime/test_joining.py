"""Where the host may compute missing experts within tokens that the GPU leads."""

from types import SimpleNamespace
from typing import Any

import pytest

from core.runtime import joining
from core.runtime.joining import Joining
from core.runtime.program.gpu.rows import GpuMath


def joined(
    placement: str = "host", *, active: bool = True, team: Any = "threads", lends: bool = True, formats: str = "a"
) -> Joining:
    settings = SimpleNamespace(placement=placement)
    host: Any = SimpleNamespace(active=active, team=team, settings=settings, kernels=[*formats])
    math: Any = object.__new__(GpuMath)
    store: Any = SimpleNamespace(lends_all=lends)
    return Joining(host, [math], SimpleNamespace(), store)  # type: ignore[arg-type]


def test_on_windows_it_has_to_be_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for windows, asked in ((False, ""), (True, "gpu_decode is chosen by name")):
        monkeypatch.setattr(joining, "WINDOWS", windows)
        assert asked in joined().objection("auto") and bool(asked) == bool(joined().objection("auto"))
        assert joined().team("auto") == (None if asked else "threads")
        assert joined().objection("graph") == "" and joined().team("graph") == "threads"


def test_what_stands_in_the_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(active=False, team=None).objection("graph") == "" and joined(active=False).team("graph") is None
    assert "layer by layer" in joined("measured").objection("graph")
    assert "no threads of its own" in joined(team=None).objection("graph")
    assert "several formats" in joined(formats="aab").objection("graph")
    assert "not every expert is there" in joined(lends=False).objection("graph")
    monkeypatch.setattr(joining.torch.version, "hip", "6.4")
    assert "an AMD GPU" in joined().objection("graph") and not joined().helps
