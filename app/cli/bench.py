"""`bench`: the side-by-side measurements of `bench/`, as a table or as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from app.cli import options
from core.config import LOADING, params
from core.errors import MoestroError

HELP = "Measure speed side by side with plain transformers."
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
BENCHES = ("quick",)  # modules of bench/ with run(model, budget, rounds, tokens, dtype, say) and table(result)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="quick", choices=BENCHES, help="which one (default: quick)")
    parser.add_argument("--model", default="demo", metavar="NAME",
                        help='"demo", or a folder with a model (default: demo)')
    parser.add_argument("--budget", default="50%", metavar="TEXT", type=options.checked(params()["budget"]),
                        help="memory budget of the configurations that cache (default: 50%%)")
    parser.add_argument("--rounds", default=5, type=count, metavar="N", help="rounds to take medians of (default: 5)")
    parser.add_argument("--tokens", default=48, type=count, metavar="N", help="decode passes a round (default: 48)")
    parser.add_argument("--dtype", default="auto", choices=next(p for p in LOADING if p.name == "dtype").choices,
                        help="compute type of both sides (default: auto, the checkpoint's)")
    parser.add_argument("--json", action="store_true", help="end with the result as one line of JSON")
    parser.add_argument("--save", type=Path, metavar="FILE",
                        help="where to write the result (default: a new file in bench/results)")


def run(args: argparse.Namespace) -> int:
    if args.save and not args.save.parent.is_dir():
        raise MoestroError(f"There is no folder {args.save.parent} to save into. Make it first, or name another file.")
    bench = importlib.import_module(f"bench.{args.name}")
    began = datetime.now(UTC)
    result = bench.run(args.model, args.budget, args.rounds, args.tokens, args.dtype,
                       say=lambda text: print(text, file=sys.stderr))
    result = {"bench": args.name, "date": began.isoformat(timespec="seconds"), **result}
    file: Path = args.save or RESULTS / f"{args.name}-{began:%Y%m%d-%H%M%S}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(bench.table(result))
    print(f"Written to {file}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    return 0


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0.")
    return int(text)
