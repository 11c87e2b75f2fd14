"""Substitution: controls act in mid-answer, the badge tells what is changed, panels come and go, one click ends it."""

from collections.abc import Callable
from typing import Any

import pytest

from core.settings.lossy import LossySettings
from core.settings.param import declared
from core.settings.registry import variants
from tests.browser.dashboard import FITS, Dashboard

BADGES = "[...document.querySelectorAll('[data-exactness]')].map((e) => e.textContent)"
DARK = "(dark) => document.body.classList.toggle('dark', dark)"
TINTS = """(names) => names.map((name) => { const c = document.querySelector(`canvas[data-c=${name}]`);
    return new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size; })"""


def open_section(dashboard: Dashboard) -> None:
    dashboard.advanced()
    if not dashboard.page.is_visible("#set-miss"):
        dashboard.page.get_by_role("button", name="Substitution").click()
    dashboard.page.wait_for_selector("#set-miss", state="visible")


def shows(dashboard: Dashboard, name: str, value: str) -> None:
    dashboard.page.wait_for_function(
        "([id, value]) => document.querySelector(`#set-${id} input`).value === value", arg=[name, value]
    )


def refused(dashboard: Dashboard, name: str, value: str, why: str) -> None:
    """It says why, and goes back."""
    before = dashboard.value(f"#set-{name} input")
    dashboard.choose(f"set-{name}", value)
    dashboard.wait_text("#substitution-alert", why)
    shows(dashboard, name, before)


def exact_again(dashboard: Dashboard) -> None:
    dashboard.page.click("#exact-again")
    dashboard.page.wait_for_selector("#exact-again", state="hidden")
    shows(dashboard, "miss", "Wait for it (exact)")


def defaults(dashboard: Dashboard) -> None:
    """Everything lossy as it comes, by way of a preset; the next test expects no prefetcher."""
    dashboard.choose_system("Mixtral-offloading")
    shows(dashboard, "substitute", "Buddies")
    dashboard.choose("set-predictor", "None")
    shows(dashboard, "preset", "Mixtral-offloading, changed")


@pytest.mark.long(0.5)
def test_every_control_moves_its_setting_while_tokens_stream(dashboard: Dashboard) -> None:
    """As all controls of settings, which a test of the sidebar turns whenever tests run."""
    page = dashboard.page
    open_section(dashboard)
    assert not page.is_visible("#may-change") and not page.is_visible("#set-rho")
    dashboard.ask("Change everything").streaming()
    moved = set()

    def mark(name: str, turn: Callable[[], object]) -> None:
        moved.add(name)
        dashboard.expect_mark(turn, name)

    def turn(name: str, value: Any) -> None:
        by = dashboard.choose if isinstance(value, str) else dashboard.slide
        mark(name, lambda: by(f"set-{name}", value))

    def tick(name: str) -> None:
        mark(name, lambda: page.click(f"#set-{name} input"))

    turn("miss", "Use another, else leave out")
    dashboard.wait_text("#substitution-alert", "“Router's next best” is used")
    shows(dashboard, "substitute", "Router's next best")
    moved.add("substitute")
    page.wait_for_selector("#may-change", state="visible")
    refused(dashboard, "substitute", "Most alike", "“Most alike” needs a profile of this model")
    for one in (v for v in variants("substitute") if not v.needs):
        if one.name != "router_ranked":
            turn("substitute", one.title)
        for param in one.params:
            page.wait_for_selector(f"#set-substitute-{one.name}-{param.name}", state="visible")
    turn("rho", 2)
    turn("rho_order", "heaviest")
    refused(dashboard, "gate", "percentile", "“percentile” needs a profile of this model")
    turn("gate", "tau")
    for name, value in (("gate_tau", 0.3), ("gate_temperature", 1.1), ("gate_margin", 0.9)):
        turn(name, value)
    turn("batch_gate", "fixed")
    turn("beta", 0.8)
    turn("batch_gate", "adaptive")
    page.wait_for_selector("#set-beta", state="hidden")
    for name, text in (("beta_budget", "8"), ("protect", "0:3")):
        mark(name, lambda n=name, t=text: dashboard.type_in(f"set-{n}", t))
    dashboard.type_in("set-protect", "9:1")
    dashboard.wait_text("#substitution-alert", "this model has layers 0 to 3")
    page.wait_for_function("document.querySelector('#set-protect').querySelector('input, textarea').value === '0:3'")
    tick("protect_super")
    turn("drop_share", 0.5)
    tick("drop_renormalise")
    refused(dashboard, "execute", "verify", "names no gate weights with its experts")
    dashboard.choose("set-predictor", "Next-layer gate")
    shows(dashboard, "predictor", "Next-layer gate")
    turn("execute", "verify")
    turn("execute_share", 0.7)
    turn("execute_weights", "true")
    tick("execute_prefill")
    turn("quality_rate", 0.5)
    assert set(declared(LossySettings)) - moved == {"gate_percentile"}, "that one needs a profile"
    exact_again(dashboard)
    page.wait_for_selector("#set-rho", state="hidden")
    defaults(dashboard)


@pytest.mark.long(0.5)  # tests/app/test_substitution.py has the section, test_live.py the badge in every state
def test_the_badge_and_the_panels_tell_what_is_changed_until_it_is_exact_again(dashboard: Dashboard) -> None:
    page = dashboard.page
    open_section(dashboard)
    page.wait_for_function(f"{BADGES}.length === 1 && {BADGES}.every((text) => text === 'EXACT')")
    assert not page.is_visible("canvas[data-c=changed]") and "lossy" in dashboard.frame()
    assert dashboard.frame()["lossy"] is None
    dashboard.choose("set-miss", "Leave it out")
    dashboard.ask("Drop").streaming()
    page.wait_for_function(f"{BADGES}.every((text) => /^LOSSY [1-9]/.test(text))")
    assert "dropped" in str(page.get_attribute("[data-k=exact]", "title"))
    dashboard.panel("Policies")
    dashboard.wait_text("[data-k=regret-note]", "as if every miss were fetched")
    dashboard.panel("Changed")
    for name in ("changed", "entropy", "missing"):
        page.wait_for_selector(f"canvas[data-c={name}]", state="visible")
    dashboard.wait_text("[data-k=quality-none]", "Not checked yet")
    for width, height, dark in ((390, 844, False), (1366, 768, True)):
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate(DARK, dark)
        before = dashboard.deck("frames")
        dashboard.wait_deck("frames", before)
        assert page.evaluate(FITS), width
        assert min(page.evaluate(TINTS, ["changed", "entropy", "missing"])) > 3, (width, dark)
    for name, told in (("changed", "dropped"), ("entropy", "token"), ("missing", "missing")):
        page.focus(f"canvas[data-c={name}]")
        page.keyboard.press("ArrowRight" if name != "entropy" else "ArrowLeft")
        page.keyboard.press("ArrowRight")
        assert told in page.evaluate("document.querySelector('[data-k=say]').textContent"), name
        page.keyboard.press("Escape")
    exact_again(dashboard)
    page.wait_for_function(f"{BADGES}.every((text) => text === 'EXACT')")
    page.wait_for_selector("canvas[data-c=changed]", state="hidden")
    page.wait_for_selector("canvas[data-c=pairs]", state="visible")  # until something lossy is on again
    dashboard.panel("Policies")
    page.wait_for_function("!document.querySelector('[data-k=regret-note]').textContent.includes('fetched')")
    dashboard.panel("Co-activation")
    dashboard.stop()
    dashboard.choose("set-miss", "Leave it out")
    dashboard.panel("Changed")
    dashboard.wait_text("[data-k=quality]", "96.0 %")
    dashboard.wait_text("[data-k=quality-text]", "tokens checked")
    dashboard.wait_text("[data-k=agreement-of]", "95 %: ")  # how sure that is, and the colour that it bears
    verdict = page.get_attribute("[data-k=agreement]", "data-verdict")
    assert verdict in ("close", "unclear", "low")
    assert ("too few" in dashboard.text("[data-k=agreement-of]")) == (verdict == "unclear")
    assert "tokens checked (95 %: " in str(page.get_attribute("[data-k=exact]", "title"))
    dashboard.wait_text("[data-k=changed-text]", "last 50 passes")
    exact_again(dashboard)
    dashboard.panel("Co-activation")


@pytest.mark.long(0.3)
def test_what_needs_a_profile_leads_to_one_and_its_preset_turns_the_section(dashboard: Dashboard) -> None:
    page = dashboard.page
    open_section(dashboard)
    dashboard.choose("set-miss", "Use another")
    dashboard.wait_text("#substitution-alert", "“Router's next best” is used")
    shows(dashboard, "substitute", "Router's next best")
    refused(dashboard, "substitute", "Buddies", "“Buddies” needs a profile of this model")
    page.click("#substitution-alert [data-open]")
    page.wait_for_selector("#calibration-go", state="visible")
    page.click("#calibration-go")
    dashboard.wait_text("#calibration-head", "Profile of Demo model")
    page.get_by_role("tab", name="Chat + Live").click()
    dashboard.choose_system("BuddyMoE")
    shows(dashboard, "miss", "Use another")
    shows(dashboard, "gate", "percentile")
    page.wait_for_selector("#may-change", state="visible")
    dashboard.ask("Buddies").streaming()
    dashboard.expect_mark(lambda: dashboard.slide("set-gate_percentile", 30), "gate_percentile")
    shows(dashboard, "preset", "BuddyMoE, changed")
    dashboard.expect_mark(lambda: dashboard.slide("set-gate_percentile", 15), "gate_percentile")
    shows(dashboard, "preset", "BuddyMoE")
    dashboard.expect_mark(lambda: dashboard.type_in("set-substitute-buddy-alpha", "0.8"), "substitute.buddy.alpha")
    dashboard.panel("Co-activation")
    page.click("[data-view=buddies]")
    canvas = page.locator("canvas[data-c=pairs]")
    canvas.focus()
    for key in ["ArrowRight"] * 3 + ["ArrowDown"] * 5:
        page.keyboard.press(key)
    assert page.evaluate("document.querySelector('[data-k=say]').textContent") == "Expert 5 → 2: q .31"
    page.keyboard.press("Escape")
    page.click("[data-view=together]")
    dashboard.wait_text("[data-k=ramp-unit]", "log scale")
    exact_again(dashboard)
    page.wait_for_selector("[data-view=buddies]", state="hidden")
    defaults(dashboard)
    dashboard.rest()
    page.get_by_role("tab", name="Calibrate").click()
    page.click("#profile-delete")
    page.click("#profile-delete-yes")
    dashboard.wait_text("#calibration-empty", "Not calibrated yet")
    page.get_by_role("tab", name="Chat + Live").click()
