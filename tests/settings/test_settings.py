"""Settings: one value under two names; presets of them; and those of an earlier version, understood when read."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated

import pytest

from core.errors import SettingError
from core.policy.predict.nets.estimator import Estimator
from core.settings.budget import Budget
from core.settings.calibration import CalibrationSettings
from core.settings.config import GROUPS, KINDS, Settings, params
from core.settings.loading import LoadSpec
from core.settings.lossy import LossySettings
from core.settings.migration import DISTANCES, SHARED, migrated, migrated_params
from core.settings.param import Choice, Param, Value, declared
from core.settings.pins import Pins
from core.settings.preset import NEEDS_BLOCKS, Preset
from core.settings.presets import PRESETS, guarded, matching, preset
from core.settings.registry import NEEDS_PROFILE, create, register, same_as, variant, variants
from core.settings.sampling import Sampling
from tests.selection import layered


def grouped(settings: Settings) -> Iterator[tuple[Param, object]]:
    """Every general setting with the value that its group holds."""
    groups = (
        settings.cache,
        settings.prefetch,
        settings.misses,
        settings.drafts,
        settings.link,
        settings.kv,
        settings.telemetry,
        settings.lossy,
    )
    for group in groups:
        for field, param in declared(type(group)).items():
            yield param, getattr(group, field)


def test_a_group_holds_what_its_names_say() -> None:
    settings = Settings(
        {
            "budget": "6.5GB",
            "eviction": "lcp",
            "eviction.lcp.omega": "64",
            "pins": "5:17 0:3",
            "prefetch_auto": "on",
            "miss_placement": "host",
            "host_threads": "2",
            "link_gbps": 2,
            "telemetry": "off",
            "miss": "substitute_drop",
            "protect": "top:1",
        }
    )
    assert settings.cache.budget == Budget(bytes=6_500_000_000)
    assert settings.cache.eviction == Choice("lcp", {"rho": 0.25, "omega": 64})
    assert settings.cache.pins == Pins(named=((0, 3), (5, 17))) and settings["pins"] == "0:3, 5:17"
    assert (settings.misses.placement, settings.misses.host_threads) == ("host", 2)
    assert settings.prefetch.auto and settings.link.gbps == 2.0 and not settings.telemetry.enabled
    assert settings.lossy.substitutes and settings.lossy.active and settings.lossy.protect == Pins(top=1)
    assert {p.name: str(v) for p, v in grouped(settings)} == {n: str(settings[n]) for n in params() if "." not in n}


def test_defaults_are_those_of_the_groups_and_names_are_unique() -> None:
    settings = Settings()
    assert settings.lossy == LossySettings(substitute=settings.lossy.substitute)
    for group in GROUPS:
        for field, param in declared(group).items():
            assert param.default == settings[param.name] == str(getattr(group(), field)) or param.type != "text"
    names = [p.name for group in GROUPS for p in declared(group).values()]
    assert len(set(names)) == len(names) and set(KINDS) <= set(names)


def test_a_changed_copy_leaves_the_original_alone() -> None:
    before = Settings({"link_gbps": 4})
    after = before.with_({"link_gbps": 8, "eviction": "lfu"})
    assert (before.link.gbps, after.link.gbps) == (4.0, 8.0)
    assert before.diff(after) == {"link_gbps": 8.0, "eviction": "lfu"}
    assert before.telemetry == after.telemetry and before.cache != after.cache
    with pytest.raises(SettingError, match="must lie between"):
        before.with_({"link_gbps": 1e6})


def test_the_parameters_of_variants_not_chosen_are_kept_and_change_no_group() -> None:
    settings = Settings({"eviction.lcp.omega": 64})
    assert settings.cache == Settings().cache and settings["eviction.lcp.omega"] == 64
    assert settings.with_({"eviction": "lcp"}).cache.eviction.params == {"rho": 0.25, "omega": 64}
    assert settings.choice("eviction", "lcp") == Choice("lcp", {"rho": 0.25, "omega": 64})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not same_as(kind)])
def test_a_variant_is_built_from_the_parameters_that_its_constructor_declares(kind: str) -> None:
    for one in variants(kind):
        assert one.params == tuple(declared(one.make).values())
        assert all(one.full_name(param) in params() for param in one.params)
        with pytest.raises(SettingError, match="no parameter 'gone'"):
            create(kind, one.name, {"gone": 1})


def test_what_predictors_share_is_one_setting_that_acts_where_the_chosen_one_uses_it() -> None:
    known = params()
    assert [name for name in known if name.startswith("predictor.") and known[name].shared] == [
        "predictor.width",
        "predictor.distance",
        "predictor.floor",
    ]
    settings = Settings({"predictor.width": 6, "predictor.distance": 2, "predictor.floor": 0.5})
    whole = {"width": 6, "floor": 0.5, "distance": 2}
    for one in variants("predictor"):
        own = {param.name for param in one.params}
        given = settings.choice("predictor", one.name).params
        assert {name: given[name] for name in whole.keys() & own} == {name: whole[name] for name in whole.keys() & own}
        for name in whole:
            acts = known[f"predictor.{name}"].active_when
            assert acts is not None and (one.name in acts["predictor"]) == (name in own)


def test_a_variant_that_declares_a_shared_parameter_otherwise_is_refused() -> None:
    class Wider:
        def __init__(self, width: Annotated[int, Param("How many.", shared=True)] = 3) -> None: ...

    with pytest.raises(ValueError, match="'wider' declares width otherwise"):
        register("predictor", "wider", title="", help="", source="")(Wider)


def test_host_memory_has_every_policy_with_its_defaults() -> None:
    settings = Settings({"host_eviction": "lcp", "eviction.lcp.omega": 9})
    assert settings.cache.host_eviction == Choice("lcp", {})
    assert [one.name for one in variants("host_eviction")] == [one.name for one in variants("eviction")]
    assert not [name for name in params() if name.startswith("host_eviction.")]


def test_there_are_no_more_settings_than_these() -> None:
    """Each is named by a paper, a preset or a user's task: one that comes should take another's place."""
    counts = {group.__name__: len(declared(group)) for group in (LoadSpec, CalibrationSettings, Sampling)}
    assert len(params()) + sum(counts.values()) <= 90, (len(params()), counts)


def test_what_is_active_when_names_settings_and_their_values() -> None:
    known = params()
    for param in known.values():
        for when in (param.active_when or {}, param.variants_active_when or {}):
            for leader, values in when.items():
                assert [known[leader].check(value) for value in values] == list(values)


def test_a_setting_without_a_default_is_refused() -> None:
    class Careless:
        def __init__(self, width: Annotated[int, Param("How many.")]) -> None: ...

    with pytest.raises(TypeError, match="width is a setting without a default"):
        declared(Careless)


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (Sampling.checked, "sampling"),
        (partial(LoadSpec.checked, "demo"), "loading"),
        (CalibrationSettings.checked, "calibration"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(build: Callable[..., object], kind: str) -> None:
    with pytest.raises(SettingError, match=f"no {kind} setting called 'budgets'. Settings: "):
        build(budgets="50%")


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


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (
            {"predictor": "transitions", "predictor.transitions.width": 6, "predictor.gate.width": 9},
            {"predictor": "transitions", "predictor.width": 6},
        ),
        ({"predictor": "stride", "predictor.stride.stride": 7}, {"predictor": "stride", "predictor.distance": 7}),
        ({"predictor": "stride", "predictor.stride.stride": 4}, {"predictor": "stride"}),
        ({"predictor": "expert_map", "predictor.expert_map.distance": 3}, {"predictor": "expert_map"}),
        ({"predictor": "gate", "predictor.gate.distance": 3}, {"predictor": "gate", "predictor.distance": 3}),
        ({"predictor": "gate", "predictor.gate.last_state": True}, None),
        ({"predictor": "none", "predictor.gate.floor": 0.5}, {"predictor": "none"}),
        ({"predictor.gate.floor": 0.5}, {}),
        ({"predictor": "mine", "predictor.mine.width": 5}, None),
        (
            {"predictor": "gate", "predictor.width": 2, "predictor.gate.width": 9},
            {"predictor": "gate", "predictor.width": 2},
        ),
        ({"host_eviction": "lfu", "host_eviction.lcp.rho": 0.5}, {"host_eviction": "lfu"}),
        ({"budgets": "50%"}, None),
        ({"substitute.buddy.k_max": 8, "substitute.buddy.search_rank": 16}, {"substitute.buddy.k_max": 8}),
        ({"substitute.buddy.k_max": "16", "substitute.buddy.search_rank": "3"}, {"substitute.buddy.k_max": "3"}),
        ({"substitute.buddy.unique": True, "substitute.buddy.discount": 0.5}, {}),
        (
            {"substitute.buddy.unique": "False", "substitute.buddy.discount": "0.5"},
            {"substitute.buddy.discount": "0.5"},
        ),
        ({"substitute.buddy.discount": 0.5}, None),
        ({"borrow": False, "regret_tokens": 64, "eviction.lfu.half_life": 9}, {}),
    ],
)
def test_old_names_become_new_ones(then: dict[str, Value], now: dict[str, Value] | None) -> None:
    assert migrated(then) == (then if now is None else now)


def test_all_settings_of_an_earlier_version_mean_the_same() -> None:
    """`settings.json` was written by commit 01e711c9: every default, and what each preset changed of them. Where a
    preset has come nearer to its paper since, or Auto guesses tokens and places misses, settings that were saved keep
    their values and are the user's own. What a GPU does by default has changed since, too."""
    kept = json.loads((Path(__file__).parents[1] / "compatibility" / "files" / "settings.json").read_text())
    assert Settings(migrated(kept["defaults"])) == Settings({"gpu_decode": "host"})
    for name, changed in kept["presets"].items():
        then = Settings(migrated({**kept["defaults"], **changed}))
        moved = {one for one, value in preset(name).values.items() if then[one] != value}
        assert moved <= {
            "prefetch_guard",
            "drafts",
            "miss_placement",
            *(("batch_gate", "beta", "protect_super") if name == "buddymoe" else ()),
        }
        assert matching(then) is (None if moved else preset(name))


def test_settings_of_today_stay_as_they_are() -> None:
    settings = Settings({"predictor": "stride", "predictor.distance": 4, "predictor.width": 3})
    assert migrated(settings) == dict(settings)


def test_what_a_trace_says_of_its_predictor() -> None:
    assert migrated_params("stride", {"stride": 2, "width": 3, "floor": 0.1}) == {
        "distance": 2,
        "width": 3,
        "floor": 0.1,
    }
    assert migrated_params("routing_path", {"distance": 4, "active": "half"}) == {"active": "half"}
    assert migrated_params("mine", {"distance": 1, "stride": 2}) == {"distance": 1, "stride": 2}


def test_every_predictor_that_had_parameters_is_known() -> None:
    sharing = {one.name for one in variants("predictor") if any(param.shared for param in one.params)}
    assert sharing == DISTANCES.keys() and {*SHARED.values()} == {
        param.name for one in variants("predictor") for param in one.params if param.shared
    }
