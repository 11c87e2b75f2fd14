"""What `plan` computes from: hit curves of a trace or a profile, measured times, the sizes of a model."""

import argparse
from dataclasses import dataclass

from app.cli import options
from app.cli.simulate import profile_for
from app.services.profiles import stored_profile
from core.errors import SettingError
from core.policy.allocation.curves import Curves, curves_of
from core.policy.allocation.expert_split import LayerTimes
from core.policy.eviction import policy_maker
from core.profile import Profile, load
from core.profile.trace import FileTrace, Trace
from core.settings.budget import Budget
from core.settings.config import Settings
from core.settings.param import Choice
from core.settings.registry import variant
from core.simulate.curves import measure_curves
from core.system.command import COMMAND

TIMES = {
    "att": "attention of one layer",
    "moe": "all experts of a token in one layer",
    "head": "all else of a token",
    "load": "copying one expert",
}


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model, where one was named: its layers and experts, and bytes of one expert in the cache and of everything
    that is no cache."""

    shape: tuple[int, int]
    expert_bytes: int
    fixed_bytes: int


def policy(args: argparse.Namespace) -> Choice:
    """The cache policy with its parameters. Raises SettingError."""
    own = {name: value for where, name, value in args.pairs if where == options.LIVE and name != "buffer"}
    return Settings({"eviction": args.eviction, **own}).cache.eviction


def statistics(args: argparse.Namespace, trace: Trace | None, profile: Profile | None) -> tuple[Curves, str]:
    """Hit curves and worth of predictions, and where they are from. Raises SettingError when neither is known."""
    if trace is not None:
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
            f"There is nothing to plan from. Name a --trace, or calibrate the model ({COMMAND} calibrate)."
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
            f"Without measured times, give {', '.join(lacks)}. They are measured by {COMMAND} calibrate."
        )
    basis = []
    if measured and profile is not None:
        about = profile.settings.get("times")
        link = about if isinstance(about, dict) else {}
        where = "over an emulated link" if link.get("link") == "emulated" else f"from {link.get('load_from', 'memory')}"
        device = profile.settings.get("device_name") or profile.settings.get("device") or "this machine"
        basis.append(f"measured on {device}, experts copied {where}")
    basis += [f"{', '.join(own)} as given"] if own else []
    return LayerTimes.of({**measured, **own}), "; ".join(basis)


def model_of(args: argparse.Namespace) -> tuple[Size | None, str, Budget]:
    """Sizes and hash of the model named, and the requested budget."""
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
    shape = sizes.shape.layers, sizes.shape.experts
    return Size(shape, sizes.shape.expert_bytes, sizes.fixed), model_hash, budget


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
        return found if found is not None or not model_hash else stored_profile(model_hash)
    if args.profile is not None:
        return load(args.profile, model_hash=model_hash or None, model=args.model or "")
    return stored_profile(model_hash) if model_hash else None
