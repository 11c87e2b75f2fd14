"""`bench`: runs the side-by-side measurements of `bench/` and prints a table or JSON."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.cli import options
from app.store.home import data_dir
from core.errors import MoestroError
from core.settings.config import params
from core.settings.loading import LoadSpec
from core.settings.param import declared

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
# Modules of bench/ with run(its options ..., say) and table(result).
BENCHES = ("quick", "tiers", "formats", "regret", "predictors", "methods", "overhead", "substitution", "lossy", "soak")
ASKED = ("model", "budget", "rounds", "tokens", "questions", "dtype", "keep", "small", "llama", "minutes", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="quick", choices=BENCHES, help="which one (default: quick)")
    asked = parser.add_argument_group(
        "what to measure", "Each bench has some of these, and defaults of its own.", argument_default=argparse.SUPPRESS
    )
    asked.add_argument(
        "--model",
        metavar="NAME",
        help='quick, regret, predictors, methods, overhead, lossy: "demo", or a folder with a model (default: demo)',
    )
    asked.add_argument(
        "--budget",
        metavar="TEXT",
        type=options.checked(params()["budget"]),
        help="quick, regret: memory budget of the configurations that cache (default: 50%%)",
    )
    asked.add_argument("--rounds", type=count, metavar="N", help="rounds to take medians of")
    asked.add_argument("--tokens", type=count, metavar="N", help="decode passes a round")
    asked.add_argument("--questions", type=count, metavar="N", help="lossy: questions that every mode answers")
    asked.add_argument(
        "--dtype",
        choices=declared(LoadSpec)["dtype"].choices,
        help="quick: compute type of both sides (default: auto, the checkpoint's)",
    )
    asked.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="tiers: where the generated model and its packs stay, "
        "12 GB; lossy, methods: where results are kept, to resume after an interruption (default: bench in "
        "Moestro's data folder)",
    )
    asked.add_argument(
        "--small",
        action="store_true",
        help="all but quick and regret: a smoke test, too small for its figures to mean anything",
    )
    asked.add_argument(
        "--llama",
        metavar="PYTHON",
        help="tiers: a Python interpreter that has llama_cpp (default: this one, if it has)",
    )
    asked.add_argument("--minutes", type=count, metavar="N", help="soak: how long (default: 60)")
    asked.add_argument("--seed", type=count, metavar="N", help="soak: random seed (default: 1)")
    parser.add_argument("--json", action="store_true", help="end with the result as one line of JSON")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="where to write the result (default: a new file in bench/results)"
    )


def run(args: argparse.Namespace) -> int:
    if args.save and not args.save.parent.is_dir():
        raise MoestroError(f"There is no folder {args.save.parent} to save into. Create it, or choose another file.")
    bench = importlib.import_module(f"bench.{args.name}")
    has = inspect.signature(bench.run).parameters
    asked: dict[str, Any] = {name: getattr(args, name) for name in ASKED if hasattr(args, name)}
    if unknown := [f"--{name}" for name in asked if name not in has]:
        raise MoestroError(f"bench {args.name} has no {' and no '.join(unknown)}. Leave it out.")
    if "keep" in has:
        asked.setdefault("keep", data_dir() / "bench")
    if "meter" in has:
        asked["meter"] = importlib.import_module("app.services.regret").Regret
    began = datetime.now(UTC)
    file: Path = args.save or RESULTS / f"{args.name}-{began:%Y%m%d-%H%M%S}.json"
    head = {"bench": args.name, "date": began.isoformat(timespec="seconds")}
    if "so_far" in has:
        asked["so_far"] = lambda found: write(file, {**head, **found})
    result = {**head, **bench.run(**asked, say=lambda text: print(text, file=sys.stderr, flush=True))}
    write(file, result)
    print(bench.table(result))
    print(f"Written to {file}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    return 0


def write(file: Path, result: Mapping[str, Any]) -> None:
    """Write atomically: an earlier file stays until the new one is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    part.replace(file)


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0.")
    return int(text)
