"""The deck's panels, one at a time; and its key figures while the charts are paused and a pass is pointed at."""

from collections.abc import Iterator

import pytest

from tests.browser.conftest import Open
from tests.browser.dashboard import FITS, SIZES, Dashboard

IN_SIGHT = """(s) => { const e = document.querySelector(s), box = e.getBoundingClientRect();
    const deck = document.querySelector('#deck-column').getBoundingClientRect();
    return e.offsetParent !== null && box.height > 100 && box.top >= deck.top
        && box.bottom <= Math.min(deck.bottom, innerHeight); }"""
DRAWS = """() => { window.drawn = new Set();
    const { clearRect } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.clearRect = function (...box) {
        window.drawn.add(this.canvas.dataset.c); return clearRect.apply(this, box); }; }"""
PAIRS = "canvas[data-c=pairs]"


@pytest.fixture
def deck(dashboard: Dashboard) -> Iterator[Dashboard]:
    """With its first panel, before and after."""
    dashboard.panel("Co-activation")
    dashboard.page.evaluate("document.querySelector('#deck-column').scrollTop = 0")
    yield dashboard
    dashboard.panel("Co-activation")


def test_co_activation_is_in_sight_while_chatting_on_a_laptop(deck: Dashboard) -> None:
    deck.ask("In sight").streaming(60)
    for width in (1366, 1920):
        deck.page.set_viewport_size({"width": width, "height": SIZES[width]})
        deck.page.wait_for_function(IN_SIGHT, arg=PAIRS)
        assert deck.page.is_visible("#stop") and deck.page.evaluate(FITS)
        assert deck.page.evaluate("document.querySelector('#deck-column').scrollTop") == 0
    deck.page.set_viewport_size({"width": 1366, "height": SIZES[1366]})
    deck.stop()


def test_panels_are_tabs_of_the_keyboard_remembered_and_drawn_only_while_shown(deck: Dashboard) -> None:
    page = deck.page
    chosen = ".deck [role=tab][aria-selected=true]"
    assert page.get_attribute(chosen, "data-panel") == "together" and page.is_hidden("canvas[data-c=layers]")
    page.focus(chosen)
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("canvas[data-c=layers]", state="visible")
    assert page.is_hidden(PAIRS) and page.evaluate("document.activeElement.dataset.panel") == "layers"
    assert page.get_attribute("#deck-panel-layers", "aria-labelledby") == "deck-tab-layers"
    assert page.locator(".deck .tabs [tabindex='0']").count() == 1, "one stop for the Tab key"
    page.evaluate(DRAWS)
    deck.ask("Draw only what is shown").streaming(60)
    deck.stop()
    drawn = set(page.evaluate("[...window.drawn]"))
    assert {"layers", "residency", "tpot", "link"} <= drawn and not {"pairs", "regret", "changed", "missing"} & drawn
    page.focus(chosen)
    page.keyboard.press("End")  # past those that have nothing to show: nothing lossy is on
    page.wait_for_selector("canvas[data-c=regret]", state="visible")
    assert page.is_hidden(".deck [data-panel=lossy]")
    assert page.locator("#deck-panel-policies .tools button").count() == 2, "enlarge and save"
    page.keyboard.press("ArrowRight")  # round to the first
    page.wait_for_selector(PAIRS, state="visible")


def test_the_panel_is_the_same_after_a_reload(open_page: Open) -> None:
    dashboard = open_page()
    dashboard.panel("Layers")
    dashboard.page.reload()
    dashboard.settled()
    dashboard.page.wait_for_selector("canvas[data-c=layers]", state="visible")
    assert dashboard.page.is_hidden(PAIRS)


def test_paused_the_key_figures_are_those_of_the_pass_that_is_pointed_at(deck: Dashboard) -> None:
    page = deck.page
    deck.ask("Look at one").streaming(80)
    deck.stop()
    page.wait_for_function("document.querySelector('.deck').dataset.busy === '0'")
    link = page.locator(".deck canvas[data-c=link]")
    box = link.bounding_box()
    keys = ("tok-sub", "tok", "hit", "hit-sub", "tpot", "link", "link-sub")

    def figures() -> dict[str, str]:
        return {key: deck.text(f"[data-k={key}]") for key in keys}

    usual = figures()
    link.hover(position={"x": 60, "y": box["height"] / 2})
    page.wait_for_selector(".deck-tip", state="visible")
    assert figures() == usual, "while the charts run, only the tip tells of a pass"
    page.click(".deck .pause")
    link.hover(position={"x": 60, "y": box["height"] / 2})
    page.wait_for_function("document.querySelector('.deck').dataset.pass !== ''")
    shown = figures()
    assert shown["tok-sub"].startswith("pass ") and shown["hit-sub"].endswith(" requests")
    assert shown["link-sub"].endswith(" copied") and deck.text("[data-k=tpot-text]").lower().startswith("pass ")
    assert [deck.text(f"[data-k={kind}-bytes]")[-1] for kind in ("demand", "prefetch", "wasted")] == ["B"] * 3
    page.mouse.move(2, 2)
    page.wait_for_selector(".deck-tip", state="hidden")
    assert figures() == shown, "they stay, to be read"

    page.focus(".deck canvas[data-c=tpot]")
    page.keyboard.press("ArrowRight")
    for _ in range(40):  # a prompt's pass is told in other words
        if "prefill" in deck.text("[data-k=tok-sub]"):
            page.keyboard.press("ArrowRight")
    told = str(page.evaluate("document.querySelector('[data-k=say]').textContent")).splitlines()
    now = figures()
    assert told[0].lower() == now["tok-sub"] != shown["tok-sub"]
    assert float(told[1].split(" ms")[0]) == pytest.approx(float(now["tpot"]), rel=0.02)
    assert told[2] == f"{now['hit-sub']} hit"
    assert float(now["tok"]) * float(now["tpot"]) == pytest.approx(1000, rel=0.02), "one token"
    hits, of = (int(word) for word in now["hit-sub"].split()[::2][:2])
    assert float(now["hit"]) == pytest.approx(100 * hits / of, abs=0.06)
    page.keyboard.press("Escape")
    page.wait_for_function("document.querySelector('.deck').dataset.pass === ''")
    assert figures() == usual
    page.keyboard.press("ArrowLeft")
    page.click(".deck .pause")
    page.wait_for_function("document.querySelector('.deck').dataset.pass === ''")
    assert figures()["tok-sub"] == "idle"
