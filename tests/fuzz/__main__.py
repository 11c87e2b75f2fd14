"""`python -m tests.fuzz`: draw mutants, one, some, or for minutes; what is found is kept in `seeds/`."""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.fuzz.kinds import KINDS, WEIGHTS
from tests.fuzz.mutant import GOOD, Mutant
from tests.fuzz.runner import HANG_S, Asked, cores, each
from tests.fuzz.session import SEEDS, go_through


def endless(kinds: list[str], seed: int) -> Iterator[Asked]:
    """Fresh seeds for ever; some kinds have more to be found than others."""
    rng, weights = random.Random(seed), [WEIGHTS.get(kind, 1) for kind in kinds]
    while True:
        yield {"kind": rng.choices(kinds, weights)[0], "seed": seed}
        seed += 1


def main(arguments: list[str]) -> int:
    """0 when everything was refused in clear words, or used as the file says."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all", help="what is mutated (default: all)")
    parser.add_argument("--seed", type=int, metavar="N", help="the first seed (default: a random one)")
    parser.add_argument("--count", type=int, metavar="N", default=1, help="how many mutants (default: 1)")
    parser.add_argument("--minutes", type=float, metavar="M", help="go on for so long, with fresh seeds")
    parser.add_argument("--mutant", type=Path, metavar="FILE", help="replay a mutant from a JSON file, such as a seed")
    parser.add_argument("--workers", type=int, default=cores(), metavar="N", help="processes (default: a core each)")
    parser.add_argument("--hang", type=float, default=HANG_S, metavar="SECONDS", help="longer than this is a hang")
    parser.add_argument("--no-keep", action="store_true", help="do not write what was found to seeds/")
    args = parser.parse_args(arguments)
    kinds = list(KINDS) if args.kind == "all" else [args.kind]
    first = args.seed if args.seed is not None else random.SystemRandom().randrange(10**9)
    asked: Iterable[Asked] = each(kinds, range(first, first + args.count))
    if args.mutant is not None:
        asked = [Mutant.of(json.loads(args.mutant.read_text(encoding="utf-8"))["mutant"]).plain()]
    elif args.minutes is not None:
        asked = endless(kinds, first)
    minutes = args.minutes if args.minutes is not None else float("inf")
    counts = go_through(asked, args.workers, args.hang, minutes, None if args.no_keep else SEEDS)
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind}: {count} {outcome}")
    bad = sum(count for (_, outcome), count in counts.items() if outcome not in GOOD)
    print(f"{bad or 'None'} of {counts.total():,} to be mended; the seeds began with {first}.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
