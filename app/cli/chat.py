"""`chat`: one answer to `--prompt`, or a conversation, in the terminal. Answers go to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli import options
from app.cli.parser import CommandParser
from app.cli.target import require_new_file
from app.cli.terminal import Reading, line, stoppable
from app.services.loading import engine_type
from app.services.profiles import stored_profile
from app.services.secret import secret
from core.engine.quality.report import Quality
from core.errors import MoestroError
from core.profile.trace import TraceHead, TraceWriter
from core.settings.loading import LoadSpec
from core.settings.presets import FIRST, preset
from core.settings.sampling import Sampling
from core.system.command import COMMAND
from core.system.paths import expanded
from core.types import AnswerStats, StepRecord

if TYPE_CHECKING:
    from core.engine import Engine

HINT = """Write a message. /reset starts over, /set name value changes a setting, /stats shows the last answer's
figures, /quit or the end of input leaves. Ctrl-C stops an answer, or leaves when there is none."""
HELD = 64  # passes with distributions that are kept in memory at most
EXTRAS = {
    "probs": "the router's whole distributions (2 bytes a token, layer and expert)",
    "ranks": "the prefetcher's predictions, so that one that reads hidden states can be simulated",
    "tokens": "the ids of the tokens, from which the text can be read",
}


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("--prompt", type=secret, metavar="TEXT", help="answer this prompt and exit")
    parser.add_argument("--json", action="store_true", help="print one line of JSON with the figures after each answer")
    parser.add_argument(
        "--record",
        type=expanded,
        metavar="FILE",
        help=f"write the experts of every token to a new file, for `{COMMAND} simulate`",
    )
    for name, what in EXTRAS.items():
        parser.add_argument(f"--record-{name}", action="store_true", help=f"record {what} as well")
    options.add_settings(parser)
    options.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    spec, sampling = chosen(args), options.sampling(args)
    extras = {name: bool(getattr(args, f"record_{name}")) for name in EXTRAS}
    if args.record:
        check_record(args.record, spec)
    elif any(extras.values()):
        raise MoestroError(f"--record-{next(n for n, on in extras.items() if on)} needs --record FILE.")
    engine = load(spec)
    try:
        with record(args.record, engine, spec, extras) as trace:
            chat = ChatSession(engine, spec, sampling, args.json, trace)
            if args.prompt is not None:
                return 130 if chat.ask(args.prompt).reason == "cancelled" else 0
            return chat.converse()
    finally:
        engine.unload()


def chosen(args: argparse.Namespace) -> LoadSpec:
    """What the options say, over what Auto chooses where no other preset is given: also the most memory that is safe.
    Raises MoestroError."""
    if args.preset is not None:
        return options.spec(args)
    args.preset = preset(FIRST)
    spec = options.spec(args)
    if "budget" in options.given(args)[2]:
        return spec
    from core.capacity.fit import estimate

    budget = estimate(spec, forecast=False).suggested
    return dataclasses.replace(spec, settings=spec.settings.with_({"budget": budget})) if budget else spec


def load(spec: LoadSpec) -> Engine:
    """Load the engine with its progress on stderr."""
    cancel = threading.Event()
    try:
        with stoppable(cancel):
            return engine_type().load(spec, ProgressLine(), cancel, profile=stored_profile)
    except MoestroError:
        if cancel.is_set():
            raise KeyboardInterrupt from None
        raise


def check_record(path: Path, spec: LoadSpec) -> None:
    """Check before the load that the routing can be recorded. Raises MoestroError."""
    require_new_file(path)
    if not spec.settings.telemetry.enabled:
        raise MoestroError("Nothing can be recorded while telemetry is off. Leave out --telemetry off, or --record.")


def record(
    path: Path | None, engine: Engine, spec: LoadSpec, extras: Mapping[str, bool]
) -> TraceWriter | nullcontext[None]:
    """A trace writer for the routing of `engine`, with the enabled EXTRAS; without a path a null context."""
    if path is None:
        return nullcontext()
    from core.runtime.prediction.shadows import recorded

    if any(extras.values()):
        engine.keep(**extras)
    predictor = spec.settings.prefetch.predictor if extras["ranks"] else None
    shape = engine.shape
    head = TraceHead(
        shape.layers,
        shape.experts,
        shape.top_k,
        model=spec.model,
        model_hash=str(engine.manifest().get("model_hash", "")),
        probs=extras["probs"],
        predictor=predictor,
        beside=recorded(spec.settings, engine.profile),
    )
    return TraceWriter(path, head)


class ProgressLine:
    """Prints each new step once; in a terminal, overwrites the line."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str, share: float | None = None) -> None:
        if sys.stderr.isatty():
            done = "" if share is None else f" {share:.0%}"
            print(f"\r\033[K{text}{done}", end="\n" if share == 1 else "", file=sys.stderr, flush=True)
        elif text != self._last:
            print(text, file=sys.stderr, flush=True)
        self._last = text


class ChatSession:
    """A conversation with its history. A stopped or failed answer is not added to the history."""

    def __init__(
        self, engine: Engine, spec: LoadSpec, sampling: Sampling, as_json: bool, trace: TraceWriter | None = None
    ) -> None:
        self.engine, self.spec, self.sampling, self.as_json = engine, spec, sampling, as_json
        self.trace, self.missing = trace, False
        self.history: list[dict[str, str]] = []
        self.stats: AnswerStats | None = None
        self.quality: Quality | None = None  # of the last answer, if it was scored

    def ask(self, prompt: str) -> AnswerStats:
        """Stream one answer to stdout, then print its figures. Raises the engine's MoestroError."""
        cancel, text, stats, steps = threading.Event(), "", None, list[StepRecord]()
        messages = [*self.history, {"role": "user", "content": prompt}]
        with stoppable(cancel):
            reading = Reading() if sys.stderr.isatty() else None
            for piece in self.engine.generate(messages, self.sampling, cancel, reuse=True, reading=reading):
                if reading is not None:
                    reading.end()
                if piece.step is not None and self.trace is not None:
                    steps.append(piece.step)
                    if piece.step.probs is not None and len(steps) >= HELD:
                        self.write(steps)
                if piece.kind == "token":
                    text += piece.text
                    print(piece.text, end="", flush=True)
                elif piece.kind == "end":
                    stats = piece.stats
        print(flush=True)
        self.keep(steps)
        if stats is None:
            raise RuntimeError("the engine ended an answer without its figures")
        self.stats, self.quality = stats, self.score(stats)
        if stats.reason != "cancelled":
            self.history = [*messages, {"role": "assistant", "content": text}]
        if self.as_json:
            print(json.dumps(self.report(text, stats)), flush=True)
        else:
            print(line(stats, self.quality), file=sys.stderr, flush=True)
        return stats

    def score(self, stats: AnswerStats) -> Quality | None:
        """The quality of the last answer if it was lossy; Ctrl-C skips it."""
        stop = threading.Event()
        with stoppable(stop):
            while stats.audit and self.engine.unscored and not stop.is_set():
                quality = self.engine.audit(stop)
                if quality is not None and quality.answer == stats.audit:
                    return quality
        return None

    def keep(self, steps: list[StepRecord]) -> None:
        """Record the passes of an ended answer."""
        if self.trace is not None:
            self.write(steps)
            self.trace.flush()
            if self.missing:
                print("Telemetry was off: not all of this answer was recorded.", file=sys.stderr)
            self.missing = False

    def write(self, steps: list[StepRecord]) -> None:
        """Write passes to the trace and clear the list."""
        assert self.trace is not None
        for step in steps:
            self.trace.add(step)
        self.missing = self.missing or not all(step.ids.size for step in steps)
        steps.clear()

    def report(self, text: str, stats: AnswerStats) -> dict[str, object]:
        """Everything needed to reproduce and compare an answer, as plain values."""
        loading = self.spec.describe()
        loading["format"] = str(self.engine.manifest().get("format", self.spec.format))  # a pack has its own
        sampling = {**self.sampling.settings, "seed": stats.seed}
        return {
            "model": self.spec.model,
            "text": text,
            **stats.as_dict(),
            "quality": dataclasses.asdict(self.quality) if self.quality is not None else None,
            "loading": loading,
            "settings": dict(self.engine.settings),
            "sampling": sampling,
        }

    def converse(self) -> int:
        """Read messages and commands until the end of input, /quit, or Ctrl-C while no answer is being written."""
        print(HINT, file=sys.stderr)
        while True:
            try:
                words = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                print(file=sys.stderr)
                return 0
            try:
                if words == "/quit":
                    return 0
                if words.startswith("/"):
                    self.command(words)
                elif words:
                    self.ask(words)
            except MoestroError as error:
                print(error, file=sys.stderr)

    def command(self, words: str) -> None:
        """Run one line that starts with a slash. Raises SettingError."""
        name, _, rest = words.partition(" ")
        known: dict[str, Callable[[str], str]] = {"/reset": self._reset, "/set": self._set, "/stats": self._stats}
        print(known[name](rest) if name in known else HINT, file=sys.stderr)

    def _reset(self, rest: str) -> str:
        self.history = []
        return "The conversation starts over."

    def _set(self, rest: str) -> str:
        name, _, value = rest.strip().replace("=", " ").partition(" ")
        where, name, checked = options.assign(name, value.strip())
        if where == options.LOAD:
            return f"{name} takes effect when a model is loaded: restart with --{name.replace('_', '-')} {checked}."
        if where == options.DRAW:
            self.sampling = Sampling.checked(**self.sampling.settings | {name: checked})
        else:
            named = self.trace is not None and (self.trace.predictor is not None or self.trace.beside)
            if named and name.startswith(("predictor", "telemetry")):
                raise MoestroError(
                    "The prefetcher's predictions are being recorded, so it cannot be changed. Restart with "
                    "another prefetcher and another file."
                )
            self.engine.change({name: checked})
        return f"{name} = {checked}"

    def _stats(self, rest: str) -> str:
        if self.stats is None:
            return "Nothing has been answered yet."
        figures = self.stats.as_dict()
        if self.quality is not None:
            figures |= {f"quality.{name}": value for name, value in dataclasses.asdict(self.quality).items()}
        return "\n".join(f"{name:18} {value}" for name, value in figures.items())
