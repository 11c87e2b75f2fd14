"""Values that no log, error message or report may contain: how options declare them, and their removal from texts.

An option that carries a secret is declared with `type=secret`, a variable of the environment with `from_environment`.
Values so declared are remembered for the life of the process."""

import json
import logging
import os
import re
import threading
from collections.abc import Iterable
from urllib.parse import quote

HIDDEN = "[hidden]"
SHORTEST = 6  # characters of a value that is removed from texts; a shorter one would also be found in other words
ENVIRONMENT = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")  # read by libraries
IN_ADDRESS = re.compile(r"(?<=://)[^/?#@\s'\"]+@")  # user:password@ of any address
_declared: set[str] = set()
log = logging.getLogger("moestro.app")


class Secret(str):
    """The value of an option that is a secret, or contains one; its repr does not show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN)


def secret(text: str) -> Secret:
    """An option's type: its value is a secret."""
    _declared.add(text)
    return Secret(text)


def from_environment(name: str) -> str:
    """A secret from a variable of the environment; "" when it is not set."""
    value = os.environ.get(name, "")
    return secret(value) if value else ""


def hide(text: str) -> str:
    """A text without the declared secrets, in whatever form Python, JSON or a URL quotes them, and without the
    credentials in addresses."""
    values = {*_declared, *(os.environ.get(name, "") for name in ENVIRONMENT)}
    forms = {form for value in values if len(value) >= SHORTEST for form in _forms(value)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return IN_ADDRESS.sub(f"{HIDDEN}@", text)


def hide_words(words: Iterable[str], values: Iterable[object]) -> list[str]:
    """A command line without the values of its options that are secrets, also short ones: "--token=..." included."""
    hidden = {str(value) for value in values if isinstance(value, Secret)}
    return [
        next((f"{word.removesuffix(one)}{HIDDEN}" for one in hidden if word == one or word.endswith(f"={one}")), word)
        for word in map(hide, words)
    ]


class HidingFormatter(logging.Formatter):
    """Formats log records, their tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))


def hide_in_logs() -> None:
    """Keep secrets out of what reaches stderr: records of loggers without a handler of their own, and errors that end
    a thread."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(HidingFormatter())
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _ended_thread


def _ended_thread(error: threading.ExceptHookArgs) -> None:
    name = error.thread.name if error.thread is not None else "?"
    if error.exc_value is not None and not isinstance(error.exc_value, SystemExit):
        log.error("the thread %s ended with an unexpected error", name, exc_info=error.exc_value)


def _forms(value: str) -> set[str]:
    plain = {value, repr(value)[1:-1], ascii(value)[1:-1], json.dumps(value)[1:-1], quote(value), quote(value, safe="")}
    return {form for form in plain | {repr(form)[1:-1] for form in plain} if form}
