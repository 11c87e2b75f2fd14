"""`batch`: answers a file of prompts into another file, many at a time; goes on where an earlier run ended."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli import chat, options
from app.cli.parser import CommandParser, whole
from app.cli.terminal import Bar, clock, stoppable
from core.engine.batch_request import BATCH
from core.errors import MoestroError
from core.settings.registry import create, variants
from core.system.paths import expanded

if TYPE_CHECKING:
    from app.services.batch.run import Backend, Progress, Run

AT_ONCE = 256  # most


def add_arguments(parser: CommandParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument(
        "--in",
        dest="source",
        type=expanded,
        required=True,
        metavar="FILE",
        help="prompts, a line of JSON each: OpenAI's batch lines, "
        '{"messages": [...]} or {"prompt": "..."}; the last two with an "id" if you like',
    )
    files.add_argument(
        "--out",
        type=expanded,
        required=True,
        metavar="FILE",
        help="answers, in any order; lines already in it are skipped",
    )
    files.add_argument("--retry-errors", action="store_true", help="ask lines that ended with an error again")
    files.add_argument(
        "--at-once",
        type=whole(1, AT_ONCE),
        default=BATCH,
        metavar="N",
        help=f"most prompts that are answered together (default: {BATCH})",
    )
    files.add_argument(
        "--scheduler",
        choices=[one.name for one in variants("scheduler")],
        default="none",
        help="similarity: twice as many prompts are at work, in two batches that are regrouped for every token, so "
        "that those that need the same experts are computed together (ExpertFlow; for when --at-once is the most that "
        "the device computes well); random is its control (default: none, one batch)",
    )
    files.add_argument(
        "--pipeline",
        action="store_true",
        help="with a scheduler: four batches are at work, and two are divided while the others are computed",
    )
    options.add_settings(parser)
    options.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    from app.services.batch.run import Run

    spec, drain = options.spec(args), threading.Event()
    batch = Run(args.source, args.out, drain, args.retry_errors)
    try:
        if not batch.left:
            print(f"All {batch.total} lines have an answer in {args.out} already.", file=sys.stderr)
            return 0
        if batch.progress.before:
            print(f"{batch.progress.before} of {batch.total} lines are answered already.", file=sys.stderr)
        from app.server.v1.batch import ByEngine

        scheduler = create("scheduler", args.scheduler, {}) if args.scheduler != "none" else None
        engine = chat.load(spec)
        sampling, pipelined = options.sampling(args), args.pipeline
        backend = ByEngine(engine, spec.model, sampling, args.at_once, scheduler, pipelined=pipelined)
        try:
            return _answered(batch, backend, drain, args.out)
        finally:
            if engine.one_at_a_time:
                print(engine.one_at_a_time, file=sys.stderr)
            engine.unload()
    finally:
        batch.close()


def _answered(batch: Run, backend: Backend, drain: threading.Event, out: Path) -> int:
    """Answer what is left and say what came of it; returns the exit code."""
    shown = Shown()
    with stoppable(drain):
        try:
            batch.answer(backend, shown)
        except MoestroError:
            shown.end(batch.progress, out)
            raise
        except KeyboardInterrupt:
            shown.end(batch.progress, out)
            print("Stopped. The same command goes on.", file=sys.stderr)
            return 130
    shown.end(batch.progress, out)
    if batch.left:
        print(f"Stopped with {batch.left} lines left. The same command goes on.", file=sys.stderr)
        return 130
    return 1 if batch.progress.errors else 0


class Shown:
    """Shows progress on stderr."""

    def __init__(self) -> None:
        self._bar, self._percent = Bar(), -1

    def __call__(self, progress: Progress) -> None:
        percent = int(20 * progress.share)
        if not sys.stderr.isatty() and percent == self._percent:
            return
        self._percent, left = percent, progress.left_s
        self._bar.show(
            f"{progress.before + progress.done} of {progress.total}, {progress.tok_s:.1f} tokens/s"
            + (f", {clock(left)} left" if left is not None else ""),
            progress.share,
        )

    def end(self, progress: Progress, out: Path) -> None:
        """The summary."""
        self._bar.end()
        wrong = f", {progress.errors} of them with an error" if progress.errors else ""
        old = progress.failed_before
        before = f" {old} more had an error in an earlier run: --retry-errors asks them again." if old else ""
        print(
            f"{progress.done} lines answered{wrong}, {progress.tokens} tokens at {progress.tok_s:.1f} a second, "
            f"in {out}.{before}",
            file=sys.stderr,
        )
