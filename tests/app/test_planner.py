"""The configurator in the dashboard: what a plan needs and sets, edited by hand, and taken back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.services.engine_protocol import EngineProtocol
from app.services.host import Host
from app.services.plan_edit import edited, table
from app.services.planner import Proposal
from app.ui.tabs.calibrate_plan import PlanPanel
from app.ui.tabs.calibrate_plan_views import drawing
from core.errors import SettingError
from core.policy.allocation.cache_plan import LayerBlocks
from core.policy.allocation.configurator import plan_cache, plan_given
from core.policy.allocation.slot_allocation import place
from core.policy.allocation.slots import shares
from core.profile import Profile, load, profile_path
from core.settings.config import Settings
from tests.app.conftest import page
from tests.fake_models import SHAPE
from tests.fake_profiles import fake_profile


def measured() -> Profile:
    """With hit curves that rise with the experts cached, and predictions that are mostly right."""
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
    _, _, said, figure, edit, rows, *_ = panel._plan(now)
    assert "Predicted by MoEpic" in said and "In use" in said and figure["visible"] and edit["visible"]
    assert "Hit curves from calibration" in said and len(rows) == SHAPE.layers
    use, undo, said, *_ = panel._use(now, rows)
    assert not use["visible"] and undo["visible"] and "Measured waiting a token" in said
    use, undo, *_ = panel._undo(now)
    assert use["visible"] and not undo["visible"]
    assert panel._proposal is not None
    assert len(drawing(panel._proposal, False).data) == 4


def test_the_least_budget_for_a_time_is_found(host: Host) -> None:
    panel = built(host)
    assert "Hit curves" in panel._least(40)
    engine_of(host).use_profile(measured())
    whole = host.planner.propose()
    experts, total, plan = host.planner.least(whole.plan.tpot_ms)
    assert (
        experts <= whole.known.experts and total == SHAPE.layers * SHAPE.experts and plan.tpot_ms <= whole.plan.tpot_ms
    )
    assert f"{experts} of {total} experts" in panel._least(whole.plan.tpot_ms)
    assert "No budget reaches" in panel._least(0.001)
    for nothing in (0, None, -3):
        assert "Give a time per token" in panel._least(nothing)


def built(host: Host) -> PlanPanel:
    with page():
        return PlanPanel(host)


def engine_of(host: Host) -> EngineProtocol:
    loaded = host.models.loaded
    return loaded.engine


NOW = {"dark": True}


@pytest.fixture
def whole(host: Host) -> Proposal:
    """Of whole experts."""
    engine_of(host).use_profile(measured())
    return host.planner.propose()


@pytest.fixture
def split(whole: Proposal) -> Proposal:
    """The same memory, experts in four blocks; 8 experts for each layer and a buffer of 4."""
    known = replace(whole.known, blocks=4, buffer=4, experts=36, times=replace(whole.known.times, load_ms=5.0))
    return replace(whole, known=known, plan=plan_cache(known.curves, known.times, known.rest))


def test_what_is_not_edited_is_the_plan(whole: Proposal, split: Proposal) -> None:
    for one in (whole, split):
        rows = table(one.plan, one.known.blocks)
        assert [row[0] for row in rows] == list(range(SHAPE.layers))
        assert edited(one.known, one.plan, rows) is one.plan
        as_text = [[str(row[0]), f"{row[1]:.3f}", row[2]] for row in rows]
        assert edited(one.known, one.plan, as_text) is one.plan


def test_an_edit_is_predicted_by_the_same_model(split: Proposal) -> None:
    known = split.known
    plan = edited(known, split.plan, [[0, 2, "1/4"], [1, 7.75, 0.5], [2, "10", "1"], [3, 0, 0]])
    assert plan == plan_given(known.curves, known.times, [2, 7.75, 10, 0], [0.25, 0.5, 1, 0])
    assert plan.cached == (8, 15, 10, 0) and plan.exposed_ms[0] > 0
    kept = plan.in_blocks(4)
    assert kept == (LayerBlocks(8, 1), LayerBlocks(31, 2), LayerBlocks(40, 4), LayerBlocks(0, 0))
    assert [row[1:] for row in table(plan, 4)] == [[2.0, "1/4"], [7.75, "2/4"], [10.0, "1"], [0.0, "0"]]
    assert edited(known, plan, table(plan, 4)) is plan
    for blocks in (3, 7):
        odd = edited(replace(known, blocks=blocks), split.plan, [[n, 4, f"2/{blocks}"] for n in range(4)])
        assert edited(replace(known, blocks=blocks), odd, table(odd, blocks)) is odd


def test_the_cache_holds_what_an_edited_plan_says(split: Proposal) -> None:
    known = split.known
    rows: list[list[object]] = [[0, 3.25, "1/4"], [1, 8.25, "3/4"], [2, 10.5, 1], [3, 10, 1]]
    plan = edited(known, split.plan, rows)
    chosen = Settings({"layer_slots": "moepic", "split": "moepic", "buffer": known.buffer})
    profile = replace(known.profile, plan=plan)
    placed = place(chosen.cache, SHAPE.layers, SHAPE.experts, SHAPE.top_k, profile, 4)
    assert placed.sizes(36 * 4) == [13, 33, 42, 40] and placed.tops == (1, 3, 4, 4)
    assert replace(known, profile=profile).in_force(chosen) == plan


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([1, "some", 1], "Layer 1: “some” is not a number of experts"),
        ([1, None, 1], "Layer 1: “” is not a number of experts"),
        ([1, float("nan"), 1], "is not a number of experts"),
        ([1, 4, "half"], "Layer 1: “half” is not a part of an expert, such as 1/4 or 1"),
        ([1, 4, "1/0"], "is not a part of an expert"),
        ([1, 4, 0.3], "0.3 is not possible, because memory is given in whole blocks, of which an expert has 4"),
        ([1, 4.1, 0.5], "Layer 1: 4.1 is not possible"),
        ([1, 4, 1.5], "the part of an expert that stays is 0 to 1, not 1.5"),
        ([1, -1, 1], "-1 experts are not possible; it has 16. Choose 0 to 16"),
        ([1, 17, 1], "17 experts are not possible"),
        ([1, 12, 0.5], "2/4 of all its 16 experts take the memory of 8, so that 4 of the 12 would stay empty"),
        ([1, 1, 0], "would stay empty"),
        ([1, 0.25, 0.5], "has no room for 2/4 of one"),
        ([1, 16, 1], "together, but the budget has room for 32 next to the prefetch buffer. Take 8 away"),
        ([1, 4], "one row for each of the 4 layers"),
    ],
)
def test_bad_edits_are_refused_in_the_users_words(split: Proposal, row: list[object], why: str) -> None:
    rows: list[list[object]] = [[0, 8, 1], row, [2, 8, 1], [3, 8, 1]]
    with pytest.raises(SettingError) as error:
        edited(split.known, split.plan, rows)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([1, 4.5, 1], "memory is given in whole experts. The nearest is 4"),
        ([1, 1, 1], "1 experts are not possible; it has 16, and a token uses 2. Choose 2 to 16"),
        ([1, 8, 0], "experts are whole, so that the part is 1"),
    ],
)
def test_whole_experts_stay_whole(whole: Proposal, row: list[object], why: str) -> None:
    with pytest.raises(SettingError) as error:
        edited(whole.known, whole.plan, [[0, 8, 1], row, [2, 8, 1], [3, 8, 1]])
    assert why in str(error.value)


def test_the_panel_uses_what_was_edited_and_takes_it_back(host: Host, whole: Proposal) -> None:
    with page():
        panel = PlanPanel(host)
    _, _, planned, _, _, rows, *_ = panel._plan(NOW)
    assert "Your plan" not in planned
    bad = [[0, 99, 1], *rows[1:]]
    assert "99 experts are not possible" in panel._edit(NOW, bad)[2]
    assert "99 experts are not possible" in panel._use(NOW, bad)[2]
    assert host.planner.used is None and host.models.profile is not None and host.models.profile.plan is None
    mine = [[0, 5, "1"], [1, 9, "1"], [2, 9, "1"], [3, 9, "1"]]
    use, _, said, _ = panel._edit(NOW, mine)
    assert use["visible"] and "Your plan" in said
    use, undo, said, _, _, shown, *_ = panel._use(NOW, mine)
    assert not use["visible"] and undo["visible"] and "Your plan" in said
    assert shown == [[0, 5.0, "1"], *([n, 9.0, "1"] for n in (1, 2, 3))]
    kept = load(profile_path(host.store.folder, "fake"), model_hash="fake").plan
    assert kept is not None and kept.slots == (5, 9, 9, 9)
    panel._undo(NOW)
    assert load(profile_path(host.store.folder, "fake"), model_hash="fake").plan is None
