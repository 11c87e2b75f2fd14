"""Trains the demo model from the corpus to exported assets: `python -m demo.train --out DIR`; see `stages`."""

import argparse
from pathlib import Path

import torch

from .card import write_card
from .corpus import FACTS, SEED, WORK, build
from .export import export
from .stages import train


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the finished model goes; without it, training alone")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--seed-steps", type=int, default=600, help="steps with few experts")
    parser.add_argument("--steps", type=int, default=5800, help="steps with all experts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--facts", type=int, default=FACTS)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not (args.work / "facts.json").exists():
        build(args.work, args.facts, args.seed)
    stage = train(args.work, args.seed_steps, args.steps, args.seed)
    if args.out:
        export(stage.model, args.work, args.out, args.seed)
        write_card(args.out, args.work)


if __name__ == "__main__":
    main()
