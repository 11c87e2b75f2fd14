"""`python -m tests.fuzz`: draw mutants, one, some, or for minutes; what is found is kept in `seeds/`."""

import argparse
import json
import sys
from pathlib import Path

from tests.fuzz.kinds import KINDS
from tests.fuzz.mutant import Mutant
from tests.fuzz.runner import HANG_S, Asked, cores
from tests.fuzz.session import Session


def main(arguments: list[str]) -> int:
    """0 when everything was refused in clear words, or used as the file says."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all", help="what is mutated (default: all)")
    parser.add_argument("--seed", type=int, metavar="N", help="the first seed (default: a random one)")
    parser.add_argument("--count", type=int, metavar="N", help="how many mutants (default: 1 with --seed)")
    parser.add_argument("--minutes", type=float, metavar="M", help="go on for so long, with fresh seeds")
    parser.add_argument("--mutant", type=Path, metavar="FILE", help="replay a mutant from a JSON file, such as a seed")
    parser.add_argument("--workers", type=int, default=cores(), metavar="N", help="processes (default: a core each)")
    parser.add_argument("--hang", type=float, default=HANG_S, metavar="SECONDS", help="longer than this is a hang")
    parser.add_argument("--no-keep", action="store_true", help="do not write what was found to seeds/")
    args = parser.parse_args(arguments)
    kinds = list(KINDS) if args.kind == "all" else [args.kind]
    session = Session(kinds, args.workers, args.hang, keep=not args.no_keep)
    asked: list[Asked] | None = None
    if args.mutant is not None:
        asked = [Mutant.of(json.loads(args.mutant.read_text(encoding="utf-8"))["mutant"]).plain()]
    elif args.minutes is None:
        first = args.seed if args.seed is not None else session.first
        asked = [{"kind": kinds[n % len(kinds)], "seed": first + n} for n in range(args.count or 1)]
    return session.run(asked, args.minutes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
