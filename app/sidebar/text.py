"""Small pieces of HTML that several panels write: sizes in words, notices, the verdict of a fit estimate."""

from __future__ import annotations

from html import escape

from core.types import Fit

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def size(count: float) -> str:
    """Bytes with a unit and three significant digits: "7.25 GB"."""
    for unit, scale in UNITS:
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}" if abs(count) < 100 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def notice(text: str, kind: str = "error") -> str:
    """A line that tells the user what went wrong or is missing; "" shows nothing."""
    return f'<div class="notice {kind}" role="alert">{escape(text)}</div>' if text else ""


def fit_card(fit: Fit) -> str:
    """The verdict before loading: does it fit, what takes which memory, how many experts stay on the device."""
    experts = fit.slots * fit.shape.expert_bytes
    share = fit.slots / fit.shape.total
    kind, verdict = (
        ("bad", "Does not fit") if fit.problem else ("tight", "Tight fit") if fit.warning else ("good", "Fits")
    )
    parts = (
        ("dense", "dense", fit.dense),
        ("kv", "KV", fit.kv),
        ("work", "workspace", fit.workspace),
        ("experts", "experts", experts),
    )
    full = max(1, sum(part[2] for part in parts))
    bar = "".join(f'<i class="{css}" style="width:{100 * amount / full:.1f}%"></i>' for css, _, amount in parts)
    legend = "".join(f'<li><i class="sw {css}"></i>{name} <b>{size(amount)}</b></li>' for css, name, amount in parts)
    message = f'<p class="why">{escape(fit.problem or fit.warning)}</p>' if fit.problem or fit.warning else ""
    return (
        f'<div class="fit {kind}" role="status"><p><b class="verdict">{verdict}</b> <b>{size(fit.budget)}</b> of '
        f"{size(fit.device_free)} free on {escape(fit.device)}, <b>{100 * share:.0f}&nbsp;%</b> of experts resident</p>"
        f'<div class="bar" aria-hidden="true">{bar}</div><ul>{legend}</ul>'
        f'<p class="minor">Host memory {size(fit.host)} of {size(fit.host_free)} free. Everything resident: '
        f"{size(fit.budget_all)}; least: {size(fit.budget_min)}. Context {fit.context} of {fit.context_limit} tokens."
        f"</p>{message}</div>"
    )


def fit_error(text: str) -> str:
    """The place of the verdict when there is no usable model there."""
    verdict = '<p><b class="verdict">Cannot be loaded</b></p>'
    return f'<div class="fit bad" role="status">{verdict}<p class="why">{escape(text)}</p></div>'
