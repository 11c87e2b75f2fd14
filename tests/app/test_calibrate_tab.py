"""What tab Calibrate puts where, of a profile with and without what buddies need."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.services.host import Host
from app.ui.tabs.calibrate import CalibrateTab
from core.profile import Profile
from tests.app.conftest import page
from tests.fake_profiles import fake_profile

NEWS = SimpleNamespace(stamp="other", dark=True)
NOW = {"stamp": "", "dark": True}


@pytest.fixture
def tab(host: Host) -> CalibrateTab:
    with page():
        return CalibrateTab(host)


def used(tab: CalibrateTab, profile: Profile) -> None:
    loaded = tab.host.models.loaded
    assert loaded is not None
    loaded.engine.use_profile(profile)


def redrawn(tab: CalibrateTab, alpha: float = 0.0) -> dict[str, Any]:
    """The update of each element with an id."""
    values = tab._renew(NOW, 1, "cosine", alpha, NEWS)  # type: ignore[arg-type]
    return {one.elem_id: value for one, value in zip(tab.outputs, values, strict=True) if one.elem_id}


def test_lists_are_drawn_as_they_are_set_and_at_another_coverage(tab: CalibrateTab) -> None:
    used(tab, fake_profile(parts=("pairs", "likeness")))
    assert tab.host.models.change("substitute.buddy.alpha", "0.5") == ""
    assert tab.host.models.change("substitute.buddy.k_max", 3) == ""
    found = redrawn(tab)
    assert found["profile-measure"]["visible"] and found["profile-lists"]["visible"]
    assert "Cosine" in found["profile-similarity"]["value"].layout.title.text
    assert "alpha 0.5" in found["profile-lengths"]["value"].layout.title.text
    assert "At most 3" in found["profile-lists-said"]
    assert "0.8" not in found["profile-lists-table"] and "0.5" in found["profile-lists-table"]
    assert "alpha 0.8" in redrawn(tab, 0.8)["profile-lengths"]["value"].layout.title.text
    other = tab._layer(NOW, 2, "share", 0.8)  # type: ignore[arg-type]
    assert "layer 2" in other[1].layout.title.text and "Share" in other[1].layout.title.text
    assert "layer 2" in other[3]["value"].data[1].name


def test_why_there_are_no_lists_is_said(tab: CalibrateTab) -> None:
    used(tab, fake_profile(parts=("counts", "likeness")))
    found = redrawn(tab)
    assert not found["profile-lists"]["visible"] and not found["profile-measure"]["visible"]
    assert found["profile-similarity"]["visible"] and found["profile-layer"]["visible"]
    used(tab, fake_profile(parts=("counts",)))
    found = redrawn(tab)
    assert not found["profile-similarity"]["visible"] and not found["profile-layer"]["visible"]
    used(tab, replace(fake_profile(parts=("pairs",)), pairs_weighted=None))
    assert tab.host.models.change("substitute.buddy.weighted", True) == ""
    found = redrawn(tab)
    assert "by weight were not measured" in found["profile-lists-problem"]
    assert not found["profile-lengths"]["visible"] and found["profile-lists-table"] == ""
    used(tab, fake_profile(parts=("pairs",)))
    assert redrawn(tab)["profile-lists-problem"] == ""
    assert tab.host.models.change("substitute.buddy.alpha", "0.2, 0.4") == ""
    assert "this model has 4 layers" in redrawn(tab)["profile-lists-problem"]


def test_nothing_is_drawn_without_a_profile(tab: CalibrateTab) -> None:
    assert redrawn(tab)["profile-similarity"] == gr.skip()
    assert tab._layer(NOW, 0, "cosine", 0.0)[0] == gr.skip()  # type: ignore[arg-type]
    assert tab._similarity(NOW, 0, "cosine", 0.0) == gr.skip()  # type: ignore[arg-type]
    assert tab._lists(NOW, 0, "cosine", 0.0)[0] == gr.skip()  # type: ignore[arg-type]
