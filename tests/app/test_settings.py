"""Live settings, sampling and presets: refused, recorded, remembered; controls show where they act."""

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app import cli
from app.cli import options
from app.services.host import Host
from app.store import Store
from app.ui.event_data import PresetPicked
from app.ui.sidebar import CacheSection
from app.ui.sidebar.preset_menu import CUSTOM
from core.errors import BudgetError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.presets import PRESETS, matching, preset
from tests.app.conftest import WAIT_S, GatedEngine, ended, follow, open_host, page
from tests.fakes import FakeEngine
from tests.logged import Logged


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("budgets", "50%", "no setting called 'budgets'"),
        ("budget", "150%", "between 0 % and 100 %"),
        ("eviction", "psychic", "Choose one of"),
        ("link_gbps", "fast", "must be a number"),
        ("link_gbps", float("nan"), "must lie between"),
    ],
)
def test_a_bad_setting_is_told_and_changes_nothing(host: Host, name: str, value: object, told: str) -> None:
    before = dict(host.models.settings)
    assert told in host.models.change(name, value)
    assert told in host.models.change_many({"link_latency_us": 77.0, name: value})
    assert dict(host.models.settings) == before


def test_a_bad_sampling_value_is_told_and_changes_nothing(host: Host) -> None:
    before = host.chats.sampling
    assert "must lie between" in host.chats.set_sampling(top_k=5, temperature=9)
    assert "no sampling setting" in host.chats.set_sampling(heat=1)
    assert host.chats.sampling == before
    assert host.chats.set_sampling(temperature=0.5) == ""
    assert host.chats.sampling == replace(before, temperature=0.5)


def test_an_engine_that_refuses_a_change_is_told(host: Host, monkeypatch: pytest.MonkeyPatch, caplog: Logged) -> None:
    def refuse(self: FakeEngine, changes: Mapping[str, object]) -> None:
        raise BudgetError("The device has only 3 GB free.")

    def fail(self: FakeEngine, changes: Mapping[str, object]) -> None:
        raise RuntimeError("CUDA error 700")

    monkeypatch.setattr(FakeEngine, "change", refuse)
    assert host.models.change("budget", "100%") == "The device has only 3 GB free."
    monkeypatch.setattr(FakeEngine, "change", fail)
    assert "error inside Moestro" in host.models.change("budget", "100%")
    assert "CUDA error 700" in caplog.text
    assert str(host.models.settings["budget"]) == "62%"


def test_settings_move_while_tokens_stream_and_are_recorded(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chats.ask(None, "one")
    gated.gate.release(2)
    follow(answer, lambda a: a.n_tokens == 2)
    assert gated_host.models.change("budget", "25%") == ""
    assert str(gated_host.models.settings["budget"]) == "25%"
    gated.gate.release(100)
    ended(answer)
    rows = gated_host.store.db.rows("SELECT * FROM changes")
    assert [(r["step"], r["name"], r["old"], r["new"]) for r in rows] == [(3, "budget", "62%", "25%")]
    steps = list(gated_host.store.steps.records(chat=answer.chat_id))
    assert (steps[2].slots, steps[3].slots) == (39, 16)


def test_with_telemetry_off_only_the_change_itself_is_recorded(host: Host) -> None:
    assert host.models.change("telemetry", "off") == ""
    answer = ended(host.chats.ask(None, "one"))
    assert answer.n_tokens == 12
    assert len(list(host.store.steps.records(chat=answer.chat_id))) == 1
    assert [r["name"] for r in host.store.db.rows("SELECT name FROM changes")] == ["telemetry"]


def test_settings_sampling_and_model_are_remembered(tmp_path: Path) -> None:
    host = open_host(tmp_path, loaded=False)
    assert host.loader.last_spec() is None
    assert host.models.change("budget", "75%") == ""
    assert host.loader.plan("demo").settings["budget"] == "75%"
    loading = host.loader.load(host.loader.plan("demo", context=320, format="int8"))
    assert loading.join(WAIT_S)
    assert (host.models.model, host.models.context, host.models.settings["budget"]) == ("demo", 320, "75%")
    assert host.models.change("eviction", "lfu") == ""
    host.chats.set_sampling(temperature=0.7)
    host.close()

    host = open_host(tmp_path, loaded=False)
    spec = host.loader.last_spec()
    assert (spec.model, spec.context, spec.format) == ("demo", 320, "int8")
    assert (spec.settings["budget"], spec.settings["eviction"]) == ("75%", "lfu")
    assert host.chats.sampling.temperature == 0.7


def test_forgotten_names_of_an_earlier_version_do_no_harm(tmp_path: Path, caplog: Logged) -> None:
    store = Store(tmp_path)
    seeds = {"eviction.random.seed": 7, "substitute.random.seed": 7}  # settings until they became constants
    store.db.put("settings", {"budget": "75%", "gone": 1, "eviction": "gone", **seeds})
    store.db.put("sampling", {"top_k": 4, "gone": 1})
    store.db.put("spec", {"model": "demo", "gone": 1, "format": "gone", "context": 320})
    store.close()
    host = open_host(tmp_path, loaded=False)
    assert (host.models.settings["budget"], host.chats.sampling.top_k) == ("75%", 4)
    spec = host.loader.last_spec()
    assert (spec.model, spec.format, spec.context) == ("demo", "checkpoint", 320)
    assert caplog.text.count("earlier version") == 4 + len(seeds)


@pytest.fixture
def section(tmp_path: Path) -> Iterator[CacheSection]:
    host = open_host(tmp_path)
    with page():
        section = CacheSection(host, [gr.Textbox()], gr.HTML(), lambda *form: "")
    yield section
    host.close()


def shown(section: CacheSection, values: list[Any]) -> dict[Any, Any]:
    return {
        part: value["value"] if isinstance(value, dict) and "value" in value else value
        for part, value in zip(section.outputs, values, strict=True)
    }


def test_choosing_a_preset_applies_all_its_values(section: CacheSection) -> None:
    for one in [p for p in PRESETS if not p.needs and not p.splits]:
        assert section.host.models.change_many({"eviction": "random", "scope": "global", "budget": "70%"}) == ""
        now = shown(section, section._choose_preset(one.name))
        assert now[section.alert] == ""
        assert now[section.preset.menu] == (one.name if one.kind == "ours" else CUSTOM)
        last = "Published systems…" if one.kind == "ours" else one.title
        assert titles(section) == ["Auto", "Many answers", last]
        pressed = re.findall(r"data-preset='(\w+)' aria-pressed='true'", now[section.systems.lists])
        assert pressed == [one.name] * (one.kind != "ours")
        assert one.source in now[section.preset.about]
        assert all(section.host.models.settings[name] == value for name, value in one.values.items())
        auto = one.name == "auto"  # which chooses the memory, too
        assert section.host.models.settings["budget"] == ("62%" if auto else "70%")
        assert ("budget" in section.host.remembered.auto) is auto
        for name in ("eviction", "scope", "predictor"):
            assert now[section.setting_controls.controls[name]] == one.values[name]


def titles(section: CacheSection) -> list[str]:
    menu = dict(zip(section.outputs, section.values(), strict=True))[section.preset.menu]
    return [title for title, _ in menu["choices"]]


def test_a_knob_moved_afterwards_is_named_and_one_click_resets_it(section: CacheSection) -> None:
    def told() -> str:
        text = str(dict(zip(section.outputs, section.values(), strict=True))[section.preset.about])
        return re.sub("<.*?>", "", text.partition('<p class="about simple">')[0])

    now = shown(section, section.values())
    assert now[section.preset.menu] == "auto" and not now[section.preset.reset], "what a new user gets"
    assert titles(section) == ["Auto", "Many answers", "Published systems…"] and told() == ""
    assert section.host.models.change("budget", "70%") == "" and titles(section)[-1] == "Auto, changed"
    assert told() == "Changed: Memory budget."
    assert shown(section, section._reset_preset())[section.preset.menu] == "auto" and told() == ""
    assert section.host.models.settings["budget"] == "62%" and section.host.models.change("eviction", "random") == ""
    assert told() == "Changed: Cache policy."
    assert shown(section, section._reset_preset())[section.preset.menu] == "auto"
    section._choose_preset("mixtral_offloading")
    assert section.host.models.change("predictor.width", 3) == ""
    now = shown(section, section.values())
    assert now[section.preset.menu] == CUSTOM and now[section.preset.reset] == "Reset to Mixtral-offloading"
    assert titles(section)[-1] == "Mixtral-offloading, changed" and told() == "Changed: Width."
    before = section.host.models.settings
    assert shown(section, section._choose_preset(CUSTOM))[section.preset.menu] == CUSTOM
    assert section.host.models.settings == before
    assert section.host.models.change_many({"bypass": True, "prefetch_auto": True}) == ""
    assert told().startswith("Changed: Bypass, ") and told().count(",") == 2
    assert shown(section, section._reset_preset())[section.preset.menu] == CUSTOM and told() == ""
    assert matching(section.host.models.settings) is preset("mixtral_offloading")
    assert section.host.models.change("budget", "70%") == "", "the budget is part of Auto alone"
    assert titles(section)[-1] == "Mixtral-offloading"


def test_published_systems_are_listed_apart_from_controls_with_marks_for_what_they_need(section: CacheSection) -> None:
    lists = section.systems.value()
    published, controls = lists.split("</details>")[:2]
    assert "Published systems" in published and "Controls and ablations" in controls
    for one in PRESETS:
        at = {"ours": "", "published": published, "control": controls}[one.kind]
        row = re.search(rf"data-preset='{one.name}'.*?</button>", lists)
        assert (row is not None) == bool(at)
        if row is not None:
            assert row[0] in at and escape(one.line) in row[0] and len(one.line) <= 65
            assert [">profile<" in row[0], ">blocks<" in row[0]] == [bool(one.needs), one.splits]
            assert (">lossy<" in row[0]) == (one.values["miss"] != "wait" or one.values["execute"] != "off")
    before = section.host.models.settings
    section._pick_system(PresetPicked(None, {"preset": "no such"}))
    assert section.host.models.settings == before
    section._pick_system(PresetPicked(None, {"preset": "moe_infinity"}))
    assert matching(section.host.models.settings) is preset("moe_infinity")


def test_the_switch_turns_the_link_and_follows_it(section: CacheSection) -> None:
    models, switch = section.host.models, section.pcie
    assert models.settings["link"] == "auto" and switch.value()["value"], "the demo model's link is emulated"
    assert section._simulate(False)[0] == "" and models.settings["link"] == "own" and not switch.value()["value"]
    assert section._simulate(True)[0] == "" and models.settings["link"] == "auto"
    assert models.change("link", "emulated") == "" and switch.value()["value"]
    section._simulate(True)
    assert models.settings["link"] == "emulated", "its bandwidth was chosen: it stays"
    assert models.change("link", "own") == "" and not switch.value()["value"] and switch.value()["elem_classes"] == []
    models.unload()
    assert not switch.value()["visible"]


def test_a_refused_preset_is_told_and_changes_nothing(section: CacheSection) -> None:
    section._choose_preset("moe_infinity")
    before = dict(section.host.models.settings)
    for one in (p for p in PRESETS if p.needs):
        now = shown(section, section._choose_preset(one.name))
        assert "needs a profile of this model" in now[section.alert] and titles(section)[-1] == "MoE-Infinity"
        assert dict(section.host.models.settings) == before
    assert "Needs a profile of the model." in preset("adapmoe").help
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


def test_a_new_user_begins_with_auto_until_a_budget_is_chosen(tmp_path: Path) -> None:
    with closing(open_host(tmp_path)) as host:
        assert matching(host.models.settings) is preset("auto")
        assert host.models.settings["budget"] == "62%" and host.loader.estimate(host.loader.plan("demo")).slots == 39
    with closing(open_host(tmp_path)) as host:
        assert "budget" in host.remembered.auto and host.models.settings["budget"] == "62%"
        assert host.loader.estimate(LoadSpec("demo", settings=Settings().with_({"budget": "40%"}))).slots == 25
        assert host.models.change("budget", "40%") == "" and "budget" not in host.remembered.auto
        assert host.models.change("prefetch_auto", False) == ""
    with closing(open_host(tmp_path)) as host:
        assert "budget" not in host.remembered.auto and host.models.settings["budget"] == "40%"
        assert host.models.settings["prefetch_auto"] is False and matching(host.models.settings) is None


def test_who_leads_decoding_is_shown_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_host(tmp_path)) as host:
        with page():
            controls = CacheSection(host, [gr.Textbox()], gr.HTML(), lambda *form: "").setting_controls
        assert not controls.acts("gpu_decode") and not controls.controls["gpu_decode"].visible
        monkeypatch.setattr(FakeEngine, "on_gpu", True)
        assert controls.acts("gpu_decode") and controls.acts("link")
