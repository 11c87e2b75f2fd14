"""Logs unexpected errors with their kind and location, never with user text.

An error's message may quote a conversation. It is logged only where it was raised by code that handles numbers and no
text. Tracebacks show lines of source, not values."""

import functools
import logging
import os
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDLESS = tuple(str(ROOT / "core" / part) + os.sep for part in ("runtime", "memory", "native", "policy", "hf"))
LEFT_OUT = "(its text is left out: it may quote a conversation)"


def log_crash(log: logging.Logger, error: BaseException, message: str, *args: object) -> None:
    """Log an error with its traceback, without user text."""
    log.error(f"{message}\n%s", *args, describe(error))


def describe(error: BaseException) -> str:
    """The traceback of an error and its causes, oldest first, in Python's format but without messages that may quote
    text."""
    lines = []
    for one, lead in reversed([*_chain(error)]):
        lines.append(
            "Traceback (most recent call last):\n"
            + "".join(traceback.format_tb(one.__traceback__))
            + f"{type(one).__module__}.{type(one).__qualname__}: {_text(one)}"
            + lead
        )
        if isinstance(one, BaseExceptionGroup):
            lines += [describe(inner) for inner in one.exceptions]
    return "\n".join(lines)


def _chain(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    seen: set[int] = set()
    now: BaseException | None = error
    lead = ""
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now, lead
        if now.__cause__ is not None:
            now, lead = now.__cause__, "\n\nThat caused:\n"
        else:
            now, lead = None if now.__suppress_context__ else now.__context__, "\n\nWhile that was handled:\n"


def _text(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or LEFT_OUT
    frames = traceback.extract_tb(error.__traceback__)
    return str(error) if frames and _wordless(frames[-1].filename) else LEFT_OUT


def _wordless(file: str) -> bool:
    """Whether this file holds code that handles tensors and ids only."""
    return file.startswith((*WORDLESS, *_torch())) or Path(file).name.startswith("modeling_")


@functools.cache
def _torch() -> tuple[str, ...]:
    """Where torch is installed; a folder of another kind may have its name."""
    spec = find_spec("torch")
    return tuple(str(Path(place)) + os.sep for place in (spec and spec.submodule_search_locations) or ())
