"""The text of tab Calibrate: what can be measured and why, the estimated duration, the contents of the profile."""

from __future__ import annotations

from datetime import datetime
from html import escape

from app.services.calibrator import CHOICES
from app.wording import count, name_of
from core.profile import PARTS, Profile
from core.profile.summary import TITLES, describe
from core.settings.calibration import CalibrationSettings
from core.settings.config import KINDS
from core.settings.registry import variants
from core.system.wording import format_bytes
from core.types import ModelShape

EMPTY = (
    "<div class='empty-note'><b>Not calibrated yet</b><span>Calibration runs texts through the loaded model and "
    "measures its routing. Some prefetchers, policies and slot allocations need it.</span></div>"
)
NO_MODEL = (
    "<div class='empty-note'><b>No model is loaded</b><span>Load one in the sidebar to calibrate it.</span></div>"
)
HELP = {
    "counts": "how often each expert is chosen",
    "pairs": "which experts are chosen together",
    "defaults": "each expert's mean output",
    "gate_recall": "how well a router, run early, predicts the next layer's experts",
    "tae": "entropy of the gate weights",
    "maps": "router distributions of single tokens",
    "likeness": "similarity of two experts' outputs",
    "norms": "norm of each expert's output",
    "peaks": "experts with outputs so large that the model depends on them",
    "curves": "hit rates at every cache size, for plans",
    "times": "times of attention, experts and copies",
    "estimator": "a small network, trained to predict the next layer's experts",
    "path": "a small network, trained to predict all layers' experts from the text",
}
TRAINED = {"estimator": 0.5, "path": 1.0}  # training time as a multiple of the reading time
CHARACTERS = 3.6  # per token, roughly, in running text


def part_choices() -> list[tuple[str, str]]:
    """The form's choices: every part with its description."""
    return [(f"{TITLES[part]}: {HELP[part]}", part) for part in PARTS]


def kind_choices(chats: int, tokens: int) -> list[tuple[str, str]]:
    """The form's choices: every readable kind with its available amount."""
    there = {"chats": str(chats), "traces": f"{count(tokens)} tokens"}
    return [(f"{title} ({there[kind]})" if kind in there else title, kind) for kind, title in CHOICES.items()]


def needed_by(part: str) -> list[str]:
    """Titles of the prefetchers and policies that require a part."""
    return [v.title for kind in KINDS for v in variants(kind) if part in v.needs]


def rough(
    characters: int,
    limit: int,
    tokens_s: float | None,
    parts: list[str],
    training: CalibrationSettings | None = None,
    shape: ModelShape | None = None,
    writing: int = 0,
) -> str:
    """Estimated duration, and the disk that `training` an estimator takes for a model of this shape. `tokens_s` =
    prefill speed on this machine; None = not known yet. `writing`: tokens that the model writes, which no speed is
    known for."""
    tokens = round(characters / CHARACTERS)
    tokens = min(tokens, limit) if limit else tokens
    text = f"About {count(tokens)} tokens to read"
    if training is not None and shape is not None:
        text += f", {format_bytes(training.training_bytes(shape, tokens))} of disk while the estimator is trained"
    if writing:
        text += f", and {count(writing)} tokens to write at the speed of an answer"
    if tokens_s is None:
        return f"{text}. The time left is shown once it has begun."
    reading = 2.0 * tokens / tokens_s  # observing the routers takes about as long again as reading
    learning = reading * sum(TRAINED.get(part, 0.0) for part in parts)
    more = f", and {spoken(learning)} to train" if learning > 1 else ""
    at = f"at the speed of the longest prompts read since loading ({tokens_s:.0f} tokens/s)"
    return f"{text}: roughly {spoken(reading)}{more}, {at}."


def spoken(seconds: float) -> str:
    """A rough duration as text."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def summary(profile: Profile, file_bytes: int) -> str:
    """The contents of the profile."""
    facts = [
        f"{count(profile.tokens)} tokens of {escape(profile.source)}",
        f"made {when(profile.created)}",
        f"{profile.layers} layers × {profile.experts} experts, top-{profile.top_k}",
        format_bytes(file_bytes),
        f"hash {escape(profile.model_hash[:12])}",
    ]
    text = describe(profile)
    rows = "".join(
        f"<tr><td class='name'>{TITLES[part]}</td><td class='why'>{escape(text[:1].upper() + text[1:])}."
        f"{_users(part)}</td></tr>"
        for part, text in text.items()
    )
    missing = [TITLES[part] for part in PARTS if part not in text]
    more = f"<p class='minor'>Not measured: {', '.join(missing)}.</p>" if missing else ""
    return (
        f"<div class='whatif-head'><h3>Profile of {escape(name_of(profile.model))}</h3><p>{' · '.join(facts)}</p>"
        f"<div class='rows-box'><table class='rows'><tbody>{rows}</tbody></table></div>{more}</div>"
    )


def _users(part: str) -> str:
    users = needed_by(part)
    return f" <span class='minor'>Needed by: {escape(', '.join(users))}.</span>" if users else ""


def question(profile: Profile) -> str:
    """The confirmation of a deletion: what it removes."""
    return (
        f"<p>Delete the profile of <b>{escape(name_of(profile.model))}</b> ({count(profile.tokens)} tokens, made "
        f"{when(profile.created)}) for good?</p>"
    )


def when(created: str) -> str:
    """Local date and time of an ISO 8601 text."""
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return created
