"""Late answers of the server: whatever overtook what, the page ends up showing what is so, and what was turned
in between stays turned."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.dashboard import Dashboard
from tests.fake_models import fake_pack

EVENTS = "**/gradio_api/run/**"
# Notes what an element shows from now on, one text after the other.
WATCH = """(selector) => { const box = document.querySelector(selector), shown = window.shown = [box.innerText];
    new MutationObserver(() => { if (box.innerText !== shown.at(-1)) shown.push(box.innerText); })
        .observe(box, { childList: true, subtree: true, characterData: true }); }"""
# Notes whether a box is ticked, whenever that changes by other hands than the user's.
WATCH_TICKS = """(selector) => { const box = document.querySelector(selector), ticks = window.ticks = [];
    const { get, set } = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'checked');
    Object.defineProperty(box, 'checked', { get, set(value) {
        if (value !== get.call(this)) ticks.push(value);
        set.call(this, value); } }); }"""
# What came late was shown, and was put right.
PUT_RIGHT = """([late, right]) => window.shown.some((text) => text.includes(late))
    && window.shown.at(-1).includes(right) && !window.shown.at(-1).includes(late)"""


class Held:
    """The page's next event with such inputs: it reaches the server, or its answer the page, when it is let go."""

    def __init__(self, dashboard: Dashboard, wanted: Callable[[list[Any]], bool], answered: bool) -> None:
        """`answered` = the server has it at once, and its answer is held."""
        self._page, self._wanted, self._answered = dashboard.page, wanted, answered
        self._route: Any = None
        self._answer: Any = None
        self._page.route(EVENTS, self._take)

    def _take(self, route: Any) -> None:
        if self._route is not None or not self._is_it(route.request):
            route.continue_()
            return
        self._route = route
        if self._answered:
            self._answer = route.fetch()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """What is done in the `with` leads to the event; ends when it is held."""
        with self._page.expect_request(self._is_it):
            yield
        while (self._answer if self._answered else self._route) is None:
            self._page.evaluate("0")  # lets Playwright call `_take`

    def _is_it(self, request: Any) -> bool:
        return request.method == "POST" and "/run/" in request.url and self._wanted(request.post_data_json["data"])

    def let_go(self, selector: str, late: str, right: str) -> None:
        """Ends when `selector` has shown what came late, and then what is right."""
        self._page.evaluate(WATCH, selector)
        self.go_on()
        self._page.wait_for_function(PUT_RIGHT, arg=[late, right])
        self._page.unroute(EVENTS)

    def let_go_in_vain(self) -> None:
        """Ends when the page has received what came late, and has taken nothing of it: it asks again."""
        with self._page.expect_request(lambda request: request is not self._route.request and self._is_it(request)):
            self.go_on()
        self._page.unroute(EVENTS)

    def go_on(self) -> None:
        """Let it go, without waiting for anything."""
        if self._answered:
            self._route.fulfill(response=self._answer)
        else:
            self._route.continue_()


def of_the_page(inputs: list[Any]) -> bool:
    """A redraw, or a press that may be followed by one: it has the stamps of what the page shows."""
    return len(inputs) > 1 and isinstance(inputs[0], dict) and "settings" in inputs[0]


def redraw(inputs: list[Any]) -> bool:
    return of_the_page(inputs) and isinstance(inputs[1], dict)


def load(inputs: list[Any]) -> bool:
    return of_the_page(inputs) and isinstance(inputs[1], str)


def search(inputs: list[Any]) -> bool:
    """For models, as the library is opened."""
    return len(inputs) == 3 and isinstance(inputs[0], dict) and "library" in inputs[0] and isinstance(inputs[2], list)


def end_of_answer(inputs: list[Any]) -> bool:
    return len(inputs) == 2 and isinstance(inputs[0], dict) and "turn" in inputs[0]


def test_a_new_chat_is_not_left_for_the_old_one(dashboard: Dashboard) -> None:
    """Its answer ended just before."""
    held = Held(dashboard, end_of_answer, answered=True)
    with held.begun():
        dashboard.ask("Leave me, in 3 words")
    dashboard.page.click("#new-chat")
    dashboard.page.wait_for_function("!document.querySelector('#chat [data-testid=user]')")
    held.let_go("#talk", late="Leave me", right="")
    dashboard.page.wait_for_function("location.search === ''")  # the address follows with the next look at the server


@pytest.mark.long(0.1)
def test_what_was_turned_since_is_not_turned_back(dashboard: Dashboard) -> None:
    """A redraw has the controls as they were before."""
    page, bypass = dashboard.page, dashboard.page.locator("#set-bypass input")
    dashboard.advanced()
    was = bypass.is_checked()
    held = Held(dashboard, redraw, answered=True)
    with held.begun():
        dashboard.slide("set-budget", 60)
    dashboard.expect_mark(bypass.click, "bypass")
    page.evaluate(WATCH_TICKS, "#set-bypass input")
    held.let_go_in_vain()
    assert bypass.is_checked() is not was
    assert page.evaluate("window.ticks") == []
    dashboard.expect_mark(bypass.click, "bypass")
    dashboard.slide("set-budget", 50)


def test_a_choice_from_a_menu_is_one_event(dashboard: Dashboard) -> None:
    """Gradio tells of it twice: the second one's answer could overtake the next choice's, and take back its notice."""
    page, sent = dashboard.page, list[Any]()
    dashboard.advanced()
    page.on("request", lambda request: sent.append(request.post_data_json["data"]) if "/run/" in request.url else None)
    for title, told in (("LFU", "used least often"), ("LRU", "unused for longest")):
        dashboard.choose("set-eviction", title)
        dashboard.wait_text("#about-eviction", told)
    assert [data for data in sent if data in (["lfu"], ["lru"])] == [["lfu"], ["lru"]]


@pytest.mark.long(0.1)  # above, what was turned; tests/app/test_redraws.py judges the form again
def test_the_verdict_is_on_the_form_as_shown(dashboard: Dashboard, tmp_path: Path) -> None:
    """A redraw was asked for with the form of before."""
    page, pack = dashboard.page, fake_pack(tmp_path / "Late")
    dashboard.advanced()  # where the card says what becomes of the experts
    held = Held(dashboard, redraw, answered=False)
    with held.begun():
        dashboard.slide("set-budget", 60)
    model = page.locator("#model input")
    model.fill(str(pack))
    model.press("Enter")
    dashboard.wait_text("#fit", "read when needed")
    page.evaluate(WATCH, "#fit")
    held.let_go_in_vain()
    dashboard.wait_text("#fit", "read when needed")
    assert not any("not needed once loaded" in text for text in page.evaluate("window.shown"))
    model.fill("demo")
    model.press("Enter")
    dashboard.wait_text("#fit", "not needed once loaded")
    before = dashboard.text("#fit")
    dashboard.slide("set-budget", 50)
    page.wait_for_function("before => document.querySelector('#fit').innerText !== before", arg=before)


@pytest.mark.long(0.1)  # the tests of a new chat and of what was turned, above; tests/app/test_library.py has folders
def test_a_folder_entered_during_a_search_stays(dashboard: Dashboard, tmp_path: Path) -> None:
    """What the search found comes after the folder's models are listed."""
    page, held = dashboard.page, Held(dashboard, search, answered=True)
    fake_pack(tmp_path / "mine" / "Entered")
    with held.begun():
        page.get_by_role("tab", name="Library").click()
    box = page.locator("#folders input")
    box.fill(str(tmp_path / "mine"))
    box.press("Enter")
    dashboard.wait_text("#models", "Entered")
    page.evaluate(WATCH, "#models")
    held.go_on()
    page.wait_for_function("window.shown.length > 2 && window.shown.at(-1).includes('Entered')")
    page.locator("#folders .token-remove").first.click()
    page.wait_for_function("!document.querySelector('#models').innerText.includes('Entered')")


@pytest.mark.long(0.1)  # tests/app/test_loading.py has the progress of a load and its end
@pytest.mark.skipif(
    os.environ.get("MOESTRO_TEST_ENGINE") == "real", reason="the demo model loads too fast to be cancelled"
)
def test_what_became_of_a_load_stays(dashboard: Dashboard) -> None:
    """Its progress is shown, and it is cancelled; the answer to pressing Load comes when it is over."""
    page = dashboard.page
    held = Held(dashboard, load, answered=True)
    dashboard.choose("set-format", "int4-g64")
    with held.begun():
        page.click("#load")
    dashboard.wait_text("#load-progress", "Packing experts")
    page.wait_for_function("+document.querySelector('#load-progress [role=progressbar]').ariaValueNow > 0")
    page.click("#cancel-load")
    dashboard.wait_text("#model-alert", "Cancelled")
    dashboard.wait_text("#model-status", "checkpoint")
    held.let_go("#model-status", late="Loading", right="checkpoint")
    dashboard.wait_text("#model-alert", "Cancelled")
    dashboard.choose("set-format", "checkpoint")
