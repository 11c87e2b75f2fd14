"""`python -m bench.accept.read FILE`: the likely causes of what a file of `launch.py accept` shows."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.accept.causes import causes
from bench.accept.runner import table
from core.errors import MoestroError

NONE = "Nothing failed, and no figure stands out."


def read(file: Path) -> dict[str, Any]:
    """A file of `accept`. Raises MoestroError where it is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoestroError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict) or "accept" not in found or not isinstance(found.get("checks"), list):
        raise MoestroError(f"{file} was not written by `launch.py accept`.")
    return found


def report(result: dict[str, Any]) -> str:
    """The causes as text, with the table of everything that was found below."""
    found = causes(result)
    lines = [f"{one.check}: {one.cause}\n  {one.evidence}\n  Look at: {one.look}" for one in found] or [NONE]
    return "\n".join([*lines, "", table(result)])


def main(words: Sequence[str]) -> int:
    """Exit code 0, or 2 for a file that cannot be used."""
    if len(words) != 1:
        print("Name one file: python -m bench.accept.read FILE", file=sys.stderr)
        return 2
    try:
        print(report(read(Path(words[0]))))
    except MoestroError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
