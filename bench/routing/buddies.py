"""bench buddies: what BuddyMoE's figures 4, 6, 7 and 9 and its sections 3.2 and 3.3 say of a model's routing: how
unevenly experts and pairs of them are chosen, how alike their outputs are, how long buddy lists get.

All figures are counts of one calibration, or of a profile that exists already."""

from pathlib import Path

from bench.harness.engines import READ
from bench.harness.report import headline
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.routing.buddy_figures import BUSY, measured
from core.engine.texts import bundled
from core.errors import SettingError
from core.measure.calibrate.gather import calibrate
from core.profile import Profile, load
from core.system.wording import cell, grid


def measure(run: Run, model: str | None = None, profile: Path | None = None) -> Result:
    """`profile` is read in place of calibrating `model`, by default the demo model. Raises SettingError when both are
    given, ProfileError for a profile without counts and pairs."""
    if profile is not None and model is not None:
        raise SettingError("Give --model or --profile, not both: a profile is of one model.")
    known = load(profile) if profile is not None else calibrated(run, model or "demo")
    return {**measured(known), **about(known)}


def calibrated(run: Run, model: str) -> Profile:
    """A profile with what the figures need."""
    with run.loaded(model, RESIDENT) as engine:
        run.say("calibrating")
        return calibrate(
            engine,
            bundled(engine.model_name),
            parts={"counts", "pairs", "likeness"},
            source="the bundled prompts",
            limit=200 if run.small else READ,
        )


def about(profile: Profile) -> Result:
    """What the figures are of."""
    same = {name: getattr(profile, name) for name in ("model", "model_hash", "layers", "experts", "top_k", "source")}
    return {**same, "profile_tokens": profile.tokens, "profile_date": profile.created}


def table(r: Result) -> list[str]:
    alike, layers = r["cosines"], range(r["layers"])
    shares = [
        (
            str(layer),
            *(f"{r[figure][layer]:.1%}" for figure in ("busiest", "few_cover", "few_popular_cover")),
            *(cell(None if alike is None else alike[layer][which], ".3f") for which in ("50", "best")),
        )
        for layer in layers
    ]
    lists = [
        (
            str(layer),
            *(
                f"{row['median']:g}, {row['longest']}; {row['limited']:.1%}, {row['covered']:.1%}"
                for row in (of[layer] for of in r["lists"].values())
            ),
        )
        for layer in layers
    ]
    few = r["few_peers"]
    return [
        f"{headline(r)}; {r['profile_tokens']:,} tokens of {r['source']}",
        f"By layer: share of choices of the busiest 1/{BUSY}; share of co-activations with an expert's first {few} "
        "peers, and were they chosen independently; cosine of outputs, median and an expert's best",
        *grid(("layer", "busiest", f"first {few}", "independent", "cosine", "best"), shares),
        f"Buddy lists by layer and alpha: half of them up to, longest; cut by a limit of {r['k_max']}, covered with it",
        *grid(("layer", *r["lists"]), lists),
    ]


SUITE = Suite(measure, table)
