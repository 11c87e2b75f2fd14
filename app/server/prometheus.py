"""The metrics of core.metrics in Prometheus' text format, https://prometheus.io/docs/instrumenting/exposition_formats/.

Sums over all passes are counters by phase; what has no meaning as a sum is a gauge of the last pass. Times are seconds.
"""

from collections.abc import Iterator, Mapping

from app.services.host import Host
from core.metrics import METRICS, Metric

KIND = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


def text(host: Host) -> str:
    """Everything that is known now. A metric of passes is there from the first pass on."""
    return "".join(_lines(host))


def _lines(host: Host) -> Iterator[str]:
    totals, model = host.totals, host.models.model_id
    loaded: list[tuple[Labels, float]] = (
        [({"model": model, "format": host.models.format}, 1.0)] if model is not None else []
    )
    yield from _family("model_info", "gauge", "The loaded model.", loaded)
    yield from _family("answers_waiting", "gauge", "Answers in the queue.", [({}, host.chats.waiting)])
    yield from _family(
        "busy", "gauge", "Whether an answer is being written or a job uses the model.", [({}, host.busy)]
    )
    answers: list[tuple[Labels, float]] = [
        ({"reason": reason}, count) for reason, count in sorted(totals.answers.items())
    ]
    yield from _family("answers_total", "counter", "Answers that have ended, by what ended them.", answers)
    passes: list[tuple[Labels, float]] = [({"phase": phase}, count) for phase, count in sorted(totals.passes.items())]
    yield from _family("passes_total", "counter", "Forward passes.", passes)
    yield from _limit(host)
    sums, last = totals.sums, totals.last
    for one in METRICS:
        name, scale = _named(one)
        if one.level:
            now: list[tuple[Labels, float]] = [({}, last[one.name] * scale)] if one.name in last else []
            yield from _family(name, "gauge", f"{one.help} In the last pass.", now)
        else:
            found = sorted((phase, value * scale) for (metric, phase), value in sums.items() if metric == one.name)
            help = f"Passes with: {one.help}" if one.kind is bool else one.help
            yield from _family(f"{name}_total", "counter", help, [({"phase": phase}, value) for phase, value in found])


def _limit(host: Host) -> Iterator[str]:
    """The speed limit over the last decoded tokens (core.metrics.limit)."""
    limit = host.limit()
    if limit is None or not limit.tokens:
        return
    link: Labels = {"link": "emulated" if limit.emulated else "measured"}
    over = "the last decoded tokens, mean"
    yield from _family(
        "limit_share",
        "gauge",
        "The speed limit over the time that the last decoded tokens took.",
        [(link, limit.share)],
    )
    yield from _family("limit_seconds", "gauge", f"The least time of {over}.", [(link, limit.limit_ms / 1e3)])
    parts: list[tuple[Labels, float]] = [({"part": name, **link}, ms / 1e3) for name, ms in limit.parts.items()]
    yield from _family("limit_part_seconds", "gauge", f"Where the time went, in parts that add up: of {over}.", parts)


def _named(one: Metric) -> tuple[str, float]:
    """The name of a metric in base units, and what its values are multiplied by."""
    if one.unit == "ms":
        return f"{one.name.removesuffix('_ms')}_seconds", 1e-3
    if one.unit == "s":
        return f"{one.name.removesuffix('_s')}_seconds", 1.0
    return (f"{one.name}_passes" if one.kind is bool else one.name), 1.0


def _family(name: str, kind: str, help: str, samples: list[tuple[Labels, float]]) -> Iterator[str]:
    """One metric with all of its samples; nothing without any."""
    if not samples:
        return
    yield f"# HELP moestro_{name} {_escaped(help)}\n# TYPE moestro_{name} {kind}\n"
    for labels, value in samples:
        named = ",".join(f'{label}="{_escaped(text, quote=True)}"' for label, text in labels.items())
        yield f"moestro_{name}{{{named}}} {float(value)!r}\n" if named else f"moestro_{name} {float(value)!r}\n"


def _escaped(text: str, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
