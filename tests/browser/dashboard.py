"""What a user does on the dashboard, in words. Waits are for signals of the product, never for a time."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

from playwright.sync_api import TimeoutError

from app.server import frames

FITS = "document.documentElement.scrollWidth <= innerWidth"
SIZES = {390: 844, 1366: 768, 1920: 1080}  # of screens: width -> height
ANSWERING = "document.body.dataset.answering"


class Dashboard:
    """One open page."""

    _front: Any = None  # the page that was looked at last

    def __init__(self, page: Any, url: str) -> None:
        self._page, self.url = page, url

    @property
    def page(self) -> Any:
        """Playwright's page, for what is not said here; in front of all others, as a browser draws a page behind others
        twice a second, and every step waits for what is drawn."""
        if Dashboard._front is not self._page:
            self._page.bring_to_front()
            Dashboard._front = self._page
        return self._page

    def goto(self, path: str = "/") -> Dashboard:
        self.page.goto(self.url + path)
        return self.settled()

    def settled(self) -> Dashboard:
        """The page knows the host's state and the deck has drawn."""
        self.page.wait_for_function("['ready', 'empty'].includes(document.body.dataset.host)")
        self.page.wait_for_function("+document.querySelector('.deck')?.dataset.frames > 0")
        self.page.wait_for_function(
            "document.querySelector('#send').disabled === (document.body.dataset.host === 'empty')"
        )
        return self

    def anew(self) -> Dashboard:
        """An open page as a new user finds it: an empty chat, in Simple. Settings are the server's, and stay."""
        self.page.keyboard.press("Escape")
        self.page.get_by_role("tab", name="Chat + Live").click()
        self.page.locator("#mode").get_by_text("Simple", exact=True).click()
        self.page.wait_for_selector("#set-scope", state="hidden")
        return self.emptied()

    def emptied(self) -> Dashboard:
        """An empty chat, on the tab of chats."""
        if self.page.evaluate("location.search !== '' || document.querySelector('#chat [data-testid=user]') !== null"):
            self.page.click("#new-chat")
        self.page.wait_for_function("!location.search && !document.querySelector('#chat [data-testid=user]')")
        self.page.fill("#message textarea", "")
        return self.settled()

    def loaded(self, name: str) -> Dashboard:
        """The model of that name is there, not merely being loaded."""
        self.wait_text("#model-status", name)
        self.wait_text("#model-status", "context")
        return self.settled()

    def load(self) -> Dashboard:
        """Press Load where a model is loaded, and see the new one in its place."""
        shown = "#model-status [data-load]"
        before = self.page.get_attribute(shown, "data-load")
        self.page.click("#load")
        self.page.wait_for_function(
            "([s, was]) => (document.querySelector(s)?.dataset.load ?? was) !== was", arg=[shown, before]
        )
        return self.settled()

    def load_anew(self) -> None:
        """Unload the demo model and load it again."""
        self.page.click("#unload")
        self.wait_text("#model-status", "No model loaded")
        self.page.wait_for_function("document.querySelector('.deck').dataset.state === 'empty'")
        self.page.wait_for_function("document.querySelector('#send').disabled")
        self.wait_text("#chat-empty", "Load a model to begin")
        self.page.click("#load")
        self.page.wait_for_function("document.body.dataset.host === 'ready'")
        self.settled()
        self.page.wait_for_function("document.querySelector('.deck').dataset.state === 'live'")
        self.wait_text("#model-status", "Demo model")

    # -- chat --------------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> Dashboard:
        """Send a message and see it in the chat."""
        before = self.page.locator("#chat [data-testid=user]").count()
        self.page.fill("#message textarea", text)
        self.page.press("#message textarea", "Enter")
        self.page.wait_for_function(f"document.querySelectorAll('#chat [data-testid=user]').length > {before}")
        return self

    def streaming(self, characters: int = 20) -> str:
        """Wait until so much of the answer can be read in the tail."""
        self.page.wait_for_function(f"document.querySelector('[data-t=text]').textContent.length >= {characters}")
        return self.tail()

    def tail(self) -> str:
        return str(self.page.evaluate("document.querySelector('[data-t=text]').textContent"))

    def stop(self) -> Dashboard:
        self.page.click("#stop")
        return self.answered()

    def answered(self) -> Dashboard:
        """The answer stands in the chat and the tail is gone."""
        self.page.wait_for_function("""() => {
            const count = (rows) => document.querySelectorAll(`#chat .${rows}`).length;
            const at = (selector) => document.querySelector(selector);
            return document.body.dataset.answering === '0' && at('.tail').dataset.state === 'none'
                && at('#send').offsetParent !== null && count('user-row') === count('bot-row'); }""")
        return self

    def answers(self) -> list[str]:
        return [str(text) for text in self.page.locator("#chat [data-testid=bot]").all_inner_texts()]

    def rest(self) -> None:
        """Stop what this page's chat is still writing; it may end by itself meanwhile."""
        self.page.evaluate(f"{ANSWERING} === '1' && document.querySelector('#stop').click()")
        self.page.wait_for_function(f"{ANSWERING} !== '1' && document.querySelector('.tail').dataset.state === 'none'")

    # -- sidebar -----------------------------------------------------------------------------------------------------

    def slide(self, element_id: str, value: float) -> None:
        """Drag a slider, as its input event says."""
        self.page.wait_for_selector(f"#{element_id} input[type=range]", state="attached")
        self.page.evaluate(
            """([id, value]) => { const range = document.querySelector(`#${id} input[type=range]`);
            range.value = value; range.dispatchEvent(new Event('input', {bubbles: true})); }""",
            [element_id, value],
        )

    def choose(self, element_id: str, title: str) -> None:
        """Pick from a dropdown. The menu of another one may still be fading away."""
        self.reach(element_id)
        box = self.page.locator(f"#{element_id} input")
        box.click()
        menu = self.page.locator(f"#{box.get_attribute('aria-controls')}")
        menu.get_by_role("option", name=title, exact=True).click()

    def choose_system(self, title: str) -> None:
        """Press a published system, or a control, in its list."""
        self.reach("systems")
        name = self.page.get_by_text(title, exact=True)
        button = self.page.locator("#systems button", has=name)
        if not button.is_visible():
            self.page.locator("#systems details", has=name).locator("summary").click()
        button.click()

    def panel(self, name: str) -> None:
        """Look at one of the deck's lower panels."""
        self.page.locator(".deck .tabs").get_by_role("tab", name=name).click()

    def type_in(self, element_id: str, text: str) -> None:
        """Write into a field and leave it, both in one moment: no redraw that was on its way comes in between."""
        self.reach(element_id)
        self.page.wait_for_selector(f"#{element_id}", state="visible")
        self.page.evaluate(
            """([id, text]) => { const box = document.querySelector(`#${id} :is(input:not([type=range]), textarea)`);
            box.focus(); box.value = text; box.dispatchEvent(new Event('input', {bubbles: true})); box.blur(); }""",
            [element_id, text],
        )

    def limit_answers(self, tokens: str) -> None:
        """Set the longest answer. Ends when the host has it, so that what is asked next finds it."""

        def is_taken(response: Any) -> bool:
            asked = response.request.post_data if response.request.method == "POST" else None
            return f'"data":[{tokens}]' in (asked or "")

        with self.page.expect_response(is_taken):
            self.type_in("set-sampling-max_new_tokens", tokens)

    def expect_mark(self, turn: Callable[[], None], name: str) -> None:
        """Turning this control while an answer is written puts one more mark on the deck, and the engine names the
        setting. What was turned just before may come first."""
        shown = before = len(self.marks())
        turn()
        while not any(mark.startswith(name) for mark in self.marks()[before:]):
            self.wait_deck("marks", shown)
            shown = self.deck("marks")
        self.wait_deck("marks", before)

    def advanced(self) -> None:
        self.page.locator("#mode").get_by_text("Advanced", exact=True).click()

    def reach(self, element_id: str) -> None:
        """Switch to Advanced for a control that Simple does not show."""
        if not self.page.is_visible(f"#{element_id}"):
            self.advanced()

    def value(self, selector: str) -> str:
        return str(self.page.input_value(selector))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_text(self, selector: str, text: str) -> None:
        self.page.wait_for_function(
            "([s, t]) => document.querySelector(s)?.innerText.includes(t)", arg=[selector, text]
        )

    def insist(self, button: str, selector: str, text: str) -> None:
        """Click until the text is there, as a user does whose click a busy page has lost."""
        for patience_ms in (4_000, 20_000, 40_000):
            self.page.click(button)
            try:
                self.page.wait_for_function(
                    "([s, t]) => document.querySelector(s)?.innerText.includes(t)",
                    arg=[selector, text],
                    timeout=patience_ms,
                )
            except TimeoutError:
                continue
            return
        raise AssertionError(f"{button} never led to {text!r} in {selector}")

    # -- what the engine says, without the browser ---------------------------------------------------------------------

    def frame(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/live/frame", timeout=30) as reply:
            return frames.decode(reply.read())[0]

    def marks(self) -> list[str]:
        """The settings that were moved, in the engine's words."""
        return [text for _, text in self.frame().get("marks", [])]

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/healthz", timeout=30) as reply:
            return dict(json.loads(reply.read()))

    def deck(self, name: str) -> int:
        """A counter of the deck: frames drawn, marks shown."""
        return int(self.page.get_attribute(".deck", f"data-{name}") or 0)

    def wait_deck(self, name: str, above: int) -> None:
        self.page.wait_for_function(f"+document.querySelector('.deck').dataset.{name} > {above}")
