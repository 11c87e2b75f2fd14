"""HTML in an answer becomes text; code, formulas and Markdown stay as they are."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.server.security.markup import html_as_text

TAG = re.compile(r"<[A-Za-z/!?]")


@pytest.mark.parametrize(
    "text",
    [
        "plain text, 1 < 2 and a <- b, x<1",
        "# Head\n\n- *a*\n- **b**\n\n| a | b |\n|---|---|\n| 1 | 2 |",
        "`vector<int>` and ``a`<b>``",
        "`vec![1]`",
        "```\n#![x]\n```",
        "```html\n<p style='x'>\n```",
        "~~~~\n<p>\n```\n<p>\n~~~~",
        "1. one\n   ```c++\n   #include <map>\n   ```\n2. two",
        "- ```xml\n  <a/>\n  ```",
        "> ```\n> <p>\n> ```",
        "text\n\n    #include <stdio.h>\n\n    <b>",
        "$$a<b$$ and $$\n\\text{<p>}\n$$",
        "<https://example.org/a?b=c> [x](https://example.org)",
        "```\nan unclosed one <p>",
        "\t<code>",
        "",
    ],
)
def test_code_formulas_and_markdown_are_left_as_they_are(text: str) -> None:
    assert html_as_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<b>x</b>", "&lt;b>x&lt;/b>"),
        ("a<!-- x --><?php <!DOCTYPE", "a&lt;!-- x -->&lt;?php &lt;!DOCTYPE"),
        ("```\n<p>\n```\n<p>", "```\n<p>\n```\n&lt;p>"),
        ("\\`<p>`", "\\`&lt;p>`"),
        ("`<p>", "`&lt;p>"),
        ("``<p>`", "``&lt;p>`"),
        ("![a](http://b/c.png)", "&#33;[a](http://b/c.png)"),
        ("```cpp\n", "```c\n"),
        ("| `a|<p>` |", "| `a|&lt;p>` |"),
        ("`a\n\n<p>`", "`a\n\n&lt;p>`"),
        ("> ```\n<p>", "> ```\n&lt;p>"),
        ("- ```\n<p>", "- ```\n&lt;p>"),
        ("``` a`b\n<p>", "``` a`b\n&lt;p>"),
        ("```\n```\n<p>", "```\n```\n&lt;p>"),
        ("```\n     ```\n<p>\n```\n<p>", "```\n     ```\n<p>\n```\n&lt;p>"),
        ("text\n       ```\n\n<p>", "text\n       ```\n\n&lt;p>"),
        ("- a\n\n      <p>", "- a\n\n      &lt;p>"),
        ("text\n    <p>", "text\n    &lt;p>"),
        ("$$\n```\n$$\n<p>", "$$\n```\n$$\n&lt;p>"),
        ("$$ a\n<p>", "$$ a\n&lt;p>"),
        ("<https://x.y\n><p>", "&lt;https://x.y\n>&lt;p>"),
        ("<https://x.y onclick=z>", "&lt;https://x.y onclick=z>"),
        ("```<p>\nx\n```", "```&lt;p>\nx\n```"),
        ("```Mermaid\ngraph\n```", "```text\ngraph\n```"),
        ("\x000\x00<p>", "�0�&lt;p>"),
    ],
)
def test_html_becomes_text(text: str, shown: str) -> None:
    assert html_as_text(text) == shown


@given(
    st.lists(
        st.sampled_from(
            [
                "<p>",
                "</p>",
                "<!--",
                "`",
                "``",
                "```",
                "~~~",
                "\n",
                "\n\n",
                "    ",
                "- ",
                "> ",
                "$$",
                "|",
                "a",
                "![",
                " ",
                "\\",
                "1. ",
            ]
        ),
        max_size=30,
    ).map("".join)
)
def test_only_entities_are_put_in_and_no_tag_stands_outside_of_code(text: str) -> None:
    shown = html_as_text(text)
    assert shown.replace("&lt;", "<").replace("&#33;", "!") == text
    if not re.search(r"`|~~~|    |\$\$|\t", text):  # nothing in it could be code or a formula
        assert not TAG.search(shown)


def test_a_long_answer_takes_no_time() -> None:
    start = time.thread_time()
    for text in (
        "`" * 50_000,
        "` <p> " * 10_000,
        "$$" * 20_000,
        "<p>" * 30_000,
        "> " * 20_000,
        "- " * 20_000,
        "`a" * 20_000,
        "\n".join("`" * (n % 99) + "<p>" for n in range(3000)),
    ):
        html_as_text(text)
    assert time.thread_time() - start < 20
