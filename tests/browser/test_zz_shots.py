from tests.browser.dashboard import Dashboard
CUT = """() => [...document.querySelectorAll('.gradio-container *')].filter((e) => { const s = getComputedStyle(e);
  return e.offsetParent && e.children.length === 0 && e.textContent.trim() && (s.overflow !== 'visible' || s.overflowX !== 'visible') && e.scrollWidth > e.clientWidth + 1; })
  .map((e) => `${e.tagName}.${e.className} ${e.textContent.slice(0,60)} ${e.scrollWidth}>${e.clientWidth}`)"""
SMALL = """() => [...document.querySelectorAll('button, a, select, input:not([data-log]), textarea, [role=tab], [tabindex="0"]')].filter((e) => { const r = e.getBoundingClientRect();
  return e.offsetParent && r.width && (r.width < 23.5 || r.height < 23.5); }).map((e) => { const r = e.getBoundingClientRect(); return `${e.tagName}#${e.id}.${e.className} ${e.type||''} ${e.getAttribute('aria-label')||e.innerText.slice(0,30)} ${r.width.toFixed(0)}x${r.height.toFixed(0)} in ${e.closest('[id]')?.id}`; })"""
def test_shots(dashboard: Dashboard, open_page) -> None:
    page = dashboard.page
    page.set_viewport_size({"width": 1366, "height": 900})
    page.screenshot(path="/tmp/s_simple.png")
    print("CUT simple", page.evaluate(CUT))
    page.focus("#set-budget .info-text")
    page.screenshot(path="/tmp/s_help.png")
    page.keyboard.press("Escape")
    dashboard.advanced()
    page.wait_for_selector("#set-scope", state="visible")
    print("CUT adv", page.evaluate(CUT))
    page.set_viewport_size({"width": 1366, "height": 3200})
    page.screenshot(path="/tmp/s_adv.png")
    phone = open_page(width=390, height=844, scheme="dark")
    print("SMALL phone", "\n".join(phone.page.evaluate(SMALL)))
    phone.page.locator(".sidebar .toggle-button").click()
    phone.advanced()
    phone.page.wait_for_selector("#set-scope", state="visible")
    print("SMALL phone", "\n".join(phone.page.evaluate(SMALL)))
    phone.page.screenshot(path="/tmp/s_phone.png")
