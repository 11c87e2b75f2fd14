"""`accept`: runs on a GPU what proves Moestro there, and writes one file that can be sent with a bug report."""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from app.cli.target import require_new_file
from app.store.home import data_dir
from app.store.private import data_folder
from bench.accept.checks import checks
from core.errors import MoestroError
from core.system.command import COMMAND
from core.system.paths import expanded

MINUTES = 45.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [check.name for check in checks()]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"these checks alone: {', '.join(names)}"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="begin no check that would not end within so many minutes (default: %(default)g); the first ones say most",
    )
    parser.add_argument("--small", action="store_true", help="tiny models: tries the checks, and measures nothing")
    parser.add_argument(
        "--save",
        type=expanded,
        metavar="FILE",
        help="where to write the result (default: a new file in Moestro's folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a check failed or took too long. Raises MoestroError when there is no GPU."""
    import torch

    from bench.accept import runner

    if not torch.cuda.is_available():
        raise MoestroError(
            f"There is no GPU here that torch can use, so nothing was run. `{COMMAND} doctor` shows what Moestro sees "
            "of this machine."
        )
    file: Path = args.save or data_folder(data_dir()) / f"accept-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    require_new_file(file)
    chosen = [check for check in checks(args.small) if not args.only or check.name in args.only]
    result = runner.run(file, chosen, args.minutes, lambda text: print(text, file=sys.stderr, flush=True))
    print(runner.table(result))
    print(f"Written to {file}", file=sys.stderr)
    return 1 if any(one["outcome"] in (runner.FAILED, runner.LATE) for one in result["checks"]) else 0
