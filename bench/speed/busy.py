"""bench busy: what first and further tokens cost on a machine that is never idle.

One engine answers the same prompts alone on the machine, and while as many endless loops run as there are processors;
each with the code that gives processors up while other programs want them (`core.system.native.contention`) and without
it, by turns. Two programs that share a processor fairly have half of it each, so about twice the idle time is the best
that can be had.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice

from bench.harness.engines import stats_of, token_stream
from bench.harness.figures import ratio, spread
from bench.harness.report import grid
from bench.harness.run import Result, Run, Suite
from core.engine import Engine
from core.system.native.contention import LOOK_S, watch
from core.types import AnswerStats

PROMPT = 64  # tokens of a prompt
BESIDE, IDLE = 2.2, 1.02  # goals: with loops over idle; idle with the watch over idle without it
SETTLE_S, CALM_S = 0.5, 30.0  # after loops begin; at most, until the watch has seen or forgotten them
LOOP = "while True: pass"
KINDS = ("idle without", "idle", "beside without", "beside")
FIGURES = ("ttft_ms", "tpot_ms")
GOALS = {("beside", "idle"): BESIDE, ("beside without", "idle without"): None, ("idle", "idle without"): IDLE}


def measure(run: Run, model: str = "demo", budget: str = "100%", rounds: int = 9, tokens: int = 48) -> Result:
    """`tokens` = of an answer."""
    settings = {"budget": budget, "link": "own"}
    engine = run.engine(model, settings, endless=True, context=PROMPT + tokens)
    stream = token_stream(engine)
    prompts = [list(islice(stream, PROMPT)) for _ in range(rounds + 1)]

    def answered(kind: str, number: int) -> AnswerStats:
        with _as_in(kind):
            if watch.enabled:
                _until(kind == "beside", engine, prompts[number], tokens)
            return stats_of(engine, prompts[number], tokens)

    found = run.by_turns(KINDS, answered, rounds)
    seen = {kind: {name: [getattr(one, name) for one in of] for name in FIGURES} for kind, of in found.items()}
    return {
        **{kind: {name: spread(values) for name, values in of.items()} for kind, of in seen.items()},
        "ratios": ratios(seen),
        "goals": {"beside": BESIDE, "idle": IDLE},
        "prompt_tokens": PROMPT,
        "loops": os.cpu_count(),
    }


@contextmanager
def _as_in(kind: str) -> Iterator[None]:
    """Inside, other programs run or not, and the watch looks for them or not."""
    with ExitStack() as stack:
        if kind.endswith("without"):
            stack.enter_context(unwatched())
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
def unwatched() -> Iterator[None]:
    """Inside, threads wait as if no other program wanted their processor."""
    watch.enabled = False
    try:
        time.sleep(2 * LOOK_S)
        watch.look()
        yield
    finally:
        watch.enabled = True


def _until(contended: bool, engine: Engine, prompt: list[int], tokens: int) -> None:
    """Answers until the watch has seen that loops run, or no longer do: what it found counts for the next answer."""
    end = time.monotonic() + CALM_S
    stats_of(engine, prompt, 1)
    while watch.contended != contended and time.monotonic() < end:
        stats_of(engine, prompt, tokens)


def ratios(seen: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float | None]]:
    """Medians over the rounds of one kind's figure over another's of the same round."""
    return {
        f"{kind} over {other}": {name: ratio(seen[kind][name], seen[other][name]) for name in FIGURES}
        for kind, other in GOALS
    }


def table(r: Result) -> list[str]:
    spans = {
        kind: [
            f"{one['median']:.1f} ({one['least']:.1f} to {one['most']:.1f})" for one in (r[kind][n] for n in FIGURES)
        ]
        for kind in KINDS
    }
    goals = {f"{kind} over {other}": f"goal <= {goal:g}" if goal else "" for (kind, other), goal in GOALS.items()}
    return [
        f"{r['model']} at {r['budget']}: prompts of {r['prompt_tokens']} tokens, answers of {r['tokens']}; medians of "
        f"{r['rounds']} rounds (least to most)",
        *grid(("", "first token, ms", "each further token, ms"), [(kind, *spans[kind]) for kind in KINDS]),
        *grid(
            ("", "", "", ""),
            [(name, *(f"{of[f]:.3f}" for f in FIGURES), goals[name]) for name, of in r["ratios"].items()],
        ),
        f"  beside {r['loops']} endless loops; without: waits as if no other program wanted the processor",
    ]


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 4})
