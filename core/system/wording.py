"""Words for messages: other libraries' errors about a file as part of one of our sentences, sizes, and columns."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST = 300  # characters
READ = 16 * MOST  # characters of a text, which may be huge, that are looked at
UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
WRONG_KIND = "has no attribute", "object", "unhashable"
LACKS = re.compile(r"'[^']*' has no attribute '([^']*)'")  # as a chat template is told
KINDS = re.compile(r"\b[A-Z]\w*(Error|Exception): |Exception raised from .*|For details look at the above report!?")


def reason(error: BaseException) -> str:
    """One short line, without exception names, locations in other libraries' code, and the final full stop."""
    if isinstance(error, RecursionError):
        return "something in it is nested too deeply"
    text = str(error)[:READ]
    if "ignore_mismatched_sizes" in text:
        return "some of its weights have other shapes than config.json says"
    if isinstance(error, KeyError):
        return f"{text} is missing or unknown"
    if "unpack" in text or isinstance(error, OverflowError):
        return "one of its numbers is too large"
    if isinstance(error, (AttributeError, TypeError)) and any(one in text for one in WRONG_KIND):
        return "one of its values is of the wrong kind"
    if isinstance(error, TypeError) and ("positional argument" in text or "keyword argument" in text):
        return "something in it is given what it does not take, or lacks what it needs"
    text = LACKS.sub(r"one of its values has no '\1'", text)
    return one_line(CLASS.sub(r"\1", KINDS.sub("", text)).partition(" Errors: ")[0].replace("NoneType", "null"))


def one_line(text: str) -> str:
    """A text of someone else's as part of one of our sentences: one short line without the final full stop, and without
    what a terminal obeys, or what turns the direction of the words around it."""
    printable = "".join(each if each.isprintable() else " " for each in text[:READ])
    short = " ".join(printable.split()).rstrip(". ")
    return (short if len(short) <= MOST else short[:MOST].rstrip() + " ...") or "no reason was given"


def format_bytes(count: float) -> str:
    """Bytes with a decimal unit and three significant digits: "7.25 GB"."""
    for unit, scale in UNITS:
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}" if abs(count) < 100 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines of columns: the first is flush left, the others flush right; without heads ("" each) the first line is
    left out."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    shown = lines if any(heads) else lines[1:]
    return [
        indent
        + "  ".join(c.ljust(w) if not at else c.rjust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in shown
    ]


def cell(value: float | None, form: str = ".2f", scale: float = 1.0) -> str:
    """A figure, "-" where there is none."""
    return "-" if value is None else format(value / scale, form)


def cells(row: Mapping[str, Any], forms: Mapping[str, str]) -> list[str]:
    """The figures of a row that `forms` names, "-" for those it lacks."""
    return [cell(row.get(name), form) for name, form in forms.items()]
