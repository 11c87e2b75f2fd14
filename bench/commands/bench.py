"""`bench`: runs one of the suites of `bench/`, prints its table, and writes the result to a file."""

import argparse
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.cli import options
from app.cli.target import require_new_file
from app.store.home import DISTANCES, data_dir
from app.store.results import new_file, write
from bench.suites import SUITES, having, suite
from core import __version__
from core.engine import arithmetic
from core.errors import MoestroError
from core.settings.config import params
from core.settings.loading import LoadSpec
from core.settings.param import declared
from core.system.paths import expanded

PICTURED = "systems", "share"  # the suites that also have a picture
MODEL = (
    '"demo", or a folder with a model (default: demo); systems, split, batch, speculation: or "generated", which the '
    'bench writes; speculation: or "demo-head", the demo with a head that the bench trains'
)
BUDGET = "memory budget of the configurations that cache (default: 50%%, split: 20%%, share: the most that is safe)"
PEERS = "all", "ik", "llama", "none"
KEEP = (
    "where the generated model and its packs stay, 12 GB, and results from which an interrupted run continues "
    "(default: bench in Moestro's data folder)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of any suite; `run` refuses those that the chosen one lacks."""
    parser.add_argument("name", nargs="?", default="quick", type=known, help=f"which one: {', '.join(SUITES)}")
    group = parser.add_argument_group(
        "what to measure", "Each bench has some of these, and defaults of its own.", argument_default=argparse.SUPPRESS
    )

    def option(name: str, text: str, **more: Any) -> None:
        group.add_argument(f"--{name}", help=f"{having(name)}: {text}", **more)

    option("model", MODEL, metavar="NAME")
    option("profile", "a profile to read, in place of calibrating a model", type=expanded, metavar="FILE")
    option("budget", BUDGET, metavar="TEXT", type=options.checked(params()["budget"]))
    option(
        "budgets",
        "budgets with commas between them, shares or bytes (default: 25%%,50%%,75%%; tiers: 100%%,75%%,50%%,37.5%%)",
        metavar="LIST",
    )
    option(
        "formats",
        "expert formats with commas between them (default: those that divide the demo; peers, tiers: int4,bf16)",
        metavar="LIST",
    )
    option("lengths", "tokens of a prompt, with commas between them (default: 128,512,1500)", metavar="LIST")
    option("arithmetics", "ours, with commas between them (default: fast,reference)", metavar="LIST")
    option("coded", "our 4-bit formats, with commas between them (default: int4-g64)", metavar="LIST")
    option(
        "peers",
        "other programs to compare with: all, ik (ik_llama.cpp), llama (llama.cpp) or none (default: all; it asks "
        "before it installs their wheels, into an environment of the bench's own)",
        choices=PEERS,
    )
    option("prompts", "how many (default: 20)", type=count, metavar="N")
    option("drawn", "combinations of budget and link drawn at random (default: 4)", type=count, metavar="N")
    option("rounds", "rounds to take medians of", type=count, metavar="N")
    option("tokens", "decode passes a round", type=count, metavar="N")
    option("questions", "questions that a mode answers", type=count, metavar="N")
    option("preset", "presets to run, with commas between them (default: all)", metavar="LIST")
    option("dtype", "compute type (default: auto, the checkpoint's)", choices=declared(LoadSpec)["dtype"].choices)
    option("keep", KEEP, type=expanded, metavar="DIR")
    group.add_argument("--small", action="store_true", help="a smoke test, too small for its figures to mean anything")
    option("minutes", "how long (default: 15)", type=count, metavar="N")
    group.add_argument(
        "--picture",
        type=expanded,
        metavar="FILE",
        help="systems: where to write the picture, TPOT over budgets, as a page that opens in a browser (default: "
        "systems.html in the folder of --keep); share: an SVG (default: beside the result)",
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
    given = chosen(args)
    picture: Path | None = given.pop("picture", None)
    if picture:
        require_new_file(picture)
    keep: Path = given.pop("keep", data_dir() / "bench")
    began = datetime.now(UTC)
    file: Path = args.save or new_file(args.name, began)
    head: dict[str, Any] = {"bench": args.name, "date": began.isoformat(timespec="seconds"), "moestro": __version__}
    if given.get("small"):
        head["small"] = True
    measured = suite(args.name)
    arithmetic.keep_in(data_dir() / DISTANCES)
    found = measured.run(
        **given,
        keep=keep,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        so_far=lambda found: write(file, {**head, **found}),
    )
    result = {**head, **found}
    write(file, result)
    print("\n".join(measured.table(result)))
    print(f"Written to {file}", file=sys.stderr)
    if args.name in PICTURED:
        picture = picture or (keep / "systems.html" if args.name == "systems" else file.with_suffix(".svg"))
        write_picture(picture, result)
        print(f"The picture is {picture}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    return 0


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given. Raises MoestroError for one that this suite lacks."""
    _, own = SUITES[args.name]
    has = {*own.split(), *(["picture"] if args.name in PICTURED else [])}
    every = {"picture", *(word for _, words in SUITES.values() for word in words.split())}
    given = {name: value for name, value in vars(args).items() if name in every}
    if lacking := [f"--{name}" for name in given if name not in has]:
        raise MoestroError(f"bench {args.name} has no {' and no '.join(lacking)}. Leave it out.")
    return given


def write_picture(file: Path, result: Mapping[str, Any]) -> None:
    """Write the picture of `bench share` as an SVG, that of `bench systems` as one page, which needs nothing else."""
    if result["bench"] == "share":
        from bench.speed.share import picture

        file.write_text(picture(dict(result)), encoding="utf-8")
        return
    from app.ui.tabs.systems_figures import tpot_over_budgets

    tpot_over_budgets(result, dark=False, height=640).write_html(file, include_plotlyjs=True)


def known(name: str) -> str:
    if name in SUITES:
        return name
    raise argparse.ArgumentTypeError(f"there is no bench {name!r}. Choose one of: {', '.join(SUITES)}.")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0.")
    return int(text)
