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
from app.cli.target import require_new_file
from app.store.home import data_dir
from app.store.results import new_file, write
from core.errors import MoestroError
from core.settings.config import params
from core.settings.loading import LoadSpec
from core.settings.param import declared
from core.system.paths import expanded

# Modules of bench/ with run(its options ..., say) and table(result).
BENCHES = (
    "quick",
    "tiers",
    "formats",
    "regret",
    "predictors",
    "estimator",
    "methods",
    "expert_maps",
    "buddies",
    "training",
    "overhead",
    "substitution",
    "super_experts",
    "lossy",
    "systems",
    "turns",
    "prefill",
    "pieces",
    "split",
    "batch",
    "dispatch",
    "busy",
    "soak",
)
PICTURED = "systems"  # the bench that also has a picture
ASKED = (
    "model",
    "profile",
    "budget",
    "budgets",
    "rounds",
    "tokens",
    "questions",
    "dtype",
    "keep",
    "small",
    "llama",
    "minutes",
    "seed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="quick", choices=BENCHES, help="which one (default: quick)")
    asked = parser.add_argument_group(
        "what to measure", "Each bench has some of these, and defaults of its own.", argument_default=argparse.SUPPRESS
    )
    asked.add_argument(
        "--model",
        metavar="NAME",
        help="quick, regret, predictors, estimator, methods, expert_maps, buddies, training, overhead, super_experts, "
        'lossy, systems, turns, split, batch, busy: "demo", or a folder with a model (default: demo); systems, split, '
        'batch: or "generated", which the bench writes itself',
    )
    asked.add_argument(
        "--profile", type=expanded, metavar="FILE", help="buddies: a profile to read, in place of calibrating a model"
    )
    asked.add_argument(
        "--budget",
        metavar="TEXT",
        type=options.checked(params()["budget"]),
        help="quick, regret, split, busy: memory budget of the configurations that cache (default: 50%%, split: 20%%, "
        "busy: 100%%)",
    )
    asked.add_argument(
        "--budgets",
        metavar="LIST",
        help="systems: memory budgets with commas between them, shares or bytes (default: 25%%,50%%,75%%)",
    )
    asked.add_argument("--rounds", type=count, metavar="N", help="rounds to take medians of")
    asked.add_argument("--tokens", type=count, metavar="N", help="decode passes a round")
    asked.add_argument(
        "--questions", type=count, metavar="N", help="super_experts, lossy, systems: questions that a mode answers"
    )
    asked.add_argument(
        "--dtype",
        choices=declared(LoadSpec)["dtype"].choices,
        help="quick: compute type of both sides (default: auto, the checkpoint's)",
    )
    asked.add_argument(
        "--keep",
        type=expanded,
        metavar="DIR",
        help="tiers, prefill, pieces, split, batch: where the generated model and its packs stay, 12 GB; lossy, "
        "methods, systems: where results are kept, to resume after an interruption, and profiles (default: bench in "
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
        help="tiers, prefill: a Python interpreter that has llama_cpp (default: this one, if it has)",
    )
    asked.add_argument("--minutes", type=count, metavar="N", help="soak: how long (default: 60)")
    asked.add_argument("--seed", type=count, metavar="N", help="soak: random seed (default: 1)")
    asked.add_argument(
        "--picture",
        type=expanded,
        metavar="FILE",
        help="systems: where to write the picture, TPOT over budgets, as a page that opens in a browser (default: "
        "systems.html where results are kept)",
    )
    parser.add_argument("--json", action="store_true", help="end with the result as one line of JSON")
    parser.add_argument(
        "--save",
        type=expanded,
        metavar="FILE",
        help="where to write the result (default: a new file in bench/results; of an installed copy, in the "
        "folder of that name in Moestro's data folder)",
    )


def run(args: argparse.Namespace) -> int:
    if args.save:
        require_new_file(args.save)
    bench = importlib.import_module(f"bench.{args.name}")
    has = inspect.signature(bench.run).parameters
    asked: dict[str, Any] = {name: getattr(args, name) for name in ASKED if hasattr(args, name)}
    if unknown := [f"--{name}" for name in asked if name not in has]:
        raise MoestroError(f"bench {args.name} has no {' and no '.join(unknown)}. Leave it out.")
    picture: Path | None = getattr(args, "picture", None)
    if picture and args.name != PICTURED:
        raise MoestroError(f"bench {args.name} has no --picture. Leave it out.")
    if picture:
        require_new_file(picture)
    if "keep" in has:
        asked.setdefault("keep", data_dir() / "bench")
    if "meter" in has:
        asked["meter"] = importlib.import_module("app.services.regret").Regret
    began = datetime.now(UTC)
    file: Path = args.save or new_file(args.name, began)
    head: dict[str, Any] = {"bench": args.name, "date": began.isoformat(timespec="seconds")}
    if asked.get("small"):
        head["small"] = True
    if "so_far" in has:
        asked["so_far"] = lambda found: write(file, {**head, **found})
    result = {**head, **bench.run(**asked, say=lambda text: print(text, file=sys.stderr, flush=True))}
    write(file, result)
    print(bench.table(result))
    print(f"Written to {file}", file=sys.stderr)
    if args.name == PICTURED:
        picture = picture or Path(asked["keep"]) / "systems.html"
        write_picture(picture, result)
        print(f"The picture is {picture}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    return 0


def write_picture(file: Path, result: Mapping[str, Any]) -> None:
    """Write the picture of `bench systems` as one page, which needs nothing else."""
    from app.ui.tabs.systems_figures import tpot_over_budgets

    tpot_over_budgets(result, dark=False, height=640).write_html(file, include_plotlyjs=True)


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0.")
    return int(text)
