"""Sidebar, what Auto chose and why: one sentence, and on a click the figures, with those of what it did not choose."""

from __future__ import annotations

from html import escape

from app.services.auto import Compared
from app.services.host import Host
from app.wording import written
from core.policy.throttle import Seen, Tried
from core.settings.presets import FIRST
from core.settings.registry import variant

PLACES = ("Missing experts computed where they lie", "Missing experts waited for")
AHEAD = ("Prefetching", "No prefetching")


def account(host: Host, base: str) -> str:
    """The note as HTML, for the preset `base`; "" while no model is loaded, or where Auto was not chosen."""
    if host.models.loaded is None or base != FIRST:
        return ""
    share = host.models.settings.cache.budget.share
    if share is not None and share >= 1:
        return '<p class="about">All experts are in memory, so none has to be fetched.</p>'
    compared, tried = host.auto.compared(), host.models.tried
    places = _both(tried.placement, *PLACES, foretold=", predicted" if tried.predicted else "")
    rows = [*_policies(compared), *places, *_both(tried.prefetching, *AHEAD)]
    parts = (_memory(host), _policy(host, compared), _placement(tried), _prefetching(host, tried))
    sentence = f"{'; '.join(filter(None, parts))}."
    if not rows:
        return f'<p class="about">{sentence}</p>'
    table = "".join(
        f"<tr><th scope='row'>{name}</th><td>{figure}</td><td>{cost}</td></tr>" for name, figure, cost in rows
    )
    return (
        f'<details class="about"><summary>{sentence}</summary><table><thead><tr><th>What was compared</th>'
        f"<th>Figures</th><th>Beside the choice</th></tr></thead><tbody>{table}</tbody></table></details>"
    )


def _memory(host: Host) -> str:
    budget = host.models.settings.cache.budget
    room = f"Memory for {budget} of the experts" if budget.bytes is None else f"{written(budget)} of memory"
    chosen = "the most that is safe" if "budget" in host.remembered.auto else "as you chose"
    return f"{escape(room)}, {chosen}"


def _policy(host: Host, compared: Compared | None) -> str:
    title = escape(variant("eviction", str(host.models.settings["eviction"])).title)
    if "eviction" not in host.remembered.auto:
        return f"{title} chooses what is evicted, as you chose"
    if compared is None:
        return f"{title} chooses what is evicted, until another policy surely hits more"
    hits = next((rate for name, rate, _ in compared.rates if name == compared.chosen), 0.0)
    return f"{title} chooses what is evicted, with {hits:.1%} hits, simulated, and no policy surely has more"


def _placement(tried: Tried) -> str:
    """Nothing where it is not compared: experts are on the device, or are waited for."""
    if tried.placement is None:
        return ""
    hosted_ms, waits_ms, _, goes_on = tried.placement
    if goes_on:
        instead = f"in place of {'some ' if tried.predicted else ''}{waits_ms:.3g}"
        return f"missing experts are computed where they lie: {hosted_ms:.3g} ms a token {instead}"
    return f"missing experts are waited for: {waits_ms:.3g} ms a token; computed where they lie {hosted_ms:.3g}"


def _prefetching(host: Host, tried: Tried) -> str:
    settings, ahead = host.models.settings, tried.prefetching
    if settings.prefetch.predictor.name == "none":
        return "nothing is prefetched"
    if not settings.prefetch.auto:
        return "experts are always prefetched"
    if ahead is None and tried.waits is not None:
        waited_ms, token_ms = tried.waits
        return f"nothing is prefetched, as copies are waited for only {waited_ms:.2g} of a token's {token_ms:.3g} ms"
    if ahead is None:
        return "prefetching is compared with not prefetching while answers are written"
    with_ms, without_ms, _, goes_on = ahead
    if goes_on:
        return f"experts are prefetched, as a token then takes {with_ms:.3g} ms in place of {without_ms:.3g}"
    return f"prefetching is paused, as a token takes {with_ms:.3g} ms with it and {without_ms:.3g} without"


def _policies(compared: Compared | None) -> list[tuple[str, str, str]]:
    """A row for each cache policy; its misses in ms a token, if all were waited for."""
    if compared is None:
        return []
    over = ", emulated link" if compared.emulated else ""
    return [
        (
            escape(name),
            f"{rate:.1%} hits, simulated on your last {compared.tokens} tokens",
            "chosen" if name == compared.chosen else "" if cost is None else f"{cost:+.3g} ms a token{over}",
        )
        for name, rate, cost in compared.rates
    ]


def _both(seen: Seen | None, with_it: str, without: str, foretold: str = "") -> list[tuple[str, str, str]]:
    """A row for each of two ways that were compared; `foretold`: behind the second's time."""
    if seen is None:
        return []
    with_ms, without_ms, tokens, goes_on = seen
    of, more = f"over {tokens} tokens", with_ms - without_ms
    return [
        (with_it, f"{with_ms:.3g} ms a token, {of}", "chosen" if goes_on else f"{more:+.3g} ms a token"),
        (without, f"{without_ms:.3g} ms a token{foretold}, {of}", f"{-more:+.3g} ms a token" if goes_on else "chosen"),
    ]
