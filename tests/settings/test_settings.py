"""Settings: one value under two names; presets of them; and those of an earlier version, understood when read."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest

from core.errors import SettingError
from core.settings.budget import Budget
from core.settings.calibration import CalibrationSettings
from core.settings.config import GROUPS, KINDS, Settings, params
from core.settings.loading import LoadSpec
from core.settings.lossy import LossySettings
from core.settings.migration import DISTANCES, SHARED, migrated, migrated_params
from core.settings.param import Choice, Param, Value, declared
from core.settings.pins import Pins
from core.settings.presets import matching, preset
from core.settings.registry import create, register, same_as, variants
from core.settings.sampling import Sampling


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
        ({"borrow": False, "regret_tokens": 64, "eviction.lfu.half_life": 9}, {}),
    ],
)
def test_old_names_become_new_ones(then: dict[str, Value], now: dict[str, Value] | None) -> None:
    assert migrated(then) == (then if now is None else now)


def test_all_settings_of_an_earlier_version_mean_the_same() -> None:
    """`settings.json` was written by commit 01e711c9: every default, and what each preset changed of them. Where a
    preset has come nearer to its paper since, or Auto guesses tokens, places misses and begins with another policy,
    settings that were saved keep their values and are the user's own. What a GPU does by default has changed since,
    too."""
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
            *(("eviction",) if name == "auto" else ()),
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
    """One of them, `token_table`, is gone."""
    sharing = {one.name for one in variants("predictor") if any(param.shared for param in one.params)}
    assert sharing | {"token_table"} == DISTANCES.keys() and {*SHARED.values()} == {
        param.name for one in variants("predictor") for param in one.params if param.shared
    }
