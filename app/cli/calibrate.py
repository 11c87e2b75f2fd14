"""`calibrate`: measures a profile of a model, for the policies and predictors that need one."""

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from app.cli import chat, options
from app.cli.parser import CommandParser, whole
from app.cli.target import require_new_file
from app.cli.terminal import Bar, clock, stoppable
from app.services.profiles import save_buddies_in_pack
from app.store.home import data_dir
from app.store.private import data_folder
from core.errors import ProfileError, SettingError
from core.policy.substitute.super_experts import super_experts
from core.profile import PARTS, Profile, check_model, load, profile_path, save
from core.profile.summary import TITLES, describe
from core.system.paths import expanded
from core.system.wording import format_bytes


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--text",
        action="append",
        type=expanded,
        default=[],
        metavar="PATH",
        help="a text file, a .jsonl of chats, or a folder of text files (may be given more than once; default: the "
        "bundled prompts)",
    )
    parser.add_argument(
        "--trace",
        nargs="+",
        type=expanded,
        default=[],
        metavar="FILE",
        help="recorded sessions of this model: their routing counts as well, or alone without --text",
    )
    parser.add_argument(
        "--parts",
        default="all",
        metavar="LIST",
        help=f"what to measure, separated by commas; the other parts are kept (default: all): {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--tokens",
        type=whole(1),
        default=0,
        metavar="N",
        help="read no more of the texts than this (default: everything)",
    )
    parser.add_argument(
        "--warmup",
        type=whole(1),
        default=0,
        metavar="N",
        help="for pairs: the n-th token of a text counts n / N until the N-th, so that what routers do before there is "
        "any context counts less (default: every token counts as much)",
    )
    parser.add_argument(
        "--out",
        type=expanded,
        metavar="FILE",
        help="where to keep the profile (default: in the data folder, where it is found when the model is loaded)",
    )
    options.add_json(parser)
    options.add_calibration(parser)
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    spec, parts = options.spec(args, calibrates=True), chosen(args.parts)
    for path in (*args.text, *args.trace):
        if not path.exists():
            raise ProfileError(f"There is no file or folder {path}.")
    if args.out and not is_profile(args.out):
        require_new_file(args.out)
    engine: Any = chat.load(spec)
    try:
        return calibrated(args, engine, parts)
    finally:
        engine.unload()


def calibrated(args: argparse.Namespace, engine: Any, parts: set[str]) -> int:
    """Calibrate and save; prints what was measured."""
    from core.engine.texts import bundled, from_path
    from core.measure.calibrate.gather import calibrate
    from core.memory.store import Cancelled
    from core.profile.trace import open_trace

    traces = [open_trace(path, engine.shape.experts) for path in args.trace]
    texts = [text for path in args.text for text in from_path(path)]
    if not texts and not traces:
        texts = bundled(engine.model_name)
    folder = data_folder(data_dir())
    file: Path = args.out or profile_path(folder, engine.model_hash)
    old = earlier(file, engine.model_hash, engine.model_name)
    bar, cancel, began_s = Bar(), threading.Event(), time.perf_counter()
    try:
        with stoppable(cancel):
            profile = calibrate(
                engine,
                texts,
                parts=parts,
                traces=traces,
                source=named(args),
                limit=args.tokens,
                warmup=args.warmup,
                settings=options.calibration(args),
                folder=folder,
                progress=bar.show,
                cancel=cancel,
            )
    except Cancelled:
        bar.end()
        print(f"Stopped. {'The profile is unchanged' if old else 'Nothing was saved'}.", file=sys.stderr)
        return 130
    finally:
        bar.end()
    whole = profile if old is None else profile.over(old)
    save(whole, file)
    seconds = time.perf_counter() - began_s
    print("\n".join([*report(profile, parts, file, seconds), *save_buddies_in_pack(engine.spec.model, whole)]))
    if args.json:
        print(json.dumps(summary(whole, file, seconds)))
    return 0


def chosen(text: str) -> set[str]:
    """The requested parts. Raises SettingError with a list of them."""
    names = {word for word in text.replace(" ", "").split(",") if word}
    if names == {"all"}:
        return set(PARTS)
    if not names or not names <= PARTS.keys():
        raise SettingError(f"--parts {text!r} is not understood. Write all, or some of {', '.join(PARTS)}.")
    return names


def is_profile(file: Path) -> bool:
    """Whether a file is a profile, which a calibration completes."""
    try:
        load(file)
    except ProfileError:
        return False
    return True


def earlier(file: Path, model_hash: str, model: str) -> Profile | None:
    """The existing profile. A damaged one is replaced; one of another model raises ProfileError."""
    if not file.exists():
        return None
    try:
        found = load(file)
    except ProfileError as error:
        print(f"{error} It will be replaced.", file=sys.stderr)
        return None
    check_model(found, model_hash, model)
    return found


def named(args: argparse.Namespace) -> str:
    """The sources of the texts, as display text."""
    texts = ", ".join(path.name or str(path) for path in args.text)
    traces = f"{len(args.trace)} recorded session{'s' * (len(args.trace) != 1)}" if args.trace else ""
    return " and ".join(word for word in (texts, traces) if word) or "the bundled prompts"


def report(profile: Profile, parts: set[str], file: Path, seconds: float) -> list[str]:
    """What was measured, as text."""
    found = describe(profile)
    width = max(len(title) for title in TITLES.values())
    read = f"{profile.tokens:,} tokens of {profile.source}" if profile.tokens else "measured"
    lines = [
        f"{profile.model}: {read}, in {clock(seconds)}",
        *(f"  {TITLES[part]:<{width}}  {text}" for part, text in found.items()),
    ]
    if missing := [TITLES[part] for part in PARTS if part in parts and part not in found]:
        lines.append(f"  Not measured, because it needs a text that the model reads: {', '.join(missing)}")
    return [*lines, f"Saved in {file}, {format_bytes(file.stat().st_size)}"]


def summary(profile: Profile, file: Path, seconds: float) -> dict[str, object]:
    """The result as plain values for JSON."""
    recall = (
        None
        if profile.gate_recall is None
        else [None if r != r else round(float(r), 4) for r in profile.gate_recall.tolist()]
    )
    return {
        "profile": str(file),
        "bytes": file.stat().st_size,
        "model": profile.model,
        "model_hash": profile.model_hash,
        "tokens": profile.tokens,
        "source": profile.source,
        "parts": list(profile.parts()),
        "times_ms": profile.times,
        "gate_recall": recall,
        "super_experts": None if profile.peaks is None else [one._asdict() for one in super_experts(profile.peaks)],
        "trained_recall": profile.settings.get("recall"),
        "estimator": profile.settings.get("estimator"),
        "gathered": profile.settings.get("gathered"),
        "seconds": round(seconds, 3),
    }
