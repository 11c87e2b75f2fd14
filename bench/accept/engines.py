"""Checks of `launch.py accept` on whole engines: the same bits, speed, memory, one model in the place of another."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from bench.accept.drawn import FORMAT, Subject, dense_only, one_expert
from bench.accept.link import Wrong
from bench.models.generate import checkpoint
from core.capacity.free_memory import free_bytes
from core.engine import Engine
from core.errors import BudgetError, ModelError
from core.memory.codec.kernels import lacking, launched_by, notice
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord

STRESS_S = 240.0
STRESS_PROMPTS = (40, 100, 200, 400)  # tokens; experts of few and of many rows are computed by different products
STRESSED = [(p, s) for p in ("none", "gate", "previous_token", "all_next") for s in ("layer", "global")]
FEW = "20%"  # of the experts, and what that becomes while it answers
MOVES = ("40%", "15%", FEW)
SPEEDS: tuple[tuple[str, dict[str, object]], ...] = (
    ("all", {"budget": "all", "eviction": "lru", "predictor": "none"}),
    ("35%", {"budget": "35%", "eviction": "lru", "predictor": "none"}),
    ("35%_gate", {"budget": "35%", "eviction": "lru", "predictor": "gate"}),
    ("35%_ondemand", {"budget": "35%", "eviction": "none", "predictor": "none"}),
    ("15%", {"budget": "15%", "eviction": "lru", "predictor": "none"}),
    ("15%_ondemand", {"budget": "15%", "eviction": "none", "predictor": "none"}),
)
GOAL_MS = 16.0  # a token of the largest model with all experts on a GPU of the H100's class
DISTINCT = 64  # tokens that texts are made of, so that routing repeats itself


def load(model: str, device: torch.device, context: int, settings: dict[str, object], **choices: object) -> Engine:
    """An engine whose answers do not end by themselves, and whose tokens are led by the host unless `settings` say."""
    settings = {"gpu_decode": "host", **settings}
    choices = {"format": FORMAT, "dtype": "bfloat16", **choices}
    spec = LoadSpec.checked(model, Settings(settings), device=device.type, context=context, **choices)
    engine = Engine.load(spec)
    engine.prompt.ends = set()
    return engine


@dataclass(slots=True)
class Text:
    """Says given tokens, whatever is likeliest, and keeps the logits [V] before each, fp32, if `keep`."""

    tokens: Sequence[int]
    keep: bool = False
    logits: list[torch.Tensor] = field(default_factory=list)
    _said: int = 0

    def __call__(self, ids: Sequence[int], logits: torch.Tensor) -> int:
        if self.keep:
            self.logits.append(logits[0].float().cpu())
        else:
            int(logits.argmax())  # as sampling would wait for it
        self._said += 1
        return self.tokens[(self._said - 1) % len(self.tokens)]


def drawn(count: int, vocab: int, seed: int) -> list[int]:
    """Tokens out of DISTINCT ones."""
    random = torch.Generator().manual_seed(seed)
    some = torch.randint(2, vocab, (DISTINCT,), generator=torch.Generator().manual_seed(7))
    return [int(id) for id in some[torch.randint(0, DISTINCT, (count,), generator=random)]]


def talk(engine: Engine, vocab: int, tokens: int, prompt: int = 100) -> list[StepRecord]:
    """The decode steps of an answer."""
    text = Text(drawn(tokens + 1, vocab, 1))
    pieces = engine.generate(Ids(drawn(prompt, vocab, 2)), Sampling(max_new_tokens=tokens), draw=text)
    return [piece.step for piece in pieces if piece.step is not None and piece.step.phase == "decode"]


def stress(subject: Subject, seconds: float = STRESS_S) -> dict[str, Any]:
    """A copy that races with computing shows as other bits: logits with few slots, prefetchers and moving budgets
    against those with every expert in its slot, after prompts of several lengths."""
    model = str(checkpoint(subject.folder, subject.different))
    vocab, length = subject.different.vocab, 24 if subject.small else 160
    said = drawn(length, vocab, 4)

    def logits(prompt: int, settings: dict[str, object], moved: Callable[[Engine, int], object]) -> torch.Tensor:
        engine = load(model, subject.device, 1024, settings)
        try:
            text, at = Text(said, keep=True), 0
            ids = Ids(drawn(prompt, vocab, 3))
            for piece in engine.generate(ids, Sampling(max_new_tokens=length), draw=text):
                if piece.kind == "token":
                    moved(engine, at)
                    at += 1
            engine.expert_cache.check_integrity()
            return torch.stack(text.logits)
        finally:
            engine.unload()

    def move(engine: Engine, at: int) -> None:
        if at % 17 == 5:
            engine.change({"budget": MOVES[at // 17 % len(MOVES)]})

    want, until, runs = dict[int, torch.Tensor](), time.monotonic() + seconds, 0
    while not runs or (time.monotonic() < until and not subject.small):
        for predictor, scope in STRESSED:
            prompt = STRESS_PROMPTS[runs % len(STRESS_PROMPTS)]
            if prompt not in want:
                want[prompt] = logits(prompt, {"budget": "all"}, lambda engine, at: None)
            got = logits(prompt, {"budget": FEW, "predictor": predictor, "scope": scope, "eviction": "lru"}, move)
            if not torch.equal(got, want[prompt]):
                first = int((got != want[prompt]).any(1).nonzero()[0])
                most = float((got - want[prompt]).abs().max())
                raise Wrong(
                    f"{predictor}, {scope}, a prompt of {prompt} tokens: other logits from pass {first} on, by "
                    f"{most:.3g} at most"
                )
            runs += 1
    return {"runs": runs, "passes": runs * length}


def speed(subject: Subject, tokens: int = 64) -> dict[str, Any]:
    """Milliseconds a token by budget, predictor and policy; what one token launches."""
    sizes, count, ways = subject.sizes, 8 if subject.small else tokens, dict(SPEEDS)
    found = subject.report()
    found["model"] = sizes.name
    with one_expert(sizes):
        model = str(dense_only(subject.folder, sizes))
        engine = load(model, subject.device, 2048, {"budget": "15%"})
    try:
        began_s = time.perf_counter()
        talk(engine, sizes.vocab, 4)
        found["first_answer_s"] = time.perf_counter() - began_s
        for name in found.in_time(ways):
            try:
                engine.change(ways[name])
            except BudgetError as error:
                found[name] = {"left_out": str(error)}
                continue
            talk(engine, sizes.vocab, count)  # what there is room for comes to be where it is used
            found[name] = _figures(talk(engine, sizes.vocab, count)[count // 8 :])
            if name == "all":
                found["launches"] = _launches(engine, sizes.vocab)
    finally:
        engine.unload()
    found["all_ms"] = found["all"].get("ms", found["all"].get("left_out"))
    found["goal"] = f"{GOAL_MS:.0f} ms with qwen3-30b-a3b on an H100"
    return found


def _figures(steps: Sequence[StepRecord]) -> dict[str, float]:
    ms, requests = statistics.median(step.total_ms for step in steps), sum(step.requests for step in steps)
    return {
        "ms": ms,
        "tokens_per_s": 1e3 / ms,
        "stall_ms": statistics.median(step.stall_ms for step in steps),
        "predict_ms": statistics.median(step.predict_ms for step in steps),
        "hit_rate": sum(step.hits for step in steps) / max(1, requests),
        "demand_mb": sum(step.demand_bytes for step in steps) / len(steps) / 1e6,
        "prefetch_mb": sum(step.prefetch_bytes for step in steps) / len(steps) / 1e6,
    }


def _launches(engine: Engine, vocab: int) -> dict[str, Any]:
    """Of one pass: kernels launched, milliseconds that the GPU is busy, and what takes most of them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        passes = len(talk(engine, vocab, 6, prompt=8)) + 1
    rows: list[Any] = list(profiled.key_averages())
    kernels = sorted((row for row in rows if not row.key.startswith("aten::")), key=lambda row: -_busy_us(row))
    return {
        "a_pass": sum(row.count for row in rows if "LaunchKernel" in row.key) / passes,
        "busy_ms": sum(map(_busy_us, kernels)) / passes / 1e3,
        "most": {row.key[:80]: round(_busy_us(row) / passes / 1e3, 4) for row in kernels[:12] if _busy_us(row)},
    }


def _busy_us(row: Any) -> float:
    return float(getattr(row, "self_device_time_total", 0.0))


def memory(subject: Subject) -> dict[str, Any]:
    """What torch reserves beyond what the budget allows, with dense layers as stored and rounded, and what unloading
    leaves."""
    sizes, device, found = subject.sizes, subject.device, subject.report()
    model = str(dense_only(subject.folder, sizes))
    for dense in ("checkpoint", "int4-g64"):
        free, before = free_bytes(device)[0], torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            with one_expert(sizes):
                engine = load(model, device, 2048, {"budget": "35%"}, dense=dense)
        except ModelError as error:  # without Triton layers cannot be rounded
            if dense == "checkpoint":
                raise
            found[dense] = {"left_out": str(error)}
            continue
        peak = torch.cuda.max_memory_reserved(device)
        try:
            steps = talk(engine, sizes.vocab, 8)
            said = engine.memory()
            reserved = torch.cuda.memory_reserved(device)
            one = found[dense] = {
                "budget_gb": said.budget / 1e9,
                "said_gb": said.used / 1e9,
                "slots_gb": said.experts / 1e9,
                "reserved_gb": reserved / 1e9,
                "allocated_gb": torch.cuda.memory_allocated(device) / 1e9,
                "most_while_loading_gb": peak / 1e9,
                "gone_from_the_card_gb": (free - free_bytes(device)[0]) / 1e9,
                "not_pinned_gb": said.unpinned / 1e9,
            }
        finally:
            engine.unload()
        one["card_lacks_after_unload_gb"] = (free - free_bytes(device)[0]) / 1e9
        one["host_available_gb"] = psutil.virtual_memory().available / 1e9
        if over := [step for step in steps if step.device_bytes > step.budget_bytes]:
            raise Wrong(f"dense {dense}: {over[0].device_bytes} bytes of a budget of {over[0].budget_bytes}: {found}")
        if reserved > said.used:
            raise Wrong(f"dense {dense}: {reserved} bytes are reserved, and {said.used} said to be in use: {found}")
        if (left := torch.cuda.memory_reserved(device)) > before:
            raise Wrong(f"dense {dense}: {left - before} bytes are left after unloading: {found}")
        del engine
    return found


def swap(subject: Subject) -> dict[str, Any]:
    """A model in the place of another one, with too little room for both."""
    model = str(dense_only(subject.folder, subject.sizes))
    with one_expert(subject.sizes):
        engine = load(model, subject.device, 2048, {"budget": "35%"})
        used = engine.memory().used
        engine.unload()
        spare = free_bytes(subject.device)[0] - used - max(1 << 30, used // 10)
        ballast = torch.empty(max(0, 0 if subject.small else spare), dtype=torch.uint8, device=subject.device)
        try:
            again = load(model, subject.device, 2048, {"budget": "35%"})
        except BudgetError as error:
            raise Wrong(f"after unloading there is no room for the same model: {error}") from None
        talk(again, subject.sizes.vocab, 4)
        again.unload()
    return {"used_gb": used / 1e9, "taken_by_others_gb": ballast.nbytes / 1e9}


def no_compiler(subject: Subject) -> dict[str, Any]:
    """Without a C compiler the engine answers: with the kernels, launched through the driver, or it says why not."""
    if not lacking():
        raise Wrong("Triton finds a C compiler where there was to be none")
    said = notice(subject.device)
    engine = load(str(checkpoint(subject.folder, subject.different)), subject.device, 256, {"budget": "50%"})
    try:
        by_kernels = all(one.grouped is not None for one in engine.wiring.math)
        if not by_kernels and not said:
            raise Wrong("experts are computed without the kernels, for the reason that the log says")
        steps = talk(engine, subject.different.vocab, 8)
    finally:
        engine.unload()
    by = launched_by(subject.device) if by_kernels else "nothing"
    return {"said": said, "launched_by": by, "ms": statistics.median(step.total_ms for step in steps)}
