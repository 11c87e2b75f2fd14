"""`models`: lists the dashboard's library in the terminal; deletes packs."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from app.services.candidates import Entry, one_line
from app.services.deletion import delete, describe, inspect, outcome, stays
from app.services.library import peek, same_place, scan
from app.store.home import data_dir
from core.errors import MoestroError
from core.system.command import COMMAND
from core.system.wording import format_bytes

HEADS = ("NAME", "KIND", "FORMAT", "SIZE", "EXPERTS", "LAST USED")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        action="append",
        default=[],
        metavar="DIR",
        help="search this folder as well, two levels deep (may be given more than once)",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument("--delete", metavar="NAME", help="delete a pack, by its name or path; needs --yes")
    parser.add_argument("--yes", action="store_true", help="delete without asking for confirmation")


def run(args: argparse.Namespace) -> int:
    found = entries(args.folder)
    if args.delete is not None:
        return remove(pick(found, args.delete), args.yes)
    if args.json:
        print(json.dumps([{**asdict(entry), "used": _utc(entry.used)} for entry in found], indent=2))
    elif found:
        print(listed(found))
    else:
        print(f"No models found yet. Import one with `{COMMAND} import`, or name a folder with --folder.")
    return 0


def entries(folders: Iterable[str]) -> list[Entry]:
    """The library's entries, including folders given for this call. Works while a dashboard has the data open."""
    home = data_dir()
    kept, used = peek(home)
    return scan(home / "packs", [*kept, *folders], used)


def pick(found: Iterable[Entry], name: str) -> Entry:
    """The one entry with that name or path. Raises MoestroError."""
    same = [e for e in found if name in (e.name, e.path) or same_place(Path(name)) == Path(e.path)]
    if len(same) != 1:
        raise MoestroError(
            f"There is no model {name!r}. `{COMMAND} models` lists them."
            if not same
            else f"{len(same)} models are called {name!r}. Give the path of one: {', '.join(e.path for e in same)}."
        )
    return same[0]


def remove(entry: Entry, sure: bool) -> int:
    """Delete an entry, or describe what that would remove."""
    if not sure:
        what = inspect(entry)
        print(f"This would delete {entry.name} for good, in {entry.path}: {describe(what)}.")
        print(" ".join(filter(None, (stays(what), "Add --yes to do it."))))
        return 2
    print(outcome(entry, delete(entry)))
    return 0


def listed(found: Iterable[Entry]) -> str:
    """The list as aligned text; below an unusable entry its reason."""
    rows = [
        (
            one_line(e.name),
            e.kind,
            e.format,
            format_bytes(e.bytes) if e.bytes else "",
            _experts(e),
            _utc(e.used)[:10] or "never",
            one_line(e.problem),
        )
        for e in found
    ]
    widths = [max(len(row[i]) for row in [*rows, HEADS]) for i in range(len(HEADS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(HEADS, widths, strict=True)).rstrip()]
    for row in rows:
        lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip())
        lines += [f"    {row[-1]}"] if row[-1] else []
    return "\n".join(lines)


def _experts(entry: Entry) -> str:
    return f"{entry.layers or '?'} x {entry.experts}, top-{entry.top_k or '?'}" if entry.experts else ""


def _utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds") if seconds else ""
    except (OverflowError, ValueError, OSError):  # a time out of range, from a damaged store
        return ""
