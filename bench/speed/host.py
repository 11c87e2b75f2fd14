"""bench host: a decoded token whose missing experts wait for the link, are computed where they lie in host memory, or
go where it takes the least time.

The processor stands for both sides: one thread computes for the device, out of slots, and the others for the host, out
of its memory; copies go over emulated links. Balance is the link that copies an expert in the time in which it is
handed to the host and computed there, as measured before the first answer; the links are multiples of it. Every kind
gives the same answers, from a cache as after the load, whose prompts are read over the machine's own link. Bits are
compared as well."""

import math
import os
from collections.abc import Iterator
from html import escape
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch

from bench.harness.engines import model_of, token_stream
from bench.harness.figures import ratio, spread
from bench.harness.run import LATENCY_US, Result, Run, Suite
from core.engine import Engine
from core.memory.codec.fast.background import most_threads
from core.metrics import share
from core.settings.sampling import Sampling
from core.system.wording import grid
from core.types import Ids, StepRecord

PROMPT = 16  # tokens
SKIPPED = 6  # decoded tokens that are not counted, until the copies are those of the link
LEARNING = 120  # tokens at most that `measured` may compare itself with waiting
LINKS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)  # times balance
SMALL_LINKS = (0.1, 2.0)
KINDS = ("wait", "host", "measured")
WORSE = 1.03  # goal: measured over the better of the other two


def measure(run: Run, model: str = "demo", budget: str = "40%", rounds: int = 5, tokens: int = 48) -> Result:
    """`tokens` = decoded ones of an answer that are counted."""
    path, host_threads = model_of(run, model), min(1, most_threads())
    settings = {"budget": budget, "link": "own", "predictor": "none", "host_threads": host_threads}
    how: dict[str, Any] = {
        "arithmetic": "fast",
        "context": 256,
        "threads": max(1, (os.cpu_count() or 1) - host_threads),
    }
    engine = run.engine(path, settings, endless=True, host="all", **how)
    engine.change({"miss_placement": "measured"})
    costs = engine.parts.host.costs
    assert costs is not None, "the host cannot compute this model's experts"
    balance = engine.sizes.blob / (costs.costs.host_fixed_s + costs.costs.host_s) / 1e9
    stream = token_stream(engine)
    prompts = [list(islice(stream, PROMPT)) for _ in range(rounds + 1)]
    found: dict[str, Any] = {}
    for times in SMALL_LINKS if run.small else LINKS:
        link = {"link": "emulated", "link_gbps": max(0.001, times * balance), "link_latency_us": LATENCY_US}

        def answered(kind: str, number: int, link: dict[str, Any] = link) -> Answer:
            return Answer(engine, {**link, "miss_placement": kind}, prompts[number], tokens)

        of = run.by_turns(KINDS, answered, rounds, what=f"{times:g} of balance")
        found[f"{times:g}"] = {"gbps": link["link_gbps"], **_figures(of)}
    return {
        "links": found,
        "balance_gbps": balance,
        "costs": {name: getattr(costs.costs, name) for name in costs.costs.__dataclass_fields__},
        "host_threads": host_threads,
        "device_threads": how["threads"],
        "goal": WORSE,
    }


class Answer:
    """One answer: the records of the tokens that count, and the logits of all."""

    def __init__(self, engine: Engine, settings: dict[str, Any], prompt: list[int], tokens: int) -> None:
        engine.change({"link": "own", "miss_placement": "wait"})
        engine.expert_cache.start_over()
        self.logits, steps = list[torch.Tensor](), list[StepRecord]()
        self.learning = 0  # tokens in which `measured` compared itself with waiting, which do not count

        def draw(_: Any, row: torch.Tensor) -> int:
            self.logits.append(row[0].clone())
            return int(row[0].argmax())

        answer = engine.generate(Ids(prompt), Sampling(max_new_tokens=LEARNING + SKIPPED + tokens + 1), draw=draw)
        for piece in answer:
            if piece.step is not None and piece.step.phase == "decode":
                steps.append(piece.step)
                if len(steps) == 1:
                    engine.change(settings)
                elif engine.parts.host.throttle.comparing and len(steps) <= LEARNING:
                    self.learning = len(steps)
                if len(steps) == self.learning + SKIPPED + tokens:
                    break
        self.steps = steps[-tokens:]
        self.tpot_ms = fmean(one.total_ms for one in self.steps)

    def mean(self, name: str) -> float:
        """Of a metric, per token."""
        return fmean(getattr(one, name) for one in self.steps)


def _figures(found: dict[str, list[Answer]]) -> Result:
    times = {kind: [one.tpot_ms for one in of] for kind, of in found.items()}
    better = [min(pair) for pair in zip(times["wait"], times["host"], strict=True)]
    usual = min((median(times["wait"]), times["wait"]), (median(times["host"]), times["host"]))[1]
    return {
        **{kind: {"tpot_ms": spread(times[kind]), **dict(_about(of))} for kind, of in found.items()},
        "over_better": ratio(times["measured"], usual),
        "over_better_of_each_round": ratio(times["measured"], better),
        "differing": sum(_differing(found["wait"][n], of[n]) for of in found.values() for n in range(len(of))),
    }


def _about(of: list[Answer]) -> Iterator[tuple[str, float | None]]:
    steps = [step for one in of for step in one.steps]
    yield "hit_rate", share(steps, "hits", "requests")
    yield "learning", median([one.learning for one in of])
    for name in ("host_computed", "host_admitted", "stall_ms", "host_ms"):
        yield name, fmean(one.mean(name) for one in of)


def _differing(one: Answer, other: Answer) -> int:
    """Logits with other bits, of the tokens that both have."""
    return sum(int((a != b).sum()) for a, b in zip(one.logits, other.logits, strict=False))


def table(r: Result) -> list[str]:
    rows = []
    for times, of in r["links"].items():
        cells = [f"{of[kind]['tpot_ms']['median']:.2f}" for kind in KINDS]
        measured, goal = of["measured"], "kept" if of["over_better"] <= r["goal"] else "MISSED"
        figures = (("host_computed", ".1f"), ("host_admitted", ".1f"), ("hit_rate", ".2f"), ("learning", "g"))
        shares = [format(measured[name], how) for name, how in figures]
        rows.append(
            (times, f"{of['gbps']:.3g}", *cells, f"{of['over_better']:.3f}", goal, *shares, str(of["differing"]))
        )
    heads = (
        "link / balance",
        "GB/s",
        *KINDS,
        "over the better",
        f"<= {r['goal']}",
        "hosted",
        "admitted",
        "hits",
        "learning",
        "bits",
    )
    return [
        f"{r['model']} at {r['budget']}: ms a decoded token; medians of {r['rounds']} answers of {r['tokens']} tokens. "
        f"Threads: {r['device_threads']} of the device, {r['host_threads']} of the host. Balance: "
        f"{r['balance_gbps']:.3g} GB/s",
        *grid(heads, rows),
        "  hosted, admitted: of the measured placement, a token; learning: its tokens that took turns with waiting "
        "first, which are left out; bits: logits that differ from those of wait",
    ]


def picture(r: Result) -> str:
    """Time per token of each kind over the links, both logarithmic, as an SVG."""
    width, height, left, bottom, room = 720, 420, 64, 60, 560
    times = [float(link) for link in r["links"]]
    ms = {kind: [of[kind]["tpot_ms"]["median"] for of in r["links"].values()] for kind in KINDS}
    low, high = min(map(min, ms.values())), max(map(max, ms.values()))

    def x(at: float) -> float:
        return left + room * math.log(at / times[0]) / (math.log(times[-1] / times[0]) or 1.0)

    def y(at: float) -> float:
        return height - bottom - (height - 130) * math.log(at / low) / (math.log(high / low) or 1.0)

    def text(at_x: float, at_y: float, words: str, fill: str = "#94a3b8", size: int = 12) -> str:
        font = 'font-family="system-ui, sans-serif"'
        return f'<text {font} x="{at_x:.0f}" y="{at_y:.0f}" font-size="{size}" fill="{fill}">{escape(words)}</text>'

    shown = [text(24, 34, f"{r['model']} at {r['budget']}: ms a decoded token over emulated links", "#e2e8f0", 16)]
    shown += [text(x(at) - 8, height - 34, f"{at:g}") for at in times]
    shown += [text(16, y(at) + 4, f"{at:.3g}") for at in (low, math.sqrt(low * high), high)]
    shown.append(
        text(left, height - 12, "link, as a multiple of the one that copies an expert while the host computes it")
    )
    for (kind, values), colour in zip(ms.items(), ("#f59e0b", "#22d3ee", "#818cf8"), strict=True):
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in zip(times, values, strict=True))
        shown.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        shown.append(text(left + 100 * KINDS.index(kind), 58, kind, colour, 14))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<rect width="{width}" height="{height}" rx="16" fill="#0f1729"/>{"".join(shown)}</svg>\n'
    )


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 4})
