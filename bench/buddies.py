"""bench buddies: what BuddyMoE's figures 4, 6, 7 and 9 and its sections 3.2 and 3.3 say of a model's routing, asked of
a profile: how unevenly experts and pairs of them are chosen, how alike their outputs are, how long buddy lists get.

All of it are counts of one calibration, or of a profile that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.buddy_figures import BUSY, measured
from bench.subject import subject
from core.calibrate.gather import calibrate
from core.calibrate.texts import bundled
from core.engine import Engine
from core.errors import SettingError
from core.profile import Profile, load
from core.settings.config import Settings
from core.settings.loading import LoadSpec

READ = 20_000  # most tokens of the bundled prompts


def run(
    model: str | None = None,
    profile: Path | None = None,
    small: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures; returns the result as plain data. `profile` is read in place of calibrating `model`, by default the
    demo model. Raises SettingError when both are given, ProfileError for a profile without counts and pairs."""
    if profile is not None and model is not None:
        raise SettingError("Give --model or --profile, not both: a profile is of one model.")
    if profile is not None:
        known = load(profile)
        return {**measured(known), **about(known)}
    engine = Engine.load(LoadSpec.checked(model or "demo", Settings({"budget": "all", "link": "own"})))
    try:
        say("calibrating")
        known = calibrate(
            engine,
            bundled(engine.model_name),
            parts={"counts", "pairs", "likeness"},
            source="the bundled prompts",
            limit=200 if small else READ,
        )
        return {**measured(known), **about(known), **subject(engine)}
    finally:
        engine.unload()


def about(profile: Profile) -> dict[str, Any]:
    """What the figures are of."""
    return {
        "model": profile.model,
        "model_hash": profile.model_hash,
        "layers": profile.layers,
        "experts": profile.experts,
        "top_k": profile.top_k,
        "profile_tokens": profile.tokens,
        "source": profile.source,
        "profile_date": profile.created,
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as text."""
    lists, alike = result["lists"], result["cosines"]
    lines = [
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, {result['top_k']} active; "
        f"{result['profile_tokens']:,} tokens of {result['source']}",
        f"By layer: share of choices of the busiest 1/{BUSY}; share of co-activations with an expert's first "
        f"{result['few_peers']} peers, and were they chosen independently; cosine of outputs, median and an expert's "
        "best",
    ]
    for layer in range(result["layers"]):
        row = [result["busiest"][layer], result["few_cover"][layer], result["few_popular_cover"][layer]]
        best = "" if alike is None else f"   {alike[layer]['50']:6.3f} {alike[layer]['best']:6.3f}"
        lines.append(f"  {layer:5d}" + "".join(f"{one:8.1%}" for one in row) + best)
    lines.append(
        f"Buddy lists by layer: half of them up to, longest; cut by a limit of {result['k_max']}, covered with it"
    )
    lines.append("  alpha" + "".join(f"{alpha:>28s}" for alpha in lists))
    for layer in range(result["layers"]):
        rows = [of[layer] for of in lists.values()]
        lines.append(
            f"  {layer:5d}"
            + "".join(
                f"{row['median']:8g}{row['longest']:5d}{row['limited']:8.1%}{row['covered']:7.1%}" for row in rows
            )
        )
    return "\n".join([*lines, *(f"  {one['holds']:13s}{one['claim']}" for one in result["orderings"])])
