"""`papers`: prints what became of every table and figure of the five papers here, and runs what is missing."""

import argparse
import json
import shlex
import sys
from dataclasses import asdict

from bench.papers import PAPERS
from bench.papers.document import StoredResults, answers, markdown, text
from bench.papers.parts import Paper
from core.errors import SettingError
from core.system.command import COMMAND

NAMES = [paper.name for paper in PAPERS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which papers: {', '.join(NAMES)} (default: all)")
    parser.add_argument(
        "--run",
        dest="again",
        action="append",
        default=[],
        choices=NAMES,
        metavar="NAME",
        help="run the commands of this paper whose answers have no result with paired data, or a stale one, one after "
        "the other; speeds need a machine that does nothing else",
    )
    parser.add_argument("--list", action="store_true", help="with --run: print these commands and run none")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the page that is saved as docs/papers.md")
    form.add_argument("--json", action="store_true", help="print the table as one line of JSON")


def run(args: argparse.Namespace) -> int:
    if unknown := [name for name in args.names if name not in NAMES]:
        raise SettingError(f"There is no paper {' or '.join(map(repr, unknown))}. Choose some of: {', '.join(NAMES)}.")
    if args.list and not args.again:
        raise SettingError("--list goes with --run NAME.")
    chosen = [paper for paper in PAPERS if paper.name in args.again] if args.again else []
    if chosen and not asked_again(chosen, args.list):
        return 1
    if args.list:
        return 0
    shown = chosen or [paper for paper in PAPERS if not args.names or paper.name in args.names]
    results = StoredResults()
    if args.markdown:
        print(markdown(shown, results))
    elif args.json:
        print(json.dumps({paper.name: rows(paper, results) for paper in shown}))
    else:
        print("\n\n".join(text(paper, results) for paper in shown))
    return 0


def rows(paper: Paper, results: StoredResults) -> list[dict[str, object]]:
    """A paper's table as plain data."""
    return [
        {"where": row.where, "asks": row.asks, "command": row.command, **asdict(answer)}
        for row, answer in answers(paper, results)
    ]


def missing(papers: list[Paper]) -> list[str]:
    """The commands of rows that are due for a measurement, each once, in the papers' order."""
    results = StoredResults()
    found = [row.command for paper in papers for row, answer in answers(paper, results) if row.command and answer.due]
    return list(dict.fromkeys(found))


def asked_again(papers: list[Paper], listed: bool) -> bool:
    """Runs what is missing; False when a command fails, of which the rest are then not run."""
    from app.cli import main

    commands = missing(papers)
    if not commands:
        print("Nothing is missing.", file=sys.stderr)
    for at, command in enumerate(commands, 1):
        if listed:
            print(f"{COMMAND} {command}")
            continue
        print(f"{at} of {len(commands)}: {COMMAND} {command}", file=sys.stderr, flush=True)
        if code := main(shlex.split(command)):
            print(f"It ended with {code}. Run it by itself, then go on with papers --run.", file=sys.stderr)
            return False
    return True
