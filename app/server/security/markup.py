"""Escapes HTML in a model's answer: the page shows `<b>` as written.

The chat renders Markdown, which allows HTML. So every `<` that could begin a tag becomes an entity, except in code,
where HTML is not interpreted and an entity would be visible. Code is recognised as in CommonMark; cases beyond this
parser (an inline code span over two lines, a table that cuts one) are escaped as well. Diagrams (mermaid) are shown as
their source, and an image as a link to it, since it would be fetched from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

MATH = re.compile(r"\$\$[\s\S]+?\$\$")  # extracted and escaped by the page before Markdown is parsed
TAG = re.compile(r"<(?=[A-Za-z/!?])(?!https?://[^\s<>]*>)")  # <https://...> is a Markdown link
SPAN = re.compile(r"(?<![`\\])(`+)(?!`)([^|\n]*?[^`|\n])\1(?!`)")
OPENING = re.compile(r"((?:[ \t]|>|(?:[-*+]|\d{1,9}[.)])[ \t])*)(`{3,}|~{3,})(.*)")
CLOSING = re.compile(r"[ \t>]*(`{3,}|~{3,})[ \t]*")
ITEM = re.compile(r"[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]+")
ANY = 1 << 30
INSTEAD = {"mermaid": "text", "cpp": "c"}  # Gradio 6 renders nothing of an answer with "cpp": it loads C++ without C


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced code block. `least`: a line indented by less ends the enclosing list item; `most`: largest indentation
    of a closing fence.
    """

    mark: str
    quoted: bool
    least: int
    most: int

    def left(self, line: str) -> bool:
        """Whether the element that contains the code ended before this line."""
        if self.quoted:
            return not line.lstrip(" \t").startswith(">")
        return bool(line.strip()) and indent(line) < self.least

    def closed(self, line: str) -> bool:
        found = CLOSING.fullmatch(line)
        return found is not None and found[1].startswith(self.mark) and indent(line) <= self.most


def html_as_text(markdown: str) -> str:
    """The same Markdown with its HTML escaped. Code and formulas are unchanged."""
    formulas: list[str] = []

    def taken(match: re.Match[str]) -> str:
        formulas.append(match[0])
        return f"\x00{len(formulas) - 1}\x00"

    lines = MATH.sub(taken, markdown.replace("\x00", "�")).split("\n")
    return re.sub(r"\x00(\d+)\x00", lambda found: formulas[int(found[1])], "\n".join(_lines(lines)))


def _lines(lines: list[str]) -> Iterator[str]:
    fence: Fence | None = None
    item, code_may_begin = 0, True  # indentation of the content of the current list item, 0 = none
    for line in lines:
        if fence is not None and not fence.left(line):
            fence = None if fence.closed(line) else fence
            yield line
            continue
        fence = opened(line, item)
        if fence is not None:
            head, mark, info = cast(re.Match[str], OPENING.fullmatch(line)).groups()
            language = info.strip().partition(" ")[0].lower()
            yield head + mark + (INSTEAD.get(language) or _escaped(info))
            continue
        if found := ITEM.match(line):
            item = columns(found[0])
        elif line.strip() and indent(line) == 0:
            item = 0
        if line.strip() and indent(line) >= 4 and code_may_begin and not item:
            yield line  # indented code
            continue
        code_may_begin = not line.strip()
        yield _outside(SPAN, line, _escaped)


def opened(line: str, item: int) -> Fence | None:
    """The code block opened by this line, in a list item whose text is indented by `item`."""
    found = OPENING.fullmatch(line)
    if found is None or ("`" in found[2] and "`" in found[3]):
        return None
    head, mark = found[1], found[2]
    if ">" in head:
        return Fence(mark, True, 0, ANY)
    if head.strip():  # the first line of a list item
        return Fence(mark, False, columns(head), columns(head) + 3)
    inside = item if columns(head) >= item else 0
    return Fence(mark, False, inside, inside + 3) if columns(head) <= inside + 3 else None


def indent(line: str) -> int:
    """Columns of leading spaces and tabs."""
    return columns(line[: len(line) - len(line.lstrip(" \t"))])


def columns(text: str) -> int:
    return len(text.expandtabs(4))


def _outside(pattern: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """`text` with `change` applied to everything that `pattern` does not match."""
    parts, end = [], 0
    for match in pattern.finditer(text):
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(text[end:])])


def _escaped(text: str) -> str:
    return TAG.sub("&lt;", text).replace("![", "&#33;[")
