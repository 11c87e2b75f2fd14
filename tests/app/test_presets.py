"""The preset menu of the sidebar, without a browser: all values at once or none, and what it says afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app import cli
from app.cli import options
from app.ui.sidebar import CacheSection
from app.ui.sidebar.cache import CUSTOM
from core.settings.presets import PRESETS, matching, preset
from tests.app.conftest import open_host, page


@pytest.fixture
def section(tmp_path: Path) -> Iterator[CacheSection]:
    host = open_host(tmp_path)
    with page():
        section = CacheSection(host, [], gr.HTML(), lambda *form: "")
    yield section
    host.close()


def shown(section: CacheSection, values: list[Any]) -> dict[Any, Any]:
    """What each control would show."""
    return {
        part: value["value"] if isinstance(value, dict) and "value" in value else value
        for part, value in zip(section.outputs, values, strict=True)
    }


@pytest.mark.parametrize("one", [p for p in PRESETS if not p.needs and not p.splits], ids=lambda one: one.name)
def test_choosing_a_preset_applies_all_its_values(section: CacheSection, one: Any) -> None:
    assert section.host.models.change_many({"eviction": "random", "scope": "global", "budget": "70%"}) == ""
    now = shown(section, section._choose_preset(one.name))
    assert now[section.alert] == "" and now[section.preset.menu] == one.name and one.source in now[section.preset.about]
    assert all(section.host.models.settings[name] == value for name, value in one.values.items())
    assert section.host.models.settings["budget"] == "70%"
    for name in ("eviction", "scope", "predictor"):
        assert now[section.setting_controls.controls[name]] == one.values[name]


def titles(section: CacheSection) -> list[str]:
    """The entries of the preset menu."""
    menu = dict(zip(section.outputs, section.values(), strict=True))[section.preset.menu]
    return [title for title, _ in menu["choices"]]


def test_a_knob_moved_afterwards_is_named_and_one_click_resets_it(section: CacheSection) -> None:
    now = shown(section, section.values())
    assert now[section.preset.menu] == CUSTOM and "What Moestro begins with" in now[section.preset.about]
    assert titles(section)[0] == "Auto" and titles(section)[-1] == "Default"
    assert section.host.models.change_many({"budget": "70%"}) == "" and titles(section)[-1] == "Default"
    assert section.host.models.change("eviction", "random") == ""
    assert "Your own settings" in shown(section, section.values())[section.preset.about]
    assert titles(section)[-1] == "Custom"
    section._choose_preset("mixtral_offloading")
    assert section.host.models.change("predictor.width", 3) == ""
    now = shown(section, section.values())
    assert now[section.preset.menu] == CUSTOM and now[section.preset.reset] == "Reset to Mixtral-offloading"
    assert titles(section)[-1] == "Mixtral-offloading, changed: Width"
    before = section.host.models.settings
    assert shown(section, section._choose_preset(CUSTOM))[section.preset.menu] == CUSTOM
    assert section.host.models.settings == before
    assert section.host.models.change_many({"bypass": True, "prefetch_auto": True}) == ""
    assert titles(section)[-1] == "Mixtral-offloading, changed: Bypass and 2 more"
    assert shown(section, section._reset_preset())[section.preset.menu] == "mixtral_offloading"
    assert matching(section.host.models.settings) is preset("mixtral_offloading")
    assert section.host.models.change("budget", "70%") == "", "the budget is no part of a preset"
    assert shown(section, section.values())[section.preset.menu] == "mixtral_offloading"


def test_a_refused_preset_is_told_and_changes_nothing(section: CacheSection) -> None:
    section._choose_preset("moe_infinity")
    before = dict(section.host.models.settings)
    for one in (p for p in PRESETS if p.needs):
        now = shown(section, section._choose_preset(one.name))
        assert "needs a profile of this model" in now[section.alert] and now[section.preset.menu] == "moe_infinity"
        assert dict(section.host.models.settings) == before
    assert "Needs a profile of the model." in preset("adapmoe").help


def test_a_refused_variant_puts_its_menu_back(section: CacheSection) -> None:
    shown_choice, told = section.setting_controls.turn("layer_slots")("adapmoe")
    assert "needs a profile" in told and "Calibrate now" in told and shown_choice == "uniform"


def test_slots_per_layer_show_only_where_layers_have_their_own(section: CacheSection) -> None:
    def visible() -> list[bool]:
        values = dict(zip(section.outputs, section.values(), strict=True))
        parts = (section.setting_controls.controls["layer_slots"], section.setting_controls.notes["layer_slots"])
        return [values[part]["visible"] for part in parts]

    assert visible() == [True, True]
    assert section.host.models.change("scope", "global") == ""
    assert visible() == [False, False]


def test_a_preset_on_the_command_line_stands_below_what_else_is_given() -> None:
    args = cli.parse("chat --preset moepic --scope layer --set eviction.lcp.omega=64".split())
    settings = options.spec(args).settings
    assert (settings["eviction"], settings["predictor"], settings["scope"]) == ("lcp", "gate", "layer")
    assert settings["eviction.lcp.omega"] == 64
    assert matching(options.spec(cli.parse(["chat", "--preset", "se_moe"])).settings) is preset("se_moe")
    assert options.given(cli.parse(["ui", "--preset", "se_moe"]))[2] == preset("se_moe").values
    with pytest.raises(SystemExit):
        cli.parse(["chat", "--preset", "fastest"])
