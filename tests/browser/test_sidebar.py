"""The sidebar: every live control while tokens stream, presets, pins, search, focus, errors in words."""

from pathlib import Path

import pytest

from app.ui.sidebar.cache import exact
from core.settings.config import KINDS, params
from core.settings.registry import variants
from tests.browser.dashboard import Dashboard
from tests.selection import layered


@pytest.mark.parametrize("every", layered((False, True), quick=lambda every: not every), ids=["some", "every"])
def test_every_live_control_moves_its_setting_while_tokens_stream(dashboard: Dashboard, every: bool) -> None:
    """One control of each kind: a slider, a menu, a variant with knobs of its own and one that needs a profile, a
    box. Text fields are those of pins, below. Or `every` one, but settings of experts in blocks, which are not shown
    for whole ones (test_split.py), and those of a GPU on a CPU."""
    if every:
        dashboard.load_anew()  # the deck keeps the last 200 marks of a load, and here they are counted
    dashboard.advanced()
    dashboard.ask("Turn everything").streaming()
    known = params()
    shown = {name: param for name, param in exact().items() if not (known[name].in_blocks or known[name].on_gpu)}
    for name in exact().keys() - shown.keys():
        assert not dashboard.page.is_visible(f"#set-{name}")
    for percent in (70, 40)[not every :]:
        dashboard.expect_mark(lambda p=percent: dashboard.slide("set-budget", p), "budget")
    dashboard.page.wait_for_function(
        "document.querySelector('#set-budget-text').querySelector('input, textarea').value === '40%'"
    )
    for kind in [name for name in shown if name in KINDS][: None if every else 1]:
        choices = [choice for choice in reversed(variants(kind)) if choice.name != known[kind].default]
        if not every:  # those with knobs of their own first
            able = sorted((choice for choice in choices if not choice.needs), key=lambda choice: not choice.params)
            default = [choice for choice in variants(kind) if choice.name == known[kind].default]
            choices = [*able[:1], *[choice for choice in choices if choice.needs][:1], *default]
        for choice in choices:
            if choice.name == dashboard_value(dashboard, kind):
                continue
            if choice.needs:
                _refused(dashboard, kind, choice.title)
                continue
            dashboard.expect_mark(lambda c=choice, k=kind: dashboard.choose(f"set-{k}", c.title), kind)
            for param in choice.params:
                dashboard.page.wait_for_selector("#set-" + choice.full_name(param).replace(".", "-"), state="visible")
    drafts = "off" if dashboard.value("#set-drafts input") == "lookup" else "lookup"
    menus = [("scope", "global"), ("scope", "layer"), ("drafts", drafts), ("miss_placement", "host")]
    for name, other in [*(menus if every else []), ("link", "emulated")]:
        dashboard.expect_mark(lambda n=name, o=other: dashboard.choose(f"set-{n}", o), name)
    for name, value in (("link_gbps", 2.5 + every), ("link_latency_us", 50 + every))[: None if every else 1]:
        dashboard.expect_mark(lambda n=name, v=value: dashboard.slide(f"set-{n}", v), name)
    for name in [n for n in shown if known[n].type == "bool"][: None if every else 1]:
        without = [n for n in known[name].active_when or () if known[n].default is False]  # it is not shown
        for one in (*without, name, name, *without):  # and back
            dashboard.expect_mark(lambda n=one: dashboard.page.click(f"#set-{n} input"), one)
    dashboard.expect_mark(lambda: dashboard.choose("set-link", "auto"), "link")
    dashboard.page.wait_for_selector("#set-link_gbps", state="hidden")
    if not every:
        return
    dashboard.expect_mark(lambda: dashboard.slide("set-host_threads", 2), "host_threads")
    dashboard.expect_mark(lambda: dashboard.slide("set-kv_chats", 2), "kv_chats")
    dashboard.expect_mark(lambda: dashboard.type_in("set-pins", "0:3 1:2"), "pins")
    moved = {mark.split()[0] for mark in dashboard.marks()}
    refused = {k for k in KINDS if k in shown and all(v.needs or v.name == known[k].default for v in variants(k))}
    assert set(shown) - moved == {"telemetry", *refused}


def _refused(dashboard: Dashboard, kind: str, title: str) -> None:
    """What needs a profile says so, and the menu goes back to what is in force."""
    before = dashboard.value(f"#set-{kind} input")
    dashboard.choose(f"set-{kind}", title)
    dashboard.wait_text("#cache-alert", f"“{title}” needs a profile of this model")
    dashboard.page.wait_for_function(
        "([id, was]) => document.querySelector(`#${id} input`).value === was", arg=[f"set-{kind}", before]
    )


def dashboard_value(dashboard: Dashboard, kind: str) -> str:
    title = dashboard.value(f"#set-{kind} input")
    return next(v.name for v in variants(kind) if v.title == title)


@pytest.mark.long(0.2)
def test_what_prefetchers_share_shows_for_those_that_use_it_and_keeps_its_value(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.choose("set-predictor", "Next-layer gate")
    page.wait_for_selector("#set-predictor-floor", state="visible")
    dashboard.expect_mark(lambda: dashboard.slide("set-predictor-width", 3), "predictor.width")
    dashboard.choose("set-predictor", "Previous token")
    page.wait_for_selector("#set-predictor-floor", state="hidden")
    page.wait_for_selector("#set-predictor-distance", state="visible")
    assert dashboard.value("#set-predictor-width input") == "3"
    dashboard.expect_mark(lambda: dashboard.slide("set-predictor-width", 0), "predictor.width")
    dashboard.choose("set-predictor", "None")
    page.wait_for_selector("#set-predictor-width", state="hidden")


def test_menus_close_as_the_focus_leaves_which_is_never_lost(dashboard: Dashboard, tmp_path: Path) -> None:
    page = dashboard.page
    for menu in ("#set-preset input", "#model input"):
        page.locator(menu).first.focus()
        page.wait_for_function("(menu) => document.querySelector(menu).ariaExpanded === 'true'", arg=menu)
        page.keyboard.press("Tab")
        page.wait_for_function("(menu) => document.querySelector(menu).ariaExpanded !== 'true'", arg=menu)
        assert page.evaluate("document.activeElement !== document.body"), menu
    box = page.locator("#model input")
    box.fill(str(tmp_path / "not-there"))
    page.keyboard.press("Tab")  # what was typed is taken
    dashboard.wait_text("#fit", "Cannot be loaded")
    assert page.input_value("#model input") == str(tmp_path / "not-there")
    box.fill("demo")
    box.press("Enter")
    dashboard.wait_text("#fit", "Fits")
    page.focus("[data-skip]")
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.matches('#message textarea')")


def test_what_is_drawn_again_hidden_or_disabled_hands_the_focus_on(dashboard: Dashboard) -> None:
    page, toggle = dashboard.page, "[data-theme-toggle]"
    page.focus(toggle)
    page.evaluate("(one) => { const old = document.querySelector(one); old.replaceWith(old.cloneNode(true)); }", toggle)
    page.wait_for_function("(one) => document.activeElement === document.querySelector(one)", arg=toggle)
    for change, back in (("disabled = true", "disabled = false"), ("style.display = 'none'", "style.display = ''")):
        page.focus(toggle)
        page.evaluate(f"(one) => {{ document.querySelector(one).{change}; }}", toggle)
        elsewhere = "(one) => document.activeElement !== document.body && !document.activeElement.matches(one)"
        page.wait_for_function(elsewhere, arg=toggle)
        page.evaluate(f"(one) => {{ document.querySelector(one).{back}; }}", toggle)
    page.focus("#message textarea")
    page.evaluate("document.activeElement.blur()")  # on purpose
    dashboard.value("#set-preset input")
    assert page.evaluate("document.activeElement === document.body")


@pytest.mark.long(0.1)  # tests/app/test_settings.py has all of it but the page
def test_a_preset_applies_all_its_values_and_moving_a_knob_makes_it_custom(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.advanced()
    dashboard.ask("Compare systems").streaming()

    def preset_shows(title: str) -> None:
        page.wait_for_function("t => document.querySelector('#set-preset input').value === t", arg=title)

    shown = dashboard.deck("marks")
    dashboard.choose_system("FineMoE")
    dashboard.wait_text("#about-preset", "FineMoE section 4")
    dashboard.wait_deck("marks", shown)
    assert {"eviction", "scope", "predictor"} <= {mark.split()[0] for mark in dashboard.marks()[-10:]}
    assert [dashboard.value(f"#set-{name} input") for name in ("eviction", "scope", "predictor")] == [
        "FineMoE",
        "global",
        "Expert maps",
    ]
    page.wait_for_selector("#set-layer_slots", state="hidden")
    page.wait_for_selector("#set-predictor-distance", state="visible")
    dashboard.choose("set-eviction", "LRU")
    preset_shows("FineMoE, changed")
    dashboard.wait_text("#about-preset", "Changed: Cache policy.")
    page.wait_for_selector("#reset-preset", state="visible")
    page.click("#reset-preset")
    preset_shows("FineMoE")
    page.wait_for_selector("#reset-preset", state="hidden")
    assert dashboard.value("#set-eviction input") == "FineMoE"
    dashboard.choose_system("MoEpic")
    page.wait_for_selector("#set-layer_slots", state="visible")
    dashboard.wait_text("#about-preset", "here experts are whole")
    assert "Needs a profile" not in dashboard.text("#about-preset")
    dashboard.choose_system("AdapMoE")
    dashboard.wait_text("#cache-alert", "“AdapMoE” needs a profile of this model")
    preset_shows("MoEpic")
    dashboard.choose_system("Mixtral-offloading")
    preset_shows("Mixtral-offloading")
    dashboard.choose("set-predictor", "None")  # the settings are the server's: other files' tests begin without one
    preset_shows("Mixtral-offloading, changed")
    dashboard.wait_text("#about-preset", "Changed: Prefetcher.")


def test_the_preset_menu_leads_to_the_published_systems_also_in_simple(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.choose("set-preset", "Auto")
    page.wait_for_function("document.querySelector('#set-preset input').value === 'Auto'")
    assert page.is_hidden("#systems")
    page.locator("#set-preset input").click()
    page.get_by_role("option", name="Published systems…").click()
    page.wait_for_selector("#systems [data-preset=finemoe]", state="visible")
    page.wait_for_function("document.querySelector('#set-preset input').value === 'Auto'")
    assert page.is_hidden("#systems [data-preset=moepic_half]"), "controls are in a list of their own"
    assert "profile" in page.locator("#systems [data-preset=adapmoe] em").all_inner_texts()
    page.click("#systems [data-preset=moe_infinity]")
    page.wait_for_selector("#systems [data-preset=moe_infinity][aria-pressed=true]", state="visible")
    page.wait_for_function("document.querySelector('#set-preset input').value === 'MoE-Infinity'")
    page.click("#systems summary")
    dashboard.choose("set-preset", "Auto")
    page.wait_for_selector("#systems [aria-pressed=true]", state="detached")
    page.evaluate("document.body.classList.remove('show-systems')")


def test_pins_show_in_the_residency_map_and_bad_ones_are_explained_and_put_back(dashboard: Dashboard) -> None:
    dashboard.advanced()
    before = dashboard.deck("marks")
    dashboard.type_in("set-pins", "0:1")
    dashboard.wait_deck("marks", before)
    dashboard.page.focus(".deck canvas[data-c=residency]")
    for _ in range(2):
        dashboard.page.keyboard.press("ArrowRight")
    told = dashboard.page.evaluate("document.querySelector('[data-k=say]').textContent")
    assert told.startswith("Layer 0, expert 1") and told.endswith(", pinned")
    dashboard.page.keyboard.press("Escape")
    dashboard.type_in("set-pins", "everything")
    dashboard.wait_text("#cache-alert", "Write layer:expert pairs")
    dashboard.page.wait_for_function("document.querySelector('#set-pins textarea, #set-pins input').value === '0:1'")
    dashboard.type_in("set-pins", "")
    dashboard.page.wait_for_function("!document.querySelector('#cache-alert .notice')")


def test_a_setting_is_found_by_its_words(dashboard: Dashboard) -> None:
    """Of its name or its help; groups without one are hidden, and Simple shows the same whatever is searched."""
    dashboard.advanced()
    page = dashboard.page
    search = page.locator("#find-setting")
    search.fill("prefetcher")
    page.wait_for_selector("#set-eviction", state="hidden")
    page.wait_for_selector("#set-predictor", state="visible")
    shown = page.locator("#sidebar .group:visible").count()
    assert 0 < shown < page.locator("#sidebar .group").count()
    search.fill("no such words")
    page.wait_for_selector("#find-none", state="visible")
    page.wait_for_selector("#set-predictor", state="hidden")
    page.locator("#mode").get_by_text("Simple", exact=True).click()
    page.wait_for_selector("#set-budget", state="visible")
    dashboard.advanced()
    search.fill("")
    page.wait_for_selector("#set-eviction", state="visible")
    assert page.is_hidden("#find-none")


@pytest.mark.long(0.1)  # the test above sees the knobs of one variant, test_late_answers.py what is said of it
def test_a_variants_own_knobs_show_only_while_it_is_chosen(dashboard: Dashboard) -> None:
    dashboard.choose("set-eviction", "LCP")
    dashboard.page.wait_for_selector("#set-eviction-lcp-omega")
    dashboard.page.wait_for_selector("#set-predictor-hybrid-threshold", state="hidden")
    dashboard.wait_text("#about-eviction", "MoEpic")
    before = len(dashboard.marks())
    dashboard.type_in("set-eviction-lcp-omega", "64")
    dashboard.wait_deck("marks", before)
    assert dashboard.marks()[-1].endswith("64")
    dashboard.choose("set-eviction", "LRU")
    dashboard.page.wait_for_selector("#set-eviction-lcp-omega", state="hidden")
