"""`plan`: divides a budget among layers, and says which part of how many experts each should keep, by the waiting that
this is predicted to save; or finds the least budget for a speed. From recorded routing or a profile, without a model.
"""

import argparse
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

from app.cli import options
from app.cli.parser import real
from app.cli.plan_inputs import TIMES, budgeted, found_profile, model_of, statistics, times_of
from app.cli.plan_report import Answer, report, summary
from app.cli.simulate import opened
from app.cli.simulate_prefetch import MILLISECONDS
from app.store.home import data_dir
from app.store.private import data_folder
from core.errors import ProfileError, SettingError
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.configurator import WHOLE, least_budget, plan_adapmoe, plan_cache, plan_even
from core.policy.allocation.curves import Curves
from core.policy.allocation.expert_split import LayerTimes
from core.policy.allocation.slot_allocation import prefetch_buffer
from core.profile import Profile, profile_path, save
from core.settings.budget import Budget
from core.settings.config import Settings
from core.system.paths import expanded

TOKENS = 5000  # of a trace: as many as MoEpic plans from (section 4.1)
SEVERAL = 2  # blocks of an expert that may be split: with more than one the buffer is set aside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = parser.add_argument_group("what is known", "At least one of these; a model's profile is found by itself.")
    known.add_argument("--trace", type=expanded, metavar="FILE", help="recorded routing of the model, as for simulate")
    known.add_argument("--profile", type=expanded, metavar="FILE", help="a profile of the model")
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
        "--tokens",
        type=int,
        default=TOKENS,
        metavar="N",
        help=f"plan from the last N tokens of the trace, 0 = all (default: {TOKENS})",
    )
    parser.add_argument("--eviction", default="lcp", metavar="NAME", help="the cache policy (default: lcp)")
    options.add_pairs(parser, "set a parameter of the policy, or how the model is loaded, for example context=4096")
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="experts in a layer, as for simulate")
    clock = parser.add_argument_group("times", "Milliseconds; those not given are the profile's.")
    for name, what in TIMES.items():
        clock.add_argument(f"--{name}-ms", type=MILLISECONDS, metavar="X", help=what)
    parser.add_argument("--save", action="store_true", help="keep the plan in the profile")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    began_s = time.perf_counter()
    for where, name, _ in args.pairs:
        if where != options.LOAD and name != "buffer" and not name.startswith("eviction."):
            raise SettingError(
                f"plan has no use for {name}: it takes buffer, parameters of cache policies, and how to load."
            )
    size, model_hash, budget = model_of(args)
    trace = opened(args) if args.trace else None
    profile = found_profile(args, trace, model_hash)
    curves, basis = statistics(args, trace, profile)
    if size is not None and size.shape != (curves.layers, curves.experts):
        raise SettingError(
            f"{args.model} has {size.shape[0]} layers of {size.shape[1]} experts, and what is known is of "
            f"{curves.layers} of {curves.experts}. Name a trace and a profile of this model."
        )
    times, measured = times_of(args, profile)
    whole = args.theta == WHOLE
    least = float(curves.top_k) if whole else 0.0  # split experts are computed in the buffer
    aside = set_aside(args, curves.top_k, 1 if whole else SEVERAL)
    total = curves.layers * curves.experts
    if args.tpot is not None:
        plan = least_budget(curves, times, args.tpot, theta=args.theta, least=least)
        experts = min(total, math.ceil(plan.budget - 1e-6) + aside)
    else:
        experts = budgeted(budget, size, total)
        if experts < aside:
            raise SettingError(
                f"This budget pays for {experts} experts, but the prefetch buffer takes {aside}: a token uses "
                f"{curves.top_k} in a layer. Raise the budget."
            )
        plan = plan_cache(curves, times, experts - aside, theta=args.theta, least=least)
    others = compared(curves, times, experts - aside, whole)
    answer = Answer(
        plan,
        others,
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


def compared(curves: Curves, times: LayerTimes, experts: int, whole: bool) -> dict[str, CachePlan]:
    """Other divisions of the same slots; of `whole` experts alone where there is no buffer to compute split ones in."""
    split = {"even, each layer's best split": None, "even, halves": 0.5} if not whole else {}
    return {name: plan_even(curves, times, experts, theta) for name, theta in split.items()} | {
        "even, whole experts": plan_even(curves, times, experts, WHOLE),
        "AdapMoE, whole experts": plan_adapmoe(curves, times, experts),
    }


def set_aside(args: argparse.Namespace, top_k: int, blocks: int) -> int:
    """Experts of the budget that are the prefetch buffer. Raises SettingError for one that is too small."""
    own = {name: value for where, name, value in args.pairs if where == options.LIVE and name == "buffer"}
    return prefetch_buffer(Settings(own).cache.buffer, top_k, blocks)


def keep(args: argparse.Namespace, profile: Profile | None, plan: CachePlan) -> Path:
    """Save the plan with the profile -> the file. Raises ProfileError when there is none."""
    if profile is None:
        raise ProfileError("There is no profile to keep the plan in. Calibrate the model, or name a --profile.")
    file: Path = args.profile or profile_path(data_folder(data_dir()), profile.model_hash)
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
    return None if text == "auto" else real("a number from 0 to 1", 0.0, 1.0)(text)
