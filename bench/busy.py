"""bench busy: what a machine that is never idle costs: first tokens and further ones beside other programs.

One engine answers the same prompts with the machine to itself and beside as many endless loops as there are processors,
each with what gives processors up while others want them (`core.native.contention`) and without it, by turns. Two
programs that share a processor fairly have half of it each, so about twice the idle time is what can be had.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any

import torch

from bench.subject import subject
from core.calibrate.texts import bundled, tokenize
from core.engine import Engine
from core.native.contention import watch
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import AnswerStats, Ids

PROMPT, TOKENS = 64, 48  # tokens of a prompt and of an answer
BESIDE, IDLE = 2.2, 1.02  # goals: beside others over idle; idle with the watch over idle without it
SETTLE_S, CALM_S = 0.5, 30.0  # after loops begin; at most, until what saw them has forgotten them
LOOP = "while True: pass"
KINDS = ("idle without", "idle", "beside without", "beside")
FIGURES = ("ttft_ms", "tpot_ms")


def run(
    model: str = "demo",
    budget: str = "100%",
    rounds: int = 9,
    tokens: int = TOKENS,
    small: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = of an answer."""
    rounds, tokens = (1, 4) if small else (rounds, tokens)
    settings = Settings({"budget": budget, "link": "own"})
    engine = Engine.load(LoadSpec.checked(model, settings, context=PROMPT + tokens))
    engine.prompt.ends = set()  # every answer has the same number of tokens
    texts = (tokenize(engine.prompt.tokenizer, text).ids.tolist() for text in bundled(model))
    words = chain.from_iterable(texts)
    seen: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in FIGURES} for kind in KINDS}
    try:
        for number in range(rounds + 1):  # round 0 is warm-up and discarded
            say(f"round {number} of {rounds}" if number else "warming up")
            prompt = list(islice(words, PROMPT))
            for kind in KINDS if number % 2 else KINDS[::-1]:
                with _as_in(kind):
                    if kind == "idle":
                        _forget_others(engine, prompt)
                    stats = _answered(engine, prompt, tokens)
                for name in FIGURES if number else ():
                    seen[kind][name].append(getattr(stats, name))
        return {
            **{kind: {name: _spread(values) for name, values in of.items()} for kind, of in seen.items()},
            "ratios": _ratios(seen),
            "goals": {"beside": BESIDE, "idle": IDLE},
            "rounds": rounds,
            "prompt_tokens": PROMPT,
            "tokens": tokens,
            "budget": budget,
            "loops": os.cpu_count(),
            "threads": torch.get_num_threads(),
            **subject(engine),
        }
    finally:
        engine.unload()


@contextmanager
def _as_in(kind: str) -> Iterator[None]:
    """Inside, other programs run or not, and the watch looks for them or not."""
    with ExitStack() as stack:
        if kind.endswith("without"):
            stack.enter_context(_unwatched())
        if kind.startswith("beside"):
            stack.enter_context(_loops())
        yield


@contextmanager
def _loops() -> Iterator[None]:
    """Inside, a program that never waits runs for each processor."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


@contextmanager
def _unwatched() -> Iterator[None]:
    """Inside, threads wait as if nobody else wanted their processor."""
    vars(watch)["computing"] = lambda: None
    try:
        while watch.looks:  # it ends by itself, and waits are what they were
            time.sleep(0.05)
        yield
    finally:
        del vars(watch)["computing"]


def _forget_others(engine: Engine, prompt: list[int]) -> None:
    """Answer until the loops of the round before are forgotten: the time until then is not one of an idle machine."""
    end = time.monotonic() + CALM_S
    _answered(engine, prompt, 1)
    while watch.contended and time.monotonic() < end:
        _answered(engine, prompt, TOKENS)


def _answered(engine: Engine, prompt: list[int], tokens: int) -> AnswerStats:
    *_, end = engine.generate(Ids(prompt), Sampling(temperature=0.0, max_new_tokens=tokens))
    assert end.stats is not None
    return end.stats


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _ratios(seen: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds of one kind's figure over another's, which was taken in the same round."""
    return {
        f"{kind} over {other}": {
            name: statistics.median(a / b for a, b in zip(seen[kind][name], seen[other][name], strict=True))
            for name in FIGURES
        }
        for kind, other in (("beside", "idle"), ("beside without", "idle without"), ("idle", "idle without"))
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as text."""
    r = result
    lines = [
        f"{r['model']} at {r['budget']}: prompts of {r['prompt_tokens']} tokens, answers of {r['tokens']}; medians of "
        f"{r['rounds']} rounds (least to most)",
        f"  {'':16s}{'first token, ms':>28s}{'each further token, ms':>28s}",
    ]
    for kind in KINDS:
        spans = (f"{s['median']:.1f} ({s['least']:.1f} to {s['most']:.1f})" for s in (r[kind][n] for n in FIGURES))
        lines.append(f"  {kind:16s}" + "".join(f"{span:>28s}" for span in spans))
    for name, of in r["ratios"].items():
        goal = {"beside over idle": BESIDE, "idle over idle without": IDLE}.get(name)
        said = f"  goal <= {goal:g}" if goal else ""
        lines.append(f"  {name:38s}" + "  ".join(f"{of[figure]:.3f}" for figure in FIGURES) + said)
    lines.append(f"  beside {r['loops']} endless loops; without: waits as if nobody else wanted the processor")
    return "\n".join(lines)
