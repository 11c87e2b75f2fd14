"""Counts and names as people read them, the same in the dashboard and in the terminal."""

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import PureWindowsPath
from typing import Any

from core.engine.quality.interval import Share
from core.engine.quality.report import agreed
from core.settings.budget import Budget
from core.settings.config import KINDS, params
from core.settings.registry import variants

MARK = 6  # hexadecimal digits of a model's id


def count(number: int) -> str:
    """A whole number with its thousands apart, in every language alike: "20 000"."""
    return f"{number:,}".replace(",", "\u202f")


def percent(share: float) -> str:
    """A share as a percentage: "3.1 %", and small ones with their first two digits: "0.042 %"."""
    value = 100 * share
    return f"{value:.0f} %" if value in (0, 100) else f"{value:.1f} %" if abs(value) >= 1 else f"{value:.2g} %"


@lru_cache(512)
def describe_change(text: str) -> str:
    """The engine's text about a changed setting ("eviction lru → lfu") in the page's words: "Eviction policy: LRU →
    LFU", "Telemetry off". Any other text is returned unchanged."""
    name, _, rest = text.partition(" ")
    if name not in params() or not rest:
        return text
    title = title_of(name)
    if rest in ("on", "off"):
        return f"{title} {rest}"
    return f"{title}: {' → '.join(value_of(name, value) for value in rest.split(' → '))}"


def title_of(setting: str) -> str:
    """A setting's name in the page's words."""
    param = params().get(setting)
    return (param.title if param is not None else "") or setting


def value_of(setting: str, value: object) -> str:
    """A setting's value in the page's words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    shown = {variant.name: variant.title for variant in variants(setting)} if setting in KINDS else {}
    param = params().get(setting)
    if param is not None and param.choice_titles:
        shown |= dict(zip(param.choices, param.choice_titles, strict=True))
    return shown.get(f"{value}", f"{value}")


FAST = {"fast": "fast arithmetic", "fast_experts": "fast arithmetic of experts"}


def lossy(stats: Mapping[str, Any]) -> str:
    """EXACT, perhaps up to rounding, in the fast arithmetic or for weights of a smaller format, or LOSSY and the share
    of (token, layer, expert) that was changed; of the fields of an AnswerStats."""
    if stats["exact"]:
        fast = FAST.get(stats.get("arithmetic", ""), "")
        exact = "EXACT UP TO ROUNDING" if stats.get("closeness") and not fast else "EXACT"
        exact += ", two processors" if exact != "EXACT" and stats.get("host_computed") else ""
        exact += f" for {stats['weights']} weights" if stats.get("weights") else ""
        return f"{exact}, {fast}{_distance(stats)}" if fast else exact
    return f"LOSSY {percent(stats['changed'] / stats['assignments'])}" if stats.get("assignments") else "LOSSY"


def _distance(stats: Mapping[str, Any]) -> str:
    """How far the fast arithmetic is from the reference, as far as that was measured."""
    kl = stats.get("distance_kl")
    return "" if kl is None else f" (KL {kl:.2g} over {stats['distance_tokens']} tokens)"


def scored(quality: Mapping[str, Any] | None) -> list[str]:
    """What an answer's quality is, in parts of a line; of the fields of a core.engine.quality.report.Quality."""
    if quality is None:
        return []
    parts = [quality["note"]] if quality["note"] else []
    if quality["kl"] is not None:
        parts.append(f"KL {quality['kl']:.2g}")
    if (share := agreed(quality["agreement"], quality["scored"])) is not None:
        parts.append(f"agrees {agreement(share)}")
    if quality["perplexity"] is not None:
        parts.append(f"perplexity {quality['perplexity']:.3g}")
    if quality["saved_ms"]:
        parts.append(f"saved ~{quality['saved_ms']:.2g} ms/token")
    return parts


def agreement(share: Share) -> str:
    """A share of the tokens that were checked, with its interval and a verdict:
    "50 % (12 of 24 tokens, 95 % interval 31–69 %): low".
    """
    between = f"{100 * share.low:.0f}–{100 * share.high:.0f} %"
    verdict = {"close": "", "low": ": low", "unclear": ": too few tokens to tell"}[share.verdict]
    return f"{percent(share.value)} ({share.hits} of {share.n} tokens, 95 % interval {between}){verdict}"


def name_of(model: str) -> str:
    """How a model is called on screen."""
    return "Demo model (bundled)" if model == "demo" else short_name(model)


def model_id(model: str) -> str:
    """How other programs know a model: by its name and a mark of its path, as models in two folders may have the same
    name. Says nothing of this machine's folders."""
    if model == "demo":
        return model
    mark = sha256(PureWindowsPath(model).as_posix().encode("utf-8", "surrogateescape")).hexdigest()
    return f"{short_name(model)}@{mark[:MARK]}"


def short_name(model: str) -> str:
    """The demo's, a model's name on the Hugging Face hub, or the last part of its path."""
    path = PureWindowsPath(model)  # which knows both separators: a store may come from another machine
    cached = next((p.parent.parent for p in (path, *path.parents) if p.parent.name == "snapshots"), None)
    if cached is not None and cached.name.startswith("models--"):
        repo = cached.name.removeprefix("models--").replace("--", "/")
        return f"{repo}/{path.name}" if path.suffix == ".gguf" else repo
    return path.name or model


def written(budget: Budget) -> str:
    """A budget as its field takes it: a share, or bytes in the largest unit that has them exactly in four digits or
    fewer ("6.5GB", not 6500000000)."""
    if budget.bytes is None:
        return str(budget)
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("GiB", 2**30), ("MB", 10**6), ("MiB", 2**20), ("kB", 10**3)):
        text = f"{budget.bytes / one:.4g}"
        if budget.bytes >= one and "e" not in text and Budget.parse(text + unit) == budget:
            return text + unit
    return str(budget)
