"""The sidebar: load and unload, the fit estimate, every live control while tokens stream, errors in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.config import KINDS, params
from core.registry import variants
from tests.browser.conftest import Open
from tests.browser.dashboard import Dashboard


def test_unload_and_load(dashboard: Dashboard) -> None:
    dashboard.page.click("#unload")
    dashboard.wait_text("#model-status", "No model loaded")
    dashboard.page.wait_for_function("document.querySelector('.deck').dataset.state === 'empty'")
    dashboard.page.wait_for_function("document.querySelector('#send').disabled")
    dashboard.wait_text("#chat", "Load a model to begin")
    dashboard.page.click("#load")
    dashboard.page.wait_for_function("document.body.dataset.host === 'ready'")
    dashboard.settled()
    dashboard.page.wait_for_function("document.querySelector('.deck').dataset.state === 'live'")
    dashboard.wait_text("#model-status", "Demo model")


@pytest.mark.skipif(
    os.environ.get("MOESTRO_TEST_ENGINE") == "real", reason="the demo model loads too fast to be cancelled"
)
def test_a_long_load_shows_progress_and_can_be_cancelled(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.choose("set-format", "int4-g64")
    page.click("#load")
    page.wait_for_function("+document.querySelector('#load-progress [role=progressbar]').ariaValueNow > 0")
    dashboard.wait_text("#load-progress", "Packing experts")
    page.click("#cancel-load")
    dashboard.wait_text("#model-alert", "Cancelled")
    dashboard.settled().wait_text("#model-status", "checkpoint")
    dashboard.ask("Still here?").streaming()


def test_every_live_control_moves_its_setting_while_tokens_stream(dashboard: Dashboard) -> None:
    dashboard.advanced()
    dashboard.ask("Turn everything").streaming()
    for percent in (70, 40):
        _expect_mark(dashboard, lambda p=percent: dashboard.slide("set-budget", p), "budget")
    assert dashboard.value("#set-budget-text textarea, #set-budget-text input") == "40%"
    for kind in KINDS:
        for choice in reversed(variants(kind)):
            if choice.name == dashboard_value(dashboard, kind):
                continue
            _expect_mark(dashboard, lambda c=choice, k=kind: dashboard.choose(f"set-{k}", c.title), kind)
            for param in choice.params:
                dashboard.page.wait_for_selector(f"#set-{kind}-{choice.name}-{param.name}", state="visible")
    for name, other in (("scope", "global"), ("scope", "layer"), ("link", "emulated")):
        _expect_mark(dashboard, lambda n=name, o=other: dashboard.choose(f"set-{n}", o), name)
    for name, value in (("link_gbps", 2.5), ("link_latency_us", 50)):
        _expect_mark(dashboard, lambda n=name, v=value: dashboard.slide(f"set-{n}", v), name)
    _expect_mark(dashboard, lambda: dashboard.choose("set-link", "auto"), "link")
    dashboard.page.wait_for_selector("#set-link_gbps", state="hidden")
    assert all(
        any(mark.startswith(name) for mark in dashboard.marks())
        for name in params()
        if "." not in name and name != "telemetry"
    )


def dashboard_value(dashboard: Dashboard, kind: str) -> str:
    title = dashboard.value(f"#set-{kind} input")
    return next(v.name for v in variants(kind) if v.title == title)


def _expect_mark(dashboard: Dashboard, turn: object, name: str) -> None:
    """Turning the control puts one more mark on the deck, and the engine names the setting."""
    if dashboard.page.evaluate("document.body.dataset.answering === '0'"):
        dashboard.ask("Go on").streaming()
    before, shown = len(dashboard.marks()), dashboard.deck("marks")
    turn()  # type: ignore[operator]
    dashboard.wait_deck("marks", shown)
    marks = dashboard.marks()
    assert len(marks) > before
    assert any(mark.startswith(name) for mark in marks[before:])


def test_a_variants_own_knobs_show_only_while_it_is_chosen(dashboard: Dashboard) -> None:
    dashboard.choose("set-eviction", "LFU")
    dashboard.page.wait_for_selector("#set-eviction-lfu-half_life")
    dashboard.page.wait_for_selector("#set-eviction-random-seed", state="hidden")
    dashboard.wait_text("#about-eviction", "MoE-Infinity")
    box = dashboard.page.locator("#set-eviction-lfu-half_life input")
    before = len(dashboard.marks())
    box.fill("64")
    box.press("Tab")
    dashboard.wait_deck("marks", before)
    assert dashboard.marks()[-1].endswith("64")
    dashboard.choose("set-eviction", "LRU")
    dashboard.page.wait_for_selector("#set-eviction-lfu-half_life", state="hidden")


def test_the_fit_estimate_follows_the_slider(dashboard: Dashboard) -> None:
    for percent in (60, 80, 50):
        before = dashboard.text("#fit")
        assert "fit" in before.lower()
        assert "Does not" not in before
        dashboard.slide("set-budget", percent)
        dashboard.page.wait_for_function("before => document.querySelector('#fit').innerText !== before", arg=before)


def test_the_card_tells_the_speed_to_expect_and_the_suggested_budget_is_one_click(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.slide("set-budget", 50)
    dashboard.wait_text("#fit", "suggested budget")
    for text in ("Host memory", "Disk", "Expected", "tok/s"):
        assert text in dashboard.text("#fit")
    basis = str(page.get_attribute("#fit .expect", "title"))
    assert basis
    assert basis[1:] in dashboard.text("#fit .basis"), "what it rests on is in small print, too"
    suggested = str(page.get_attribute("#fit [data-budget]", "data-budget"))
    page.click("#fit [data-budget]")
    page.wait_for_function("!document.querySelector('#fit [data-budget]')")
    page.wait_for_function(
        "text => document.querySelector('#set-budget-text').querySelector('input, textarea').value === text",
        arg=suggested,
    )
    assert dashboard.marks()[-1].endswith(suggested)
    dashboard.slide("set-budget", 50)
    dashboard.wait_text("#fit", "suggested budget")


@pytest.mark.skipif(os.environ.get("MOESTRO_TEST_ENGINE") == "real", reason="what is tight depends on the machine")
def test_a_warning_can_be_overridden_and_a_hard_problem_cannot(dashboard: Dashboard) -> None:
    dashboard.slide("set-budget", 95)
    dashboard.wait_text("#fit", "You can load it all the same")
    dashboard.page.click("#load")
    dashboard.page.wait_for_function("document.body.dataset.host === 'ready'")
    dashboard.settled().wait_text("#model-status", "Demo model")
    assert not dashboard.page.query_selector("#model-alert .notice")
    dashboard.slide("set-budget", 20)
    dashboard.wait_text("#fit", "Does not fit")
    dashboard.page.click("#load")
    dashboard.wait_text("#model-alert", "short")
    dashboard.slide("set-budget", 50)
    dashboard.wait_text("#fit", "Fits")


def test_a_budget_can_be_typed_and_a_bad_one_is_explained(dashboard: Dashboard) -> None:
    box = dashboard.page.locator("#set-budget-text").get_by_role("textbox")
    box.fill("lots")
    box.press("Enter")
    dashboard.wait_text("#cache-alert", "not understood")
    dashboard.page.wait_for_function(
        "document.querySelector('#set-budget-text textarea, #set-budget-text input').value !== 'lots'"
    )
    box.fill("45%")
    box.press("Enter")
    dashboard.page.wait_for_function("document.querySelector('#set-budget input[type=range]').value === '45'")
    dashboard.page.wait_for_function("!document.querySelector('#cache-alert .notice')")


def test_a_bad_model_path_is_a_clear_error_and_changes_nothing(dashboard: Dashboard, tmp_path: Path) -> None:
    box = dashboard.page.locator("#model input")
    box.fill(str(tmp_path / "nothing-here"))
    box.press("Enter")
    dashboard.wait_text("#fit", "Cannot be loaded")
    dashboard.page.click("#load")
    dashboard.wait_text("#model-alert", "nothing-here")
    dashboard.wait_text("#model-status", "Demo model")
    assert dashboard.health()["model"] == "demo"
    assert "Traceback" not in dashboard.text("body")


def test_a_second_tab_sees_the_settings_as_they_are(dashboard: Dashboard, open_page: Open) -> None:
    dashboard.slide("set-budget", 65)
    dashboard.page.wait_for_function(
        "document.querySelector('#set-budget-text').querySelector('input, textarea').value === '65%'"
    )
    other = open_page()
    other.page.wait_for_function("document.querySelector('#set-budget input[type=range]').value === '65'")
    dashboard.slide("set-budget", 50)
    other.page.wait_for_function("document.querySelector('#set-budget input[type=range]').value === '50'")


def test_sampling_takes_effect_with_the_next_answer(dashboard: Dashboard) -> None:
    dashboard.page.get_by_role("button", name="Sampling").click()
    box = dashboard.page.locator("#set-sampling-max_new_tokens input")
    before = box.input_value()
    box.fill("7")
    box.press("Tab")
    dashboard.page.wait_for_timeout(0)
    dashboard.ask("Seven tokens").answered()
    assert "7 tokens" in dashboard.answers()[-1]
    box.fill(before)
    box.press("Tab")
    dashboard.ask("Many tokens").streaming(80)


def test_simple_hides_what_advanced_shows_and_remembers_it(dashboard: Dashboard) -> None:
    assert not dashboard.page.is_visible("#set-scope")
    dashboard.advanced()
    dashboard.page.wait_for_selector("#set-scope", state="visible")
    dashboard.page.reload()
    dashboard.settled()
    dashboard.page.wait_for_selector("#set-scope", state="visible")
