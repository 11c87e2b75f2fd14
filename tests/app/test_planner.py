"""The configurator in the dashboard: what it needs, what a plan sets, and how it is taken back; and the memory that a
time per token needs, before a load."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gradio as gr
import numpy as np
import pytest

from app.services.host import Host
from app.ui.sidebar import ModelSection
from app.ui.tabs.calibrate_plan import PlanPanel, drawing
from core.errors import SettingError
from core.policy.allocation.slots import shares
from core.profile import Profile, load, profile_path, save
from tests.app.conftest import page
from tests.fake_models import MB, SHAPE
from tests.fake_profiles import fake_profile

if TYPE_CHECKING:
    from core.engine import Engine


def measured() -> Profile:
    layers, experts = SHAPE.layers, SHAPE.experts
    hit = np.linspace(0, 1, experts + 1, dtype=np.float32)[None].repeat(layers, 0)
    chosen = np.geomspace(0.9, 0.05, experts, dtype=np.float32)[None].repeat(layers, 0)
    cached = hit[:, :, None].repeat(experts, 2)
    return replace(fake_profile(parts=("counts", "times")), curve_hit=hit, curve_chosen=chosen, curve_cached=cached)


def test_what_a_plan_needs_is_said(host: Host) -> None:
    for profile in (None, fake_profile()):
        engine_of(host).use_profile(profile)
        with pytest.raises(SettingError, match="Hit curves"):
            host.planner.propose()
    with pytest.raises(SettingError, match="No plan was put into use"):
        host.planner.undo()


def test_a_plan_is_used_and_taken_back(host: Host) -> None:
    engine_of(host).use_profile(measured())
    proposal = host.planner.propose()
    assert proposal.known.blocks == 1 and proposal.known.buffer == 0 and set(proposal.plan.theta) == {1.0}
    assert proposal.plan.tpot_ms <= proposal.now.tpot_ms + 1e-6
    before = host.models.settings["layer_slots"]
    host.planner.use(proposal)
    assert host.models.settings["layer_slots"] == "moepic" and host.planner.used is not None
    kept = load(profile_path(host.store.folder, "fake"), model_hash="fake")
    assert kept.plan == proposal.plan
    host.planner.undo()
    assert host.models.settings["layer_slots"] == before and host.planner.used is None
    assert load(profile_path(host.store.folder, "fake"), model_hash="fake").plan is None


def test_a_plan_gives_layers_slots_of_their_own(host: Host) -> None:
    engine_of(host).use_profile(measured())
    assert host.models.change("scope", "global") == ""
    proposal = host.planner.propose()
    assert proposal.now.slots == tuple(map(float, shares(proposal.known.rest, SHAPE.layers)))
    host.planner.use(proposal)
    assert host.models.settings["scope"] == "layer"
    host.planner.undo()
    assert host.models.settings["scope"] == "global"


def test_a_plan_of_another_load_is_refused(host: Host) -> None:
    engine_of(host).use_profile(measured())
    stale = host.planner.propose()
    stale = replace(stale, known=replace(stale.known, load=-1))
    with pytest.raises(SettingError, match="not loaded any more"):
        host.planner.use(stale)
    assert host.models.settings["layer_slots"] != "moepic"


def test_the_panel_says_what_is_predicted_and_measured(host: Host) -> None:
    engine_of(host).use_profile(measured())
    panel, now = built(host), {"dark": True}
    _, _, said, figure, *_ = panel._plan(now)
    assert "Predicted by MoEpic" in said and "In use" in said and figure["visible"]
    assert "Hit curves from calibration" in said
    use, undo, said, *_ = panel._use(now)
    assert not use["visible"] and undo["visible"] and "Measured waiting a token" in said
    assert panel._proposal is not None
    kept = profile_path(host.store.folder, "fake")
    assert load(kept, model_hash="fake").plan == panel._proposal.plan
    use, undo, *_ = panel._undo(now)
    assert use["visible"] and not undo["visible"]
    assert load(kept, model_hash="fake").plan is None
    assert len(drawing(panel._proposal, False).data) == 4


def built(host: Host) -> PlanPanel:
    with page():
        return PlanPanel(host)


def engine_of(host: Host) -> Engine:
    loaded = host.models.loaded
    assert loaded is not None
    return loaded.engine


def known(host: Host) -> None:
    save(measured(), profile_path(host.store.folder, "fake"))
    engine_of(host).use_profile(measured())


def asked(section: ModelSection, tpot_ms: float | None, **changes: Any) -> str:
    form = dict(
        zip(["model", *(one.elem_id for one in section.choices)], [one.value for one in section.form], strict=True)
    )
    return section._needed(tpot_ms, *(form | changes).values())


def test_the_least_memory_for_a_time_is_said_before_a_load(host: Host) -> None:
    with page():
        section = ModelSection(host, gr.HTML({}))
    assert "open the Calibrate tab" in asked(section, 40) and "Calibrate now" in asked(section, 40)
    known(host)
    host.models.unload()
    spec = host.loader.plan("demo")
    profile = measured()
    resident_ms = profile.times["head"] + SHAPE.layers * (profile.times["att"] + profile.times["moe"])
    slow, fast = (host.loader.least_memory(spec, ms) for ms in (3 * resident_ms, 1.02 * resident_ms))
    assert slow.experts <= fast.experts <= fast.total == SHAPE.total and fast.tpot_ms <= 1.02 * resident_ms
    assert fast.bytes == 6 * MB + fast.experts * SHAPE.expert_bytes
    said = asked(section, 3 * resident_ms)
    assert f"({slow.experts / slow.total:.0%} of experts), by MoEpic" in said and "not measured" in said
    assert "No budget reaches" in asked(section, 0.9 * resident_ms)
    assert asked(section, 0) == asked(section, None) == ""
    blocked = host.loader.plan("demo", blocks=4)
    assert host.loader.least_memory(blocked, 3 * resident_ms).experts >= 2 * SHAPE.top_k, "the buffer is counted"


def test_the_least_memory_depends_on_the_link(host: Host) -> None:
    known(host)
    resident_ms = 0.1 + SHAPE.layers * 0.7
    found = []
    for gbps in (0.01, 10.0):
        assert host.models.change_many({"link": "emulated", "link_gbps": gbps}) == ""
        found.append(host.loader.least_memory(host.loader.plan("demo"), 1.5 * resident_ms).experts)
    assert found[0] > found[1]


def test_a_profile_without_curves_tells_nothing(host: Host) -> None:
    save(replace(measured(), curve_hit=None), profile_path(host.store.folder, "fake"))
    with pytest.raises(SettingError, match="no hit curves"):
        host.loader.least_memory(host.loader.plan("demo"), 40)
