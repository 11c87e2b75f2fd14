"""Paths as users write them. Standard library only."""

import os
from pathlib import Path

from core.errors import MoestroError
from core.system.reading import Refusal, reason, shown

SHOWN = 80  # characters of a text that is no path


def expanded(path: str | Path) -> Path:
    """A path with "~" and "~user" at its beginning replaced by that user's home folder.

    Raises MoestroError when there is no such user or home folder, and for a NUL, which no path has.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise MoestroError(f"{text[:100]!r} is not a path: it contains a NUL character.")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = Path(text).parts[0]
        raise MoestroError(
            f"{shown(text)} names no place: {shown(user)} is not the home folder of a user of this machine. Give the "
            "whole path."
        ) from None


def named_path(text: str, error: Refusal = MoestroError, what: str = "file or folder") -> Path:
    """A path as typed into a field: as `expanded`, without blanks and quotes around it. Nothing has to be there. Raises
    `error` for what no file system takes.
    """
    try:
        path = expanded(text.strip().strip('"'))
        path.exists()
        return path
    except MoestroError as problem:
        raise error(str(problem)) from None
    except (OSError, ValueError) as problem:  # too long, say
        raise error(f"There can be no {what} {shown(text)[:SHOWN]!r}: {reason(problem)}.") from None
