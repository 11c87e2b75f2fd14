"""The sidebar's upper part: load and unload, the speed to expect, budgets that fit and those that do not."""

import os
from pathlib import Path

import pytest

from tests.browser.dashboard import Dashboard


@pytest.mark.long(0.1)  # tests/app/test_words.py has what the card says and suggests; a budget is typed below
def test_the_card_tells_the_speed_to_expect_and_the_suggested_budget_is_one_click(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.slide("set-budget", 50)
    dashboard.wait_text("#fit", "50\u00a0% of experts")
    dashboard.wait_text("#fit", "suggested budget")
    assert page.get_attribute("#fit .fit", "data-loaded") == "1" and not page.is_visible("#fit .fit > ul")
    for text in ("Expected", "tok/s"):
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


@pytest.mark.long(0.1)  # tests/app/test_own_answers.py; other redraws are in test_sidebar.py
def test_the_estimate_goes_by_answers_as_soon_as_they_have_ended(dashboard: Dashboard) -> None:
    """Without another look at the settings, or a reload."""
    dashboard.type_in("set-budget-text", "41%")  # a configuration that was not used yet
    dashboard.wait_text("#fit", "41")
    assert "Measured" not in dashboard.text("#fit")
    dashboard.ask("a while, in 40 words").answered()
    dashboard.wait_text("#fit", "Measured: the last")


@pytest.mark.long(0.1)
@pytest.mark.skipif(os.environ.get("MOESTRO_TEST_ENGINE") == "real", reason="what is tight depends on the machine")
def test_a_warning_can_be_overridden_and_a_hard_problem_cannot(dashboard: Dashboard) -> None:
    dashboard.slide("set-budget", 95)
    dashboard.wait_text("#fit", "You can load it anyway")
    dashboard.load().wait_text("#model-status", "Demo model")
    dashboard.page.wait_for_function("!document.querySelector('#model-alert .notice')")
    dashboard.slide("set-budget", 20)
    dashboard.wait_text("#fit", "Does not fit")
    dashboard.insist("#load", "#model-alert", "short")  # a click before the last one was answered is dropped
    dashboard.slide("set-budget", 50)
    dashboard.wait_text("#fit", "Fits")


PRIMARY = """(is) => { const colour = (s) => getComputedStyle(document.querySelector(s)).backgroundColor;
    return is === (colour('#load') === colour('#send')); }"""


def test_load_stands_out_only_where_it_does_something(dashboard: Dashboard, tmp_path: Path) -> None:
    page, box = dashboard.page, dashboard.page.locator("#model input")
    dashboard.wait_text("#fit", "Fits")
    page.wait_for_function(PRIMARY, arg=False)  # what is loaded
    dashboard.choose("set-format", "int8")
    page.wait_for_function(PRIMARY, arg=True)
    dashboard.choose("set-format", "checkpoint")
    page.wait_for_function(PRIMARY, arg=False)
    box.fill(str(tmp_path / "nothing-here"))
    box.press("Enter")
    dashboard.wait_text("#fit", "Cannot be loaded")
    page.wait_for_function(PRIMARY, arg=False)
    box.fill("demo")
    box.press("Enter")
    dashboard.wait_text("#fit", "Fits")


def test_a_budget_can_be_typed_and_a_bad_one_is_explained(dashboard: Dashboard) -> None:
    dashboard.advanced()
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
    box.fill("8.8 mb")
    box.press("Enter")
    dashboard.page.wait_for_function(  # the slider shows the share of the experts that the card does
        "/(\\d+)\\s% of experts/.exec(document.querySelector('#fit').innerText)?.[1] === '50' && "
        "document.querySelector('#set-budget input[type=range]').value === '50' && "
        "document.querySelector('#set-budget-text :is(input, textarea)').value === '8.8MB'"
    )
    box.fill("45%")
    box.press("Enter")
    dashboard.page.wait_for_function("document.querySelector('#set-budget input[type=range]').value === '45'")
    dashboard.page.wait_for_function("!document.querySelector('#cache-alert .notice')")


@pytest.mark.long(0.1)  # tests/app/test_loading.py keeps the old model; the test of pins shows an alert
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
    box.fill("demo")
    box.press("Enter")
    dashboard.wait_text("#fit", "Fits")


@pytest.mark.long(0.1)  # tests/app/test_loading.py has the progress of a load and its end; loads are in test_library.py
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
    dashboard.choose("set-format", "checkpoint")  # or the next load takes as long
