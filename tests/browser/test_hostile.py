"""Answers and messages made to take over the page: nothing runs, nothing is loaded, nothing covers the controls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.conftest import Server
from tests.browser.dashboard import Dashboard
from tests.browser.lengths import say

RUN = "window.taken = (window.taken || 0) + 1"
ELSEWHERE = "http://127.0.0.9:9"
COVER = '<div style="position:fixed;inset:0;z-index:99999;background:red" id="cover">Your session ended</div>'
FORM = f'<form action="{ELSEWHERE}"><input name="password" autofocus><button>Log in</button></form>'
PAYLOADS = [
    f"<script>{RUN}</script>",
    f'<img src=x onerror="{RUN}">',
    f'<svg onload="{RUN}"><circle r=9 /></svg>',
    f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    f'<iframe src="javascript:parent.{RUN}"></iframe>',
    f'<body onload="{RUN}">',
    f'<details open ontoggle="{RUN}">x</details>',
    f'<input autofocus onfocus="{RUN}">',
    f'<video src=x onerror="{RUN}"></video>',
    f'<a href="javascript:{RUN}" id=bait>a</a>',
    f"[b](javascript:{RUN})",
    f'<math><mtext><table><mglyph><style><img src=x onerror="{RUN}">',
    f'<svg><script href="data:text/javascript,{RUN}" />',
    f'<object data="data:text/html,<script>{RUN}</script>"></object>',
    f'<marquee onstart="{RUN}">m</marquee>',
    f'<svg><animate onbegin="{RUN}" attributeName=x dur=1s>',
    f'<meta http-equiv="refresh" content="0;url={ELSEWHERE}">',
    f'<base href="{ELSEWHERE}/">',
    f'<link rel="stylesheet" href="{ELSEWHERE}/x.css">',
    f"<style>@import '{ELSEWHERE}/y.css';</style>",
    "<style>#send, #chat-live { display: none !important }</style>",
    f'<img src="{ELSEWHERE}/pixel.png">',
    f"![remote]({ELSEWHERE}/pixel.png)",
    f'<video autoplay src="{ELSEWHERE}/v.mp4"></video>',
    f'<audio autoplay src="{ELSEWHERE}/a.mp3"></audio>',
    f'<embed src="{ELSEWHERE}/e.swf">',
    COVER,
    FORM,
    f"| `a | {COVER}` |\n|---|---|\n| 1 | 2 |",
    f'$$\\href{{javascript:{RUN}}}{{x}} <img src=x onerror="{RUN}">$$',
    f"```mermaid\ngraph LR\nA[\"<img src=x onerror='{RUN}'>\"]-->B\nclick A call alert(1)\n```",
    f"```html\n{COVER}\n```",
]
GOOD = """# Head

A **bold** word, `vector<int>`, <b>no tag</b> and 1 < 2 in $$\\frac{a}{b} < c$$

1. One
   ```cpp
   #include <map>
   ```
   ```html
   <p>x</p>
   ```

| a | b |
|---|---|
| 1 | 2 |
"""


def reached(page: Any) -> bool:
    """Is what is seen at the middle of the Send button that button?"""
    return bool(
        page.evaluate("""() => { const box = document.querySelector('#send').getBoundingClientRect();
        const seen = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return seen !== null && seen.closest('#send') !== null; }""")
    )


@pytest.fixture(scope="module")
def suspect(profile: Any, server: Server) -> Iterator[tuple[Dashboard, list[str]]]:
    """A page that may try what the policy forbids, as its console tells, and what came of it."""
    strange: list[str] = []

    def note(what: str) -> None:
        if urlsplit(what).netloc != urlsplit(server.url).netloc:
            strange.append(what)

    page = profile.new_page()
    page.set_default_timeout(90_000)
    page.on("dialog", lambda dialog: (note("a dialog"), dialog.dismiss()))
    page.on("requestfinished", lambda request: note(request.url))
    page.on("framenavigated", lambda frame: note(frame.url))
    yield Dashboard(page, server.url).goto(), strange
    page.close()


@pytest.fixture
def watched(suspect: tuple[Dashboard, list[str]]) -> Iterator[Dashboard]:
    """That page with an empty chat; nothing must come of what is tried."""
    dashboard, strange = suspect
    yield dashboard.anew()
    assert dashboard.page.evaluate("window.taken") is None
    assert strange == []


def test_an_answer_cannot_take_over_the_page(watched: Dashboard) -> None:
    page, answer = watched.page, watched.page.locator("#chat [data-testid=bot]").first
    watched.ask(say("\n\n".join(PAYLOADS))).answered()
    assert "Your session ended" in answer.inner_text()
    assert answer.locator("form, input, iframe, img, video, audio, object, embed, style, script, #cover").count() == 0
    assert answer.locator(".md [style]:not(.katex *)").count() == 0
    for link in answer.locator("a:not([href^=http])").all():
        link.dispatch_event("click")
    assert reached(page)
    watched.ask("And in 3 words?").answered()


@pytest.mark.long(0.1)
def test_what_a_user_pastes_cannot_either(watched: Dashboard) -> None:
    """A message is shown as it was written."""
    said = "\n\n".join([*PAYLOADS, " in 3 words"])
    watched.ask(said).answered()
    message = watched.page.locator("#chat [data-testid=user]").first
    assert message.evaluate("(box) => box.childElementCount") == 0
    assert message.inner_text().split() == said.split()
    assert reached(watched.page)
    watched.page.fill("#message textarea", "The page can still be used, in 3 words")
    watched.page.click("#send")
    watched.page.wait_for_function("document.querySelectorAll('#chat [data-testid=user]').length === 2")
    watched.answered()


@pytest.mark.long(0.1)  # test_markdown.py draws all of it
def test_markdown_code_and_formulas_look_as_they_should(dashboard: Dashboard) -> None:
    dashboard.ask(say(GOOD)).answered()
    answer = dashboard.page.locator("#chat [data-testid=bot]").last
    assert answer.locator("h1").inner_text() == "Head"
    assert answer.locator("strong").inner_text() == "bold"
    assert "vector<int>" in answer.locator("code").all_inner_texts()
    assert "#include <map>" in answer.locator("li pre code").first.inner_text()
    assert "<p>x</p>" in answer.inner_text()
    assert answer.locator("td").all_inner_texts() == ["1", "2"]
    answer.locator(".katex").first.wait_for()
    assert "<b>no tag</b> and 1 < 2" in answer.inner_text()
