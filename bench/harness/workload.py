"""One workload for many systems: the same prompts and the same answers, read with the settings of each."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness.engines import question_of, until_ready
from bench.harness.figures import overlapped_ms
from bench.harness.paired import token_ratios
from core.engine import Engine
from core.engine.texts import Text
from core.errors import MoestroError
from core.measure.evaluate.run import start_mode
from core.memory.link import Pace
from core.metrics import BY_NAME, share, values
from core.policy.allocation.slot_allocation import AllocationProfile
from core.profile import Profile
from core.profile.trace import FileTrace
from core.profile.trace.file import TraceHead, TraceWriter
from core.settings.config import Settings
from core.settings.sampling import Sampling
from core.simulate import BELADY, BELADY_BYPASS, Clock, Config, simulate
from core.types import Ids, StepRecord

PROMPT, ANSWER = 128, 64  # most tokens of a prompt and of an answer
# Metrics of core.metrics that are shown, each per decoded token.
PER_TOKEN = (
    *(
        "total_ms compute_ms predict_ms stall_ms idle_ms copy_ms requests hits late substituted dropped predicted "
        "demand_bytes prefetch_bytes wasted_bytes disk_bytes"
    ).split(),
)
QUALITY = ("exact_match", "unseen_match", "agreement", "kl", "perplexity", "substituted_rate")
Workload = Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Run:
    """The passes of one workload, and the times to first token of its prompts."""

    steps: Sequence[StepRecord]
    ttft_ms: Sequence[float]

    def figures(self) -> dict[str, Any]:
        """Means per decoded token of PER_TOKEN under their names in core.metrics, the hit rate, and whether all was
        exact; "tpot_ms" is total_ms, and compute_ms (of which predict_ms is a part) + stall_ms + idle_ms. "hit_blocks":
        the hit rate by stretches of tokens."""
        decode = [step for step in self.steps if step.phase == "decode"]
        tokens = sum(step.tokens for step in decode)
        found = {name: sum(values(decode, BY_NAME[name])) / tokens for name in PER_TOKEN}
        return {
            "ttft_ms": statistics.median(self.ttft_ms),
            "tpot_ms": found.pop("total_ms"),
            **found,
            "hit_rate": share(decode, "hits", "requests"),
            "hit_blocks": token_ratios(values(decode, BY_NAME["hits"]), values(decode, BY_NAME["requests"])),
            "exact": all(values(self.steps, BY_NAME["exact"])),
            "emulated": any(values(self.steps, BY_NAME["emulated"])),
            "tokens": tokens,
        }


def workload(engine: Engine, texts: Sequence[Text], tokens: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and the exact model's answers to them, until these have `tokens` decoded tokens (all but an answer's
    first). Drawn at temperature 0.7, with another seed each time a prompt comes up again. Raises MoestroError when the
    model answers nothing."""
    found: list[tuple[list[int], list[int]]] = []
    left, asked, barren = tokens, 0, 0
    while left > 0 and barren < len(texts):
        prompt = engine.prompt.tokens(question_of(texts[asked % len(texts)]))[-PROMPT:]
        sampling = Sampling(temperature=0.7, seed=asked, max_new_tokens=min(left, ANSWER) + 1)
        answer = [
            piece.token
            for piece in engine.generate(Ids(prompt), sampling)
            if piece.kind == "token" and piece.token is not None
        ]
        asked, barren = asked + 1, 0 if len(answer) > 1 else barren + 1
        if len(answer) > 1:
            found.append((prompt, answer))
            left -= len(answer) - 1
    if not found:
        raise MoestroError("The model gives no answers to the prompts, so there is nothing to measure.")
    return found


def play(engine: Engine, work: Workload, on_step: Callable[[StepRecord], None] = lambda step: None) -> Run:
    """Reads the workload with the settings in force: every token drawn is the answer's own."""
    steps: list[StepRecord] = []
    ttft_ms = []
    for prompt, answer in work:
        start = len(prompt)

        def drawn(so_far: Sequence[int], logits: torch.Tensor, start: int = start, answer: Any = answer) -> int:
            return int(answer[len(so_far) - start])

        for piece in engine.generate(Ids(prompt), Sampling(max_new_tokens=len(answer)), draw=drawn):
            if piece.step is not None:
                steps.append(piece.step)
                on_step(piece.step)
            if piece.stats is not None:
                ttft_ms.append(piece.stats.ttft_ms)
    return Run(steps, ttft_ms)


def measured(engine: Engine, work: Workload, settings: Settings) -> dict[str, Any]:
    """The figures of one system, beginning with the cache as after a load and a predictor without history. Raises
    MoestroError where its settings are not possible."""
    start_mode(engine, settings)
    until_ready(engine.predictor_host.predictor)
    return {**play(engine, work).figures(), "slots": engine.expert_cache.slots}


def recorded(engine: Engine, work: Workload, path: Path) -> FileTrace:
    """The exact model's routing of the workload, as a trace."""
    shape = engine.shape
    with TraceWriter(
        path, TraceHead(shape.layers, shape.experts, shape.top_k, model=engine.model_name, model_hash=engine.model_hash)
    ) as trace:
        play(engine, work, trace.add)
    return FileTrace(path)


def clock_of(profile: Profile, resident_ms: float, load_ms: float) -> Clock:
    """The model's measured times, with a token that takes `resident_ms` where everything is resident."""
    assert profile.times is not None
    times = profile.times
    head_ms = min(times["head"], resident_ms)
    expert_ms = min(times["moe"] / profile.top_k, (resident_ms - head_ms) / profile.layers / profile.top_k)
    return Clock(compute_ms=resident_ms, load_ms=load_ms, expert_ms=expert_ms, head_ms=head_ms)


def bounds(
    trace: FileTrace,
    slots: int,
    usual: tuple[float, ...],
    resident_ms: float | None,
    pace: Pace,
    blob_bytes: int,
    clock: Clock | None,
) -> dict[str, dict[str, float | None]]:
    """What no system can beat with that many slots on this routing. Belady's hit rate with slots of each layer, where
    every missing expert takes a slot ("belady"), where some slots are set aside for what is not kept
    ("belady_bypass"), and with one pool for all layers ("belady_global"), all from a filled cache, with the time per
    token of their misses without prefetching; the fewest of these copies, hidden behind computing as far as the link
    allows ("perfect_prefetch"); everything resident ("resident"). None where it is not known, or there are too few
    slots for it."""
    least, aside = trace.top_k * trace.layers, trace.top_k
    configs = {
        name: config
        for name, need, config in (
            ("belady", least, Config(BELADY, slots, "layer", usual=usual)),
            ("belady_bypass", least + aside, Config(BELADY_BYPASS, slots, "layer", usual=usual, transit=aside)),
            ("belady_global", aside, Config(BELADY, slots, "global", usual=usual)),
        )
        if need <= slots < trace.layers * trace.experts
    }
    results = simulate(trace, list(configs.values()), start="filled", clock=clock, processes=1)
    found: dict[str, dict[str, float | None]] = {
        name: {"hit_rate": one.hit_rate, "misses": one.misses_per_token, "tpot_ms": one.tpot_ms}
        for name, one in zip(configs, results, strict=True)
    }
    misses = [one.misses_per_token for one in results if one.misses_per_token is not None]
    perfect = overlapped_ms(resident_ms, min(misses), blob_bytes, pace) if misses and resident_ms is not None else None
    return {
        **{name: {"hit_rate": None, "misses": None, "tpot_ms": None} for name in NAMES if name not in found},
        **found,
        "perfect_prefetch": {"tpot_ms": perfect},
        "resident": {"tpot_ms": resident_ms},
    }


NAMES = ("belady", "belady_bypass", "belady_global")


def usual(profile: AllocationProfile) -> tuple[float, ...]:
    """How often the profile saw each expert, by eid; a fresh cache is filled with those seen most."""
    return () if profile.counts is None else tuple(map(float, profile.counts.ravel().tolist()))


def median_round(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the round with the (lower) median time per token; its time to first token is the median over the
    rounds. `tpot_rounds_ms` and `ttft_rounds_ms` have every round's times. A system that
    could not run has its `problem` alone."""
    ran = sorted((row for row in rows if "tpot_ms" in row), key=lambda row: row["tpot_ms"])
    if not ran:
        return {"problem": next((str(row["problem"]) for row in rows if row.get("problem")), "it was not measured")}
    middle = ran[(len(ran) - 1) // 2]
    return {
        **{name: value for name, value in middle.items() if name not in ("round", "budget", "system")},
        "ttft_ms": statistics.median(row["ttft_ms"] for row in ran),
        **{
            f"{name}_rounds_ms": [row[f"{name}_ms"] for row in sorted(ran, key=lambda row: row["round"])]
            for name in ("tpot", "ttft")
        },
        "problem": "",
    }


def judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of quality in a kept row."""
    return {name: row[name] for name in (*QUALITY, "questions", "positions", "problem")}
