"""`eval`: quality loss and speed gain of lossy modes, on questions, a text, or any harness task."""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.cli import chat, options
from app.cli.parser import CommandParser, whole
from app.cli.target import require_new_file
from app.cli.terminal import Bar, clock, stoppable
from app.store import results
from app.store.home import data_dir
from app.store.private import data_folder
from core.errors import SettingError
from core.system.paths import expanded
from core.system.wording import cell, grid

RESIDENCIES, QUESTIONS, TOKENS = ".75,.5,.375", 24, 192


def add_arguments(parser: CommandParser) -> None:
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--modes",
        default="all",
        metavar="LIST",
        help="configurations, separated by commas; --list prints them (default: all)",
    )
    what.add_argument(
        "--residency",
        default=RESIDENCIES,
        metavar="LIST",
        help=f"shares of the experts in slots (default: {RESIDENCIES})",
    )
    _add_material(what)
    what.add_argument(
        "--predictors",
        metavar="LIST",
        help="prefetchers whose predictions the execute modes compute "
        "(default: gate, default_vectors, estimator, hybrid)",
    )
    _add_tasks(what)
    parser.add_argument("--list", action="store_true", help="print the modes and exit")
    parser.add_argument("--csv", type=expanded, metavar="FILE", help="write the table there as well")
    options.add_json(parser)
    parser.add_argument(
        "--save",
        nargs="?",
        type=expanded,
        const=Path(),
        metavar="FILE",
        help="write the result as JSON as well (default: a new file in bench/results, where `papers` looks for it)",
    )
    options.add_settings(parser)


def _add_material(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--questions",
        type=whole(),
        default=QUESTIONS,
        metavar="N",
        help="questions a mode answers, half "
        f"of them in phrasings that were never trained (default: {QUESTIONS}; 0 = none)",
    )
    what.add_argument(
        "--facts",
        type=expanded,
        metavar="FILE",
        help="a .jsonl with question, answer and split (trained or "
        "unseen) a line (default: the demo model's own; other models have none)",
    )
    what.add_argument(
        "--tokens",
        type=whole(),
        default=TOKENS,
        metavar="N",
        help=f"tokens of text for perplexity and agreement (default: {TOKENS}; 0 = none)",
    )
    what.add_argument(
        "--text",
        type=expanded,
        metavar="PATH",
        help="a text file or folder (default: held-out documentation for the demo model, else the bundled prompts)",
    )


def _add_tasks(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--tasks",
        default="",
        metavar="LIST",
        help="tasks of lm-evaluation-harness to run instead; it has to be installed",
    )
    what.add_argument("--task-dir", type=expanded, metavar="DIR", help="a folder with tasks of your own (.yaml)")
    what.add_argument("--limit", type=whole(), metavar="N", help="examples of each task (default: all)")


def run(args: argparse.Namespace) -> int:
    from core.measure.evaluate.modes import PREDICTORS, chosen, modes_of, residencies

    names = [word for word in (args.predictors or "").replace(" ", "").split(",") if word] or list(PREDICTORS)
    known = modes_of(names)
    if args.list:
        print(listing(known))
        return 0
    modes, shares = chosen(args.modes, known), residencies(args.residency)
    for file in (args.csv, args.save):
        if file not in (None, Path()):
            require_new_file(file)
    spec = options.spec(args)
    questions, texts = given(args)
    began, began_s = datetime.now(UTC), time.perf_counter()
    engine: Any = chat.load(spec)
    from core.memory.store import Cancelled

    bar, cancel = Bar(), threading.Event()
    try:
        with stoppable(cancel):
            result = (
                tasks(args, engine, modes, shares, bar, cancel)
                if args.tasks
                else measured(args, engine, modes, shares, questions, texts, bar, cancel)
            )
    except Cancelled:
        bar.end()
        print("Stopped. Nothing was written.", file=sys.stderr)
        return 130
    finally:
        bar.end()
        engine.unload()
    result["seconds"] = round(time.perf_counter() - began_s, 1)
    print(table(result))
    if args.save is not None:
        file = args.save if args.save != Path() else results.new_file("eval", began)
        results.write(file, {"bench": "eval", "date": began.isoformat(timespec="seconds"), **result})
        print(f"Written to {file}", file=sys.stderr)
    if args.json:
        print(json.dumps(result, allow_nan=False))
    return 0


def given(args: argparse.Namespace) -> tuple[Any, Any]:
    """The user's own questions and texts, read before a model is loaded; None = the bundled ones."""
    if args.questions + args.tokens == 0 and not args.tasks:
        raise SettingError("Ask for at least one question or one token of text.")
    questions = texts = None
    if args.facts is not None:
        from core.measure.evaluate.questions import from_file

        questions = from_file(args.facts)
    if args.text is not None:
        from core.measure.evaluate.passages import read

        texts = read(args.text)
    return questions, texts


def measured(
    args: argparse.Namespace,
    engine: Any,
    modes: Sequence[Any],
    shares: Sequence[float],
    questions: Any,
    texts: Any,
    bar: Bar,
    cancel: threading.Event,
) -> dict[str, Any]:
    """Measure every mode at every resident share; returns plain data and writes the CSV."""
    from core.measure.evaluate.calibrated import calibrated
    from core.measure.evaluate.rows import to_csv, with_savings
    from core.measure.evaluate.run import evaluate, gather
    from core.measure.evaluate.summary import about, result

    material = gather(engine, args.questions, args.tokens, questions, texts)
    if args.questions and not material.questions:
        print(
            material.note
            or f"There are no questions for {engine.model_name}: exact match is not measured. --facts names a file.",
            file=sys.stderr,
        )
    folder = data_folder(data_dir())
    calibrated(engine, modes, lambda text, share: bar.show(f"calibrating: {text}", share), cancel, folder=folder)
    rows = with_savings(evaluate(engine, modes, shares, material, progress=bar.show, cancel=cancel))
    described = about(engine, material, str(args.text or ""), str(args.facts or ""))
    if args.csv:
        args.csv.write_text(to_csv(rows, described), encoding="utf-8")
        print(f"Written to {args.csv}", file=sys.stderr)
    return result(described, rows)


def tasks(
    args: argparse.Namespace,
    engine: Any,
    modes: Sequence[Any],
    shares: Sequence[float],
    bar: Bar,
    cancel: threading.Event,
) -> dict[str, Any]:
    """Measure every mode at every resident share on tasks of the harness."""
    from core.measure.evaluate.calibrated import calibrated
    from core.measure.evaluate.harness import adapter, evaluate_tasks
    from core.measure.evaluate.scorer import Scorer

    adapter(Scorer(engine))  # raises early if the harness is not installed
    folder = data_folder(data_dir())
    calibrated(engine, modes, lambda text, share: bar.show(f"calibrating: {text}", share), cancel, folder=folder)
    names = [word for word in args.tasks.replace(" ", "").split(",") if word]
    found = evaluate_tasks(engine, modes, shares, names, args.task_dir, args.limit or None, bar.show, cancel)
    return {"model": engine.model_name, "model_hash": engine.model_hash, "tasks": found}


def listing(modes: Sequence[Any]) -> str:
    """Every mode with its description."""
    width = max(len(mode.name) for mode in modes)
    return "\n".join(f"{mode.name:<{width}}  {mode.help}" for mode in modes)


def table(found: dict[str, Any]) -> str:
    """The result as text."""
    if "tasks" in found:
        lines = [
            f"{one['mode']:28s} {one['residency']:6.1%}  {one['problem']}"
            + "; ".join(
                f"{task}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
                for task, figures in one["figures"].items()
            )
            for one in found["tasks"]
        ]
        return "\n".join([f"{found['model']}, tasks of lm-evaluation-harness:", *lines])
    from core.measure.evaluate.others import MUCH

    lines = [
        f"{found['model']}: {found['questions']['seen']} + {found['questions']['unseen']} questions, "
        f"{found['text']['tokens']} tokens of {found['text']['source']}; link: {found['link']}; "
        f"{clock(found['seconds'])}"
    ]
    if note := found["questions"].get("note"):
        lines.append(note)
    lines += rows_table(found)
    lines.append("* none at this residency is better in both exact match (else agreement) and speed.")
    busiest = max((one["others_cores"] or 0.0 for one in found["rows"]), default=0.0)
    if busiest > MUCH:
        lines.append(f"Other programs used up to {busiest:.1f} CPU cores during the runs: compare speeds with care.")
    return "\n".join(lines)


FORMS = {  # of the figures of a row, and their heads
    "exact_match": (".1%", "match"),
    "unseen_match": (".1%", "unseen"),
    "perplexity": (".2f", "perpl."),
    "agreement": (".1%", "agree"),
    "kl": (".3f", "KL"),
    "substituted_rate": (".1%", "changed"),
    "link_bytes": (".3f", "MB/token"),
    "saved": (".1%", "saved"),
    "tok_s": (".1f", "tok/s"),
}


def rows_table(found: Mapping[str, Any]) -> Iterator[str]:
    """The rows of an evaluation by residency; those on the front of accuracy and speed have a star."""
    for share in dict.fromkeys(one["residency"] for one in found["rows"]):
        rows = []
        for one in (one for one in found["rows"] if one["residency"] == share):
            name = f"{'*' if one['mode'] in found['pareto'].get(f'{share:g}', ()) else ' '} {one['mode']}"
            figures = [cell(one[f], form, 1e6 if f == "link_bytes" else 1.0) for f, (form, _) in FORMS.items()]
            rows.append((name, *figures, one["problem"]))
        yield f"Residency {share:.4g}:"
        yield from grid(("mode", *(head for _, head in FORMS.values()), ""), rows)
