"""Paths as users write them. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

from core.errors import MoestroError
from core.system.reading import shown


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
