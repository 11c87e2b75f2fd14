"""`bench`: the side-by-side measurements of `bench/`, as a table or as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from app.cli import options
from core.config import params
from core.errors import MoestroError

HELP = "Measure speed side by side with plain transformers."
BENCHES = ("quick",)  # modules of bench/ with run(model, budget, rounds, tokens, say) and table(result)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="quick", choices=BENCHES, help="which one (default: quick)")
    parser.add_argument("--model", default="demo", metavar="NAME",
                        help='"demo", or a folder with a model (default: demo)')
    parser.add_argument("--budget", default="50%", metavar="TEXT", type=options.checked(params()["budget"]),
                        help="memory budget of the configurations that cache (default: 50%%)")
    parser.add_argument("--rounds", default=5, type=count, metavar="N", help="rounds to take medians of (default: 5)")
    parser.add_argument("--tokens", default=48, type=count, metavar="N", help="decode passes a round (default: 48)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, not as a table")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the JSON to this file")


def run(args: argparse.Namespace) -> int:
    if args.save and not args.save.parent.is_dir():
        raise MoestroError(f"There is no folder {args.save.parent} to save into. Make it first, or name another file.")
    bench = importlib.import_module(f"bench.{args.name}")
    result = bench.run(args.model, args.budget, args.rounds, args.tokens, say=lambda text: print(text, file=sys.stderr))
    text = json.dumps(result, indent=2)
    if args.save:
        args.save.write_text(text + "\n", encoding="utf-8")
    print(text if args.json else bench.table(result))
    return 0


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0.")
    return int(text)
