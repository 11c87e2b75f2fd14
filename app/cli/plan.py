"""`plan`: divides a budget among layers, and says which part of how many experts each should keep, by the waiting that
this is predicted to save; or finds the least budget for a speed. From recorded routing or a profile, without a model.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from app.cli import options
from app.cli.plan_report import PLANNED, Answer, report, summary
from app.cli.simulate import positive, profile_for, say
from app.services.profiles import stored
from app.store.home import data_dir
from app.store.private import private_folder
from core.errors import ProfileError, SettingError
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.configurator import WHOLE, ZETA, least_budget, plan_adapmoe, plan_cache, plan_even
from core.policy.allocation.curves import Curves, curves_of
from core.policy.allocation.expert_split import LayerTimes
from core.policy.eviction import policy_maker
from core.profile import Profile, load, profile_path, save
from core.settings.budget import Budget
from core.settings.config import Settings
from core.settings.param import Choice
from core.settings.registry import variant
from core.simulate.curves import measure_curves
from core.simulate.split_replay import SplitReplay, SplitResult
from core.trace import FileTrace, Trace, open_trace

TOKENS = 5000  # of a trace: as many as MoEpic plans from (section 4.1)
BLOCKS = 16  # of an expert, in a replay
TIMES = ("att", "moe", "head", "load")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = parser.add_argument_group("what is known", "At least one of these; a model's profile is found by itself.")
    known.add_argument("--trace", type=Path, metavar="FILE", help="recorded routing of the model, as for simulate")
    known.add_argument("--profile", type=Path, metavar="FILE", help="a profile of the model")
    known.add_argument("--model", metavar="NAME", help='"demo", or a folder with the model: budgets in bytes need it')
    parser.add_argument(
        "--budget",
        type=Budget.parse,
        metavar="TEXT",
        help="a share of all experts (50%%), or with --model total bytes (6.5GB) (default: 50%%)",
    )
    parser.add_argument(
        "--tpot", type=milliseconds, metavar="TIME", help="find the least budget for a token in this time: 40ms"
    )
    parser.add_argument(
        "--theta",
        type=split,
        default=None,
        metavar="X",
        help="keep this part of every cached expert, 1 = whole experts (default: each layer's best)",
    )
    parser.add_argument(
        "--zeta",
        type=share,
        default=ZETA,
        metavar="X",
        help=f"part of the budget that one move takes (default: {ZETA})",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        metavar="N",
        help=f"plan from the last N tokens of the trace, 0 = all (default: {TOKENS})",
    )
    parser.add_argument("--eviction", default="lcp", metavar="NAME", help="the cache policy (default: lcp)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=options.pair,
        dest="pairs",
        help="set a parameter of the policy, or how the model is loaded, for example context=4096",
    )
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="experts in a layer, as for simulate")
    clock = parser.add_argument_group("times", "Milliseconds; those not given are the profile's.")
    for name, what in zip(
        TIMES,
        ("attention of one layer", "all experts of a token in one layer", "all else of a token", "copying one expert"),
        strict=True,
    ):
        clock.add_argument(f"--{name}-ms", type=positive, metavar="X", help=what)
    parser.add_argument(
        "--replay", action="store_true", help="also run the trace through these caches in virtual time; takes a while"
    )
    parser.add_argument("--save", action="store_true", help="keep the plan in the profile")
    parser.add_argument("--json", action="store_true", help="end with the result as one line of JSON")


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model, where one was named: bytes of one expert in the cache, and of everything that is no cache."""

    expert_bytes: int
    fixed_bytes: int


def run(args: argparse.Namespace) -> int:
    began_s = time.perf_counter()
    for where, name, _ in args.pairs:
        if where != options.LOAD and not name.startswith("eviction."):
            raise SettingError(f"plan has no use for {name}: it takes parameters of cache policies, and how to load.")
    size, model_hash, budget = model_of(args)
    trace = open_trace(args.trace, args.experts) if args.trace else None
    profile = found_profile(args, trace, model_hash)
    curves, basis = statistics(args, trace, profile)
    times, measured = times_of(args, profile)
    least = float(curves.top_k) if args.theta == WHOLE else 0.0  # the engine's own cache has no buffer
    aside = curves.top_k  # the prefetch buffer
    total = curves.layers * curves.experts
    if args.tpot is not None:
        plan = least_budget(curves, times, args.tpot, zeta=args.zeta, theta=args.theta, least=least)
        experts = min(total, math.ceil(plan.budget - 1e-6) + aside)
    else:
        experts = budgeted(budget, size, total)
        if experts < aside:
            raise SettingError(
                f"This budget pays for {experts} experts, but a token uses {aside} in a layer. Raise the budget."
            )
        plan = plan_cache(curves, times, experts - aside, zeta=args.zeta, theta=args.theta, least=least)
    others = compared(curves, times, experts - aside)
    answer = Answer(
        plan,
        others,
        replayed(args, trace, {PLANNED: plan, **others}, times) if args.replay else {},
        curves,
        times,
        experts,
        aside,
        None if size is None else size.fixed_bytes + experts * size.expert_bytes,
        args.tpot,
        basis,
        measured,
    )
    print(report(answer))
    if args.save:
        print(f"Saved in {keep(args, profile, plan)}.")
    if args.json:
        print(json.dumps(summary(answer) | {"seconds": round(time.perf_counter() - began_s, 3)}))
    return 0


def compared(curves: Curves, times: LayerTimes, experts: int) -> dict[str, CachePlan]:
    """Other divisions of the same slots."""
    return {
        "even, each layer's best split": plan_even(curves, times, experts),
        "even, halves": plan_even(curves, times, experts, 0.5),
        "even, whole experts": plan_even(curves, times, experts, WHOLE),
        "AdapMoE, whole experts": plan_adapmoe(curves, times, experts),
    }


def replayed(
    args: argparse.Namespace, trace: Trace | None, plans: Mapping[str, CachePlan], times: LayerTimes
) -> dict[str, SplitResult]:
    """What each of these caches, with the buffer, takes on the trace in virtual time. Raises SettingError without
    one."""
    if trace is None:
        raise SettingError("--replay needs a --trace.")
    return {
        name: SplitReplay(trace, plan.in_blocks(BLOCKS), BLOCKS, trace.top_k, times, policy_maker(policy(args))).run(
            trace.tokens // 4
        )
        for name, plan in plans.items()
    }


def policy(args: argparse.Namespace) -> Choice:
    """The cache policy with its parameters. Raises SettingError."""
    own = {name: value for where, name, value in args.pairs if where == options.LIVE}
    return Settings({"eviction": args.eviction, **own}).cache.eviction


def statistics(args: argparse.Namespace, trace: Trace | None, profile: Profile | None) -> tuple[Curves, str]:
    """Hit curves and worth of predictions, and where they are from. Raises SettingError when nothing tells."""
    if trace is not None:
        if isinstance(trace, FileTrace) and trace.cut:
            say(f"{args.trace} is cut short; the incomplete part at its end is left out.")
        curves = measure_curves(trace, policy_maker(policy(args)), last=max(0, args.tokens))
        basis = f"{curves.tokens} decoded tokens of {args.trace.name}, {variant('eviction', args.eviction).title}"
        if curves.chosen.size:
            named = trace.predictor[0] if isinstance(trace, FileTrace) and trace.predictor else "a predictor"
            return curves, f"{basis}; predictions of {named} as recorded, {curves.recall.mean():.1%} right"
    elif profile is not None and (measured := _measured(profile, args.eviction)) is not None:
        basis = f"{measured.tokens} tokens that calibration read, {variant('eviction', args.eviction).title}"
        return measured, f"{basis}; what the routers say a layer early, {measured.recall.mean():.1%} right"
    elif profile is not None and profile.counts is not None:
        curves = curves_of(profile.counts, profile.top_k)
        basis = f"uses of {profile.tokens} tokens in the profile, as if the most used experts were cached"
    else:
        raise SettingError(
            "There is nothing to plan from. Name a --trace, or calibrate the model (python launch.py calibrate)."
        )
    if profile is not None and profile.gate_recall is not None:
        curves = curves.with_recall(profile.gate_recall)
        return (
            curves,
            f"{basis}; the next-layer gate {curves.recall.mean():.1%} right by the profile, k experts a token",
        )
    return curves, f"{basis}; no predictions"


def _measured(profile: Profile, eviction: str) -> Curves | None:
    """The profile's own curves, if they are of this policy."""
    about = profile.settings.get("curves")
    return profile.curves() if isinstance(about, dict) and about.get("eviction") == eviction else None


def times_of(args: argparse.Namespace, profile: Profile | None) -> tuple[LayerTimes, str]:
    """The times and their basis. Raises SettingError when one is missing."""
    own = {name: value for name in TIMES if (value := getattr(args, f"{name}_ms")) is not None}
    measured = profile.times if profile is not None and profile.times is not None else {}
    if lacks := [f"--{name}-ms" for name in TIMES if name not in own and name not in measured]:
        raise SettingError(
            f"Without measured times, give {', '.join(lacks)}. They are measured by python launch.py calibrate."
        )
    said = []
    if measured and profile is not None:
        about = profile.settings.get("times")
        link = about if isinstance(about, dict) else {}
        where = "over an emulated link" if link.get("link") == "emulated" else f"from {link.get('load_from', 'memory')}"
        device = profile.settings.get("device_name") or profile.settings.get("device") or "this machine"
        said.append(f"measured on {device}, experts copied {where}")
    said += [f"{', '.join(own)} as given"] if own else []
    return LayerTimes.of({**measured, **own}), "; ".join(said)


def model_of(args: argparse.Namespace) -> tuple[Size | None, str, Budget]:
    """Sizes and hash of the model named, and the budget asked for."""
    budget = args.budget or Budget(share=0.5)
    if args.model is None:
        return None, "", budget
    from core.capacity.plan import plan as checked
    from core.hf.files import content_hash
    from core.settings.loading import LoadSpec

    loading = {name: value for where, name, value in args.pairs if where == options.LOAD}
    found = checked(LoadSpec.checked(args.model, Settings({"budget": str(budget)}), **loading))
    sizes = found.sizes
    model_hash = found.pack.model_hash if found.pack is not None else content_hash(found.files)
    return Size(sizes.slot * sizes.blocks, sizes.fixed), model_hash, budget


def budgeted(budget: Budget, size: Size | None, total: int) -> int:
    """Whole experts that a budget pays for. Raises SettingError when it is in bytes and no model was named."""
    if budget.share is not None:
        return int(budget.share * total + 1e-9)
    if size is None:
        raise SettingError("A budget in bytes needs --model, to know how many an expert has. Or give a share like 50%.")
    assert budget.bytes is not None
    return max(0, min(total, (budget.bytes - size.fixed_bytes) // size.expert_bytes))


def found_profile(args: argparse.Namespace, trace: Trace | None, model_hash: str) -> Profile | None:
    """The profile given, else the stored one of the model or of the trace's. Raises ProfileError or SettingError."""
    if trace is not None:
        found = profile_for(args, trace)
        return found if found is not None or not model_hash else stored(model_hash)
    if args.profile is not None:
        return load(args.profile, model_hash=model_hash or None, model=args.model or "")
    return stored(model_hash) if model_hash else None


def keep(args: argparse.Namespace, profile: Profile | None, plan: CachePlan) -> Path:
    """Save the plan with the profile -> the file. Raises ProfileError when there is none."""
    if profile is None:
        raise ProfileError("There is no profile to keep the plan in. Calibrate the model, or name a --profile.")
    file: Path = args.profile or profile_path(private_folder(data_dir()), profile.model_hash)
    save(replace(profile, plan=plan), file)
    return file


def milliseconds(text: str) -> float:
    """Reads 40ms, 0.04s or 40."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)?\s*", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time. Write 40ms.")
    return float(match[1]) * (1000 if match[2] == "s" else 1)


def split(text: str) -> float | None:
    """Reads a part of an expert, 0 to 1, or auto."""
    return None if text == "auto" else _fraction(text, 0.0)


def share(text: str) -> float:
    """Reads a part of the budget, above 0."""
    return _fraction(text, 0.001)


def _fraction(text: str, least: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to 1.")
    return number
