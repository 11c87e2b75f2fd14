"""Markdown as the chat draws it, and answers made to take over the page: nothing runs, nothing covers the controls."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.conftest import Server
from tests.browser.dashboard import Dashboard
from tests.browser.lengths import say
from tests.selection import layered

DRAWN = """async (texts) => {
    const { nodes } = await import("/ui/chat/markdown.js");
    return texts.map((text) => { const box = document.createElement("div"); box.append(...nodes(text));
        for (const one of box.querySelectorAll(".code")) one.replaceWith(one.querySelector("pre"));
        for (const one of box.querySelectorAll("pre")) one.textContent = one.textContent;
        for (const one of box.querySelectorAll("*"))
            for (const name of ["tabindex", "target", "rel"]) one.removeAttribute(name);
        return box.innerHTML; }); }"""
CASES = {
    "a *b* **c** ***d*** ~~e~~ _f_ __g__ snake_case_name 2*3*4": (
        "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <del>e</del> <em>f</em> <strong>g</strong> "
        "snake_case_name 2<em>3</em>4</p>"
    ),
    "**bold *both* bold** * no * **open": "<p><strong>bold <em>both</em> bold</strong> * no * **open</p>",
    "`a*b*` ``c`d`` \\*e\\* \\`": "<p><code>a*b*</code> <code>c`d</code> *e* `</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A\n## B #\nText\n===\n#no": "<h1>A</h1><h2>B</h2><h1>Text</h1><p>#no</p>",
    "a\n\n---\n***\nb": "<p>a</p><hr><hr><p>b</p>",
    "- a\n- b\n  - c\n    d\n- e": "<ul><li>a</li><li>b<ul><li>c<br>d</li></ul></li><li>e</li></ul>",
    "1. a\n  - b\n2. c\n\n3) d": '<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol><ol start="3"><li>d</li></ol>',
    "* a\n\n* b\n\nc": "<ul><li><p>a</p></li><li><p>b</p></li></ul><p>c</p>",
    "1. a\n   ```py\n   x\n   - y\n   ```\n2. b": "<ol><li>a<pre>x\n- y</pre></li><li>b</li></ol>",
    "- [x] a\n- [ ] b": "<ul><li>☑ a</li><li>☐ b</li></ul>",
    "text\n- a\n7. b": "<p>text</p><ul><li>a<br>7. b</li></ul>",
    "> a\nb\n> - c\n\nd": "<blockquote><p>a<br>b</p><ul><li>c</li></ul></blockquote><p>d</p>",
    "```c\n<b>\n```\n~~~\n```\n~~~": "<pre>&lt;b&gt;</pre><pre>```</pre>",
    "```\nopen *a*": "<pre>open *a*</pre>",
    "    x\n      y\n\nz": "<pre>x\n  y</pre><p>z</p>",
    "| a | b |\n|:-:|--:|\n| `x` \\| y | 2 |\n| 3 |\nafter": (
        '<div class="table"><table><thead><tr><th class="center">a</th><th class="right">b</th></tr></thead><tbody><tr>'
        '<td class="center"><code>x</code> | y</td><td class="right">2</td></tr><tr><td class="center">3</td>'
        '<td class="right"></td></tr><tr><td class="center">after</td><td class="right"></td></tr></tbody></table>'
        "</div>"
    ),
    "[a *b*](https://x.y/(z) 'T') <https://q.r> https://s.t/u_v_w. (http://e.f)": (
        '<p><a href="https://x.y/(z)">a <em>b</em></a> <a href="https://q.r">https://q.r</a> '
        '<a href="https://s.t/u_v_w">https://s.t/u_v_w</a>. (<a href="http://e.f">http://e.f</a>)</p>'
    ),
    "[a](javascript:b) ![c](https://d/e.png) ![](x) [f]": (
        '<p><span>a</span> <a href="https://d/e.png">c</a> <span>x</span> [f]</p>'
    ),
    "<b onclick=x>y</b> a<br>b &lt;i&gt; &amp; &#65; &unknown; 1 < 2": (
        "<p>&lt;b onclick=x&gt;y&lt;/b&gt; a<br>b &lt;i&gt; &amp; A &amp;unknown; 1 &lt; 2</p>"
    ),
    "It costs $5 or $6, $HOME/$USER, US$7-$8 and `$x$`": (
        "<p>It costs $5 or $6, $HOME/$USER, US$7-$8 and <code>$x$</code></p>"
    ),
    "": "",
}
# Whether each formula was drawn, and as one on lines of its own.
FORMULAS = """async (texts) => {
    const { nodes } = await import("/ui/chat/markdown.js"), boxes = texts.map((text) => {
        const box = document.createElement("div"); box.append(...nodes(text)); return box; });
    const wait = () => new Promise((done) => requestAnimationFrame(done));
    while (!boxes[0].querySelector(".katex")) await wait();
    return boxes.map((box) => [box.querySelectorAll(".katex").length, box.querySelectorAll(".katex-display").length,
        box.querySelectorAll("a").length, box.textContent]); }"""
GROWN = """async ([text, cuts]) => {
    const { Growing, nodes } = await import("/ui/chat/markdown.js");
    const whole = document.createElement("div"), growing = new Growing(document.createElement("div"));
    whole.append(...nodes(text));
    for (const cut of cuts) growing.show(text.slice(0, cut));
    growing.show(text);
    return [growing.box.innerHTML, whole.innerHTML, growing.kept]; }"""


def test_markdown_is_drawn_as_it_is_meant(dashboard: Dashboard) -> None:
    for text, drawn in zip(CASES, dashboard.page.evaluate(DRAWN, list(CASES)), strict=True):
        assert drawn == CASES[text], text


def test_formulas_are_drawn_in_all_their_marks(dashboard: Dashboard) -> None:
    texts = {
        "so $a_1*b_2*c$ is": (1, 0),
        "$$x^2$$": (1, 1),
        "\\[\n\\begin{aligned} a &= b \\\\\n- c &= d \\end{aligned}\n\\]": (1, 1),
        "- with \\(\\frac{a}{b} < c\\) and $\\{d\\}$": (2, 0),
        "in \\[y\\] a line": (1, 1),
        "$$\nopen": (0, 0),
        "broken $\\frac{a$": (0, 0),
        "$\\href{https://x.y}{z}$": (1, 0),
    }
    found = dashboard.page.evaluate(FORMULAS, list(texts))
    for (text, wanted), (drawn, displayed, links, words) in zip(texts.items(), found, strict=True):
        assert (drawn, displayed, links) == (*wanted, 0), text
        assert wanted[0] or words.split() == text.split(), "what cannot be drawn is shown as it was written"


@pytest.mark.parametrize("step", layered([1, 7], quick=lambda step: step == 7))
def test_a_text_that_grows_ends_as_if_it_had_been_drawn_at_once(dashboard: Dashboard, step: int) -> None:
    text = "\n\n".join([*CASES, "$$\n# a\n- b\n$$", *CASES])
    grown, whole, kept = dashboard.page.evaluate(GROWN, [text, list(range(0, len(text), step))])
    assert grown == whole
    assert kept > len(CASES), "all of it was drawn anew each time"


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
