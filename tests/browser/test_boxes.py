"""Every text lies within the boxes around it: in all tabs, on three screens, with the longest names."""

import pytest

from tests.browser.conftest import Open
from tests.browser.dashboard import FITS, SIZES, Dashboard

ANALYSES = ("Caches and prefetchers", "Quality", "A beside B")
TABS = ("Chat + Live", "Library", "Calibrate", "Analysis", "Batch", "Sessions", "System")
# Texts that go beyond a box around them, up to the first one that scrolls; shortened ones that no title gives in full.
OUTSIDE = """() => { const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const apart = '.visually-hidden, [aria-hidden=true], .unseen, .sr-only, .skip, .info-text, option, script, style';
    for (let node; (node = walker.nextNode());) {
        const own = node.parentElement;
        if (!node.data.trim() || own.closest(apart) || own.matches('.label-wrap .icon')) continue;
        if (!own.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        const text = range.getBoundingClientRect();
        for (let box = own; text.width && box !== document.body; box = box.parentElement) {
            const style = getComputedStyle(box), edge = box.getBoundingClientRect();
            if (['inline', 'contents'].includes(style.display)) continue;
            const short = style.textOverflow === 'ellipsis' && box.closest('[title]');
            if (short || style.overflowX === 'auto' || style.overflowX === 'scroll') break;
            const wide = Math.max(edge.left - text.left, text.right - edge.right);
            const high = Math.max(edge.top - text.top, text.bottom - edge.bottom);
            const tall = !['auto', 'scroll'].includes(style.overflowY) && high > 4;
            if (wide > 1.5 || tall) {
                found.push([node.data.trim().slice(0, 60), box.id || box.className || box.tagName, wide, high]);
                break;
            }
            if (['absolute', 'fixed'].includes(style.position) || !tall && style.overflowY === 'auto') break;
        }
    }
    return found; }"""
LONG = """() => { document.querySelector('.in-use span').textContent = 'In use: Some-Model-235B-A22B-Instruct-2507';
    return import('/ui/exactness.js').then((m) => m.tell({ weights: 'int4-g64', arithmetic: 'fast_experts' })); }"""


@pytest.mark.long(0.3)  # on a laptop below
@pytest.mark.parametrize("width", [390, 1920])
def test_no_text_leaves_its_box(open_page: Open, width: int) -> None:
    look(open_page(width=width, height=SIZES[width]))


def test_no_text_leaves_its_box_on_a_laptop(dashboard: Dashboard) -> None:
    look(dashboard)


def look(dashboard: Dashboard) -> None:
    """In every tab, then in Advanced."""
    page = dashboard.page
    dashboard.ask("A question whose name is far longer than what the head of a chat has room for").streaming()
    dashboard.stop()
    page.evaluate(LONG)
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate(OUTSIDE) == [], tab
        assert page.evaluate(FITS), tab
    page.get_by_role("tab", name="Analysis").click()
    for part in ANALYSES:
        page.get_by_role("tab", name=part).click()
        assert page.evaluate(OUTSIDE) == [], part
    if not page.locator(".sidebar.open").count():
        page.click(".sidebar .toggle-button")
    dashboard.advanced()
    page.wait_for_selector("#set-telemetry", state="visible")
    assert page.evaluate(OUTSIDE) == [], "Advanced"
