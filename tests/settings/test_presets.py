"""Presets: each is what its paper says, is found again, and is left as soon as a knob of it moves."""

from itertools import combinations, pairwise

import pytest

from core.errors import SettingError
from core.policy.predict.nets.estimator import Estimator
from core.settings.calibration import CalibrationSettings
from core.settings.config import KINDS, Settings, params
from core.settings.preset import NEEDS_BLOCKS, Preset
from core.settings.presets import PRESETS, guarded, matching, preset
from core.settings.registry import NEEDS_PROFILE, variant
from tests.selection import layered

SYSTEMS = (
    "On-demand",
    "Mixtral-offloading",
    "AdapMoE",
    "MoE-Infinity",
    "Pre-gated MoE",
    "SE-MoE",
    "ProMoE",
    "BuddyMoE",
    "MoEpic",
    "MoEpic, split",
    "MoEpic, halves",
    "MoEpic, random prefetch",
    "MoEpic, random eviction",
    "MoEpic, nothing kept",
    "FineMoE",
    "ExpertFlow",
    "Speculating Experts",
    "Speculating Experts, executed",
    "Speculating Experts, estimator",
    "Speculating Experts, hybrid",
    "llama.cpp's expert cache",
    "FreeToken",
    "Auto",
    "Many answers",
)


each = pytest.mark.parametrize("one", PRESETS, ids=lambda one: one.name)


def test_all_systems_are_there() -> None:
    assert tuple(one.title for one in PRESETS) == SYSTEMS


@each
def test_a_preset_is_accepted_and_found_again(one: Preset) -> None:
    settings = Settings(one.values)
    assert matching(settings) is one is preset(one.name)
    assert matching(settings.with_({"budget": "25%", "link": "own", "pins": "0:1"})) is one  # none of its business
    assert set(one.settings) <= set(one.values)
    assert all(settings[name] == value for name, value in one.settings.items())


@each
def test_it_sets_all_that_its_parts_have_whatever_was_set_before(one: Preset) -> None:
    moved: dict[str, object] = {}
    for name in one.values:
        param = params()[name]
        if param.type in ("int", "float") and "." in name:
            moved[name] = param.high
        elif param.type == "bool":
            moved[name] = not param.default
    assert matching(Settings(moved).with_(one.values)) is one


@pytest.mark.parametrize(
    "one", layered(PRESETS, quick=lambda one: PRESETS.index(one) % 8 == 0), ids=lambda one: one.name
)
def test_moving_any_knob_of_a_preset_makes_it_the_users_own(one: Preset) -> None:
    settings = Settings(one.values)
    for kind in KINDS:
        other = next(v for v in params()[kind].choices if v != one.values[kind])
        found = matching(settings.with_({kind: other}))
        assert found is not one
    for name, value in one.values.items():
        param = params()[name]
        if "." in name and param.type in ("int", "float"):
            assert matching(settings.with_({name: param.high if value != param.high else param.low})) is not one


@each
def test_no_system_of_the_literature_has_our_guard_and_each_has_it_in_a_second_form(one: Preset) -> None:
    ours = one.source == "ours"
    assert one.values["prefetch_guard"] == ours
    if not ours:
        second = guarded(one)
        assert second.values == {**one.values, "prefetch_guard": True} and second.name != one.name


def test_buddymoe_has_its_paper_s_gates_and_protects_nothing() -> None:
    lossy = Settings(preset("buddymoe").values).lossy
    assert (lossy.rho, lossy.gate, lossy.batch_gate, lossy.beta) == (3, "percentile", "fixed", 0.9)
    assert not lossy.protect_super and not str(lossy.protect)


def test_the_estimator_of_its_paper_is_as_wide_and_learns_as_much() -> None:
    """Speculating Experts section 6.2: for Qwen3-30B-A3B (H = 2048, E = 128, L = 48) 17 million parameters, 4 million
    tokens; fed quasi-hidden states."""
    for name in ("speculating_estimator", "speculating_hybrid"):
        calibration = CalibrationSettings.checked(**preset(name).calibration)
        assert (calibration.estimator_input, calibration.estimator_tokens) == ("quasi", 4_000_000)
        assert f"calibrate --preset {name}" in preset(name).help
        net = Estimator(48, 128, 2048, calibration.width_for(2048))
        assert round(sum(one.numel() for one in net.parameters()) / 1e6) == 17
    assert all(not one.calibration for one in PRESETS if not {"estimator"} & {*one.needs})


def test_no_two_presets_are_alike() -> None:
    for one, other in combinations(PRESETS, 2):
        assert one.values != other.values
    for one, other in pairwise(PRESETS):
        assert matching(Settings(one.values).with_(other.values)) is other, (one.name, other.name)


@each
def test_what_needs_a_profile_says_so(one: Preset) -> None:
    kinds = set(KINDS) - ({"substitute"} if one.values["miss"] == "wait" else set())
    parts = {part for kind in kinds for part in variant(kind, str(one.values[kind])).needs}
    parts |= {"tae"} if one.values["gate"] == "percentile" else set()
    assert set(one.needs) == parts and (NEEDS_PROFILE in one.help) == bool(parts)
    assert (NEEDS_BLOCKS in one.help) == one.splits == (one.values["split"] != "whole")
    assert one.about[0].isupper() and one.about.endswith(".") and one.source


def test_the_defaults_are_no_preset_and_a_wrong_name_lists_them() -> None:
    assert matching(Settings()) is None
    with pytest.raises(SettingError, match=r"no preset called 'fastest'. Choose one of: on_demand, mixtral_offloading"):
        preset("fastest")
