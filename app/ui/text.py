"""HTML fragments shared by several panels: notices, the verdict of a fit estimate."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from html import escape

from app.services.planner import LeastMemory
from core.system.wording import format_bytes
from core.types import Fit

PROFILED = "the Calibrate tab"  # messages with this phrase say that calibration is needed
WHILE_BUSY = re.compile(
    "(The model is being|An answer is being written|This chat is( already)? being answered)|"
    ".* is( still)? being loaded[.]"
)
CALIBRATE = ' <button type="button" data-open="tab-calibrate">Calibrate now</button>'


def notice(text: str, kind: str = "error") -> str:
    """A line for an error or a missing requirement; "" shows nothing. A message that asks for a profile gets a button
    that opens the Calibrate tab. The page takes away one that says what is busy once nothing is; each differs from the
    one before, which would not be shown again otherwise.
    """
    way = CALIBRATE if PROFILED in text else ""
    busy = f' data-while-busy="{time.monotonic_ns()}"' if WHILE_BUSY.match(text) else ""
    return f'<div class="notice {kind}" role="alert"{busy}>{escape(text)}{way}</div>' if text else ""


def table(heads: Iterable[tuple[str, str, str]], body: str) -> str:
    """A table whose heads sort it: the class, the name and the tooltip of each column, and the rows of `cell`s."""
    named = ""
    for key, name, why in heads:
        tip = f" title='{escape(why)}'" if why else ""
        named += f"<th scope='col' class='{key}' aria-sort='none'><button type='button'{tip}>{name}</button></th>"
    return (
        f"<div class='rows-box'><table class='rows'><thead><tr>{named}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def cell(key: str, value: float | str | None, text: str) -> str:
    """A cell, sorted by its value."""
    shown = value if isinstance(value, str) else "" if value is None else f"{value:.9g}"
    return f"<td class='{key}' data-v='{escape(shown)}'>{escape(text)}</td>"


def columns(what: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of what things beside each other are: `what` its rows say, and the texts of each."""
    named = "".join(f"<th scope='col'>{escape(head)}</th>" for head in heads)
    body = "".join(
        f"<tr><td class='name'>{escape(name)}</td>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"
        for name, texts in rows
    )
    head = f"<thead><tr><th scope='col' class='name'>{what}</th>{named}</tr></thead>"
    return f"<div class='rows-box'><table class='rows'>{head}<tbody>{body}</tbody></table></div>"


def exactness() -> str:
    """The badge EXACT or LOSSY in few words, all of them on hover; /ui/exactness.js fills it."""
    return '<em class="exactness" data-k="exact" data-exactness="short" tabindex="0"></em>'


def fit_card(fit: Fit, budget: str = "", auto: bool = False, loaded: bool = False, own: str = "") -> str:
    """The verdict before loading: whether it fits and how fast; in Advanced memory by part and device, too.

    `budget` is the current setting; a suggestion is made only where it differs, and where not `auto` chooses it.
    `loaded`: the verdict is on the loaded model. `own`: the preset of its last time, whose settings it would be loaded
    with; "" = the current ones.
    """
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
    legend = "".join(
        f'<li><i class="sw {css}"></i>{name} <b>{format_bytes(amount)}</b></li>' for css, name, amount in parts
    )
    problem = fit.problem or (f"{fit.warning} You can load it anyway." if fit.warning else "")
    message = f'<p class="why">{escape(problem)}</p>' if problem else ""
    message += f'<p class="minor">{escape(fit.note)}</p>' if fit.note else ""
    resident = "all experts" if fit.slots >= fit.shape.total else f"{100 * share:.0f}&nbsp;% of experts"
    chosen = ", chosen by Auto" if auto else ""
    if own:
        message += (
            f'<p class="minor">Its settings of the last time are used: {escape(own)}, memory {escape(budget)}. '
            '<button type="button" class="suggest" data-budget="">Use the current settings</button></p>'
        )
    return (
        f'<div class="fit {kind}" role="status" data-loaded="{int(loaded)}"><p><b class="verdict">{verdict}</b> '
        f"<b>{format_bytes(fit.budget)}</b> of {format_bytes(fit.device_free)} free on {escape(fit.device)}: "
        f"<b>{resident}</b> resident{chosen}</p>"
        f'<div class="bar" aria-hidden="true">{bar}</div><ul class="advanced">{legend}</ul>{_tiers(fit)}{_speed(fit)}'
        f'<p class="minor advanced">Everything resident: {format_bytes(fit.budget_all)}; minimum: '
        f"{format_bytes(fit.budget_min)}. Context {fit.context} of {fit.context_limit} tokens.</p>"
        f"{message}{'' if auto else _suggestion(fit, budget)}</div>"
    )


def fit_chip(fit: Fit, auto: bool) -> str:
    """The verdict in few words, as the button of the top bar that leads to the card."""
    share = fit.slots / fit.shape.total
    kind = "bad" if fit.problem else "tight" if fit.warning else "good"
    room = "all experts fit" if fit.slots >= fit.shape.total else f"{100 * share:.0f}&nbsp;% of experts"
    room = "does not fit" if fit.problem else f"{room}, tight" if fit.warning else room
    return _chip(kind, f"{'<b>Auto</b> ' if auto else ''}{format_bytes(fit.device_free)} free: {room}")


def error_chip(source: str) -> str:
    """In place of `fit_chip` where there is no usable model, or one that is imported first: `source`."""
    if not source:
        return _chip("bad", "Cannot be loaded")
    return (
        '<button type="button" class="chip tight" data-open="tab-library" data-import-source="'
        f'{escape(source, quote=True)}">Import…</button>'
    )


def _chip(kind: str, words: str) -> str:
    return f'<button type="button" class="chip {kind}" data-show-fit title="Memory and speed">{words}</button>'


def least_memory(found: LeastMemory, tpot_ms: float) -> str:
    """What a time per token needs."""
    text = (
        f"For {tpot_ms:g} ms per token: at least {format_bytes(found.bytes)} ({found.experts / found.total:.0%} of "
        f"experts), by MoEpic's latency model, not measured."
    )
    return notice(text, "info")


def _tiers(fit: Fit) -> str:
    """Where the experts that are not on the device are stored."""
    disk = f"{format_bytes(fit.disk)} of experts stay there, read when needed" if fit.disk else "not needed once loaded"
    return (
        f"<dl class='advanced'><div><dt>Host memory</dt><dd><b>{format_bytes(fit.host)}</b> of "
        f"{format_bytes(fit.host_free)} free</dd></div>"
        f"<div><dt>Disk</dt><dd>{disk}</dd></div></dl>"
    )


def _speed(fit: Fit) -> str:
    """The expected hit rate and speed, and the basis of the estimate."""
    if not fit.basis:
        return ""
    hit = span(100 * fit.hit_low, 100 * fit.hit_high, 0)
    fast = span(fit.tok_s_low, fit.tok_s_high, 1 if fit.tok_s_high < 10 else 0)
    return (
        f'<dl class="expect" title="{escape(fit.basis, quote=True)}"><div><dt>Expected</dt>'
        f"<dd><b>{fast}</b> tok/s, hit rate <b>{hit}&nbsp;%</b></dd></div></dl>"
        f'<p class="minor basis">{escape(fit.basis[:1].upper() + fit.basis[1:])}.</p>'
    )


def _suggestion(fit: Fit, budget: str) -> str:
    """The button that sets the largest safe budget."""
    if not fit.suggested or fit.suggested == budget:
        return ""
    text = escape(fit.suggested, quote=True)
    return f'<button type="button" class="suggest" data-budget="{text}">Use suggested budget ({text})</button>'


def span(low: float, high: float, digits: int) -> str:
    """A range, or one number where both ends format the same: "12–30"."""
    ends = [f"{end:.{digits}f}" for end in (low, high)]
    return ends[0] if ends[0] == ends[1] else "–".join(ends)


def fit_error(text: str, source: str = "") -> str:
    """Shown in place of the verdict when the path holds no usable model, or one that is imported first: `source`."""
    verdict = "Import it first" if source else "Cannot be loaded"
    if source:
        text = "Moestro reads it once and writes an expert pack, which opens in seconds. The original stays as it is."
    way = (
        f'<button type="button" class="suggest" data-open="tab-library" data-import-source="'
        f'{escape(source, quote=True)}">Import…</button>'
        if source
        else ""
    )
    return (
        f'<div class="fit {"tight" if source else "bad"}" role="status"><p><b class="verdict">{verdict}</b></p>'
        f'<p class="why">{escape(text)}</p>{way}</div>'
    )
