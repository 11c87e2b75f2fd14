"""Running text for the language model: documentation topics, docstrings and source of the standard library.

Every text ships with Python under the PSF licence; files with other licences are left out (`OTHER_LICENCES`).
"""

import importlib
import inspect
import pydoc_data.topics
import random
import re
from pathlib import Path

from .facts import subjects
from .popularity import MODULES

HELD_TOPICS, HELD_DOCS, HELD_SOURCES = 5, 150, 2
MAX_DOC_CHARS, MAX_SOURCE_CHARS = 6000, 60000
OTHER_LICENCES = re.compile(r"licen[sc]e|copyright|all rights reserved|permission is hereby", re.IGNORECASE)


def compact(text: str) -> str:
    """Fewer blank lines and runs of spaces."""
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"(?<=\S) {3,}", "  ", text))


def topics() -> list[str]:
    """The reference topics of `help()`."""
    return [compact(text) for _, text in sorted(pydoc_data.topics.topics.items())]


def docstrings() -> list[str]:
    """Names with their docstrings, ASCII only, without those that mention licences."""
    found = []
    for subject in subjects():
        doc = subject.value.__doc__
        if isinstance(doc, str) and doc.isascii() and 40 < len(doc) < MAX_DOC_CHARS and not OTHER_LICENCES.search(doc):
            found.append(f"{subject.name}\n{compact(inspect.cleandoc(doc))}")
    return found


def sources() -> list[str]:
    """Source of the best-known modules, without files that mention a licence of their own."""
    found = []
    for name in MODULES:
        path = getattr(importlib.import_module(name), "__file__", None)
        if not path or not path.endswith(".py"):
            continue
        text = Path(path).read_text(encoding="utf-8")
        if text.isascii() and len(text) < MAX_SOURCE_CHARS and not OTHER_LICENCES.search(text):
            found.append(re.sub(r"\n\s*\n+", "\n\n", text))
    return found


def texts(seed: int) -> dict[str, list[str]]:
    """Text by part: "topics", "docs", "source", and "held", which is never trained."""
    rng = random.Random(seed)
    parts = {"topics": topics(), "docs": docstrings(), "source": sources()}
    held: list[str] = []
    for part, count in zip(parts.values(), (HELD_TOPICS, HELD_DOCS, HELD_SOURCES), strict=True):
        rng.shuffle(part)
        held += part[:count]
        del part[:count]
    return parts | {"held": held}
