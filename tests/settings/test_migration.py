"""Settings of an earlier version: understood where they are read, refused by name where they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.options import assign
from core.errors import SettingError
from core.settings.config import Settings, params
from core.settings.migration import DISTANCES, GONE, SHARED, migrated, migrated_params
from core.settings.param import Value
from core.settings.presets import matching, preset
from core.settings.registry import variants


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
    preset has come nearer to its paper since, settings that were saved keep their values and are the user's own."""
    kept = json.loads((Path(__file__).parents[1] / "compatibility" / "files" / "settings.json").read_text())
    assert Settings(migrated(kept["defaults"])) == Settings()
    for name, changed in kept["presets"].items():
        then = Settings(migrated({**kept["defaults"], **changed}))
        moved = {one for one, value in preset(name).values.items() if then[one] != value}
        assert moved <= {"prefetch_guard", *(("batch_gate", "beta", "protect_super") if name == "buddymoe" else ())}
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


@pytest.mark.parametrize("name", [*GONE, "host_eviction.lfu.half_life"])
def test_what_is_gone_says_so_and_no_setting_has_its_name(name: str) -> None:
    assert name not in params()
    for refuse in (lambda: assign(name, "1"), lambda: Settings({name: 1})):
        with pytest.raises(SettingError, match=f"no setting called '{name}' any more: "):
            refuse()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("predictor.gate.width", "any more: it is predictor.width."),
        ("predictor.stride.stride", "any more: it is predictor.distance."),
        ("predictor.widht", "'predictor.widht'. Did you mean predictor.width?"),
    ],
)
def test_a_wrong_name_on_the_command_line_is_refused_with_the_right_one(name: str, told: str) -> None:
    with pytest.raises(SettingError) as refused:
        assign(name, "3")
    assert told in str(refused.value)


def test_every_predictor_that_had_parameters_is_known() -> None:
    sharing = {one.name for one in variants("predictor") if any(param.shared for param in one.params)}
    assert sharing == DISTANCES.keys() and {*SHARED.values()} == {
        param.name for one in variants("predictor") for param in one.params if param.shared
    }
