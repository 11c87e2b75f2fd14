"""Markdown as the chat draws it: what models write of it, as text that grows, and never as HTML of their own."""

from __future__ import annotations

import pytest

from tests.browser.dashboard import Dashboard

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


@pytest.mark.parametrize("step", [1, 7])
def test_a_text_that_grows_ends_as_if_it_had_been_drawn_at_once(dashboard: Dashboard, step: int) -> None:
    text = "\n\n".join([*CASES, "$$\n# a\n- b\n$$", *CASES])
    grown, whole, kept = dashboard.page.evaluate(GROWN, [text, list(range(0, len(text), step))])
    assert grown == whole
    assert kept > len(CASES), "all of it was drawn anew each time"
