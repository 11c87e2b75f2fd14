"""bench batch: how many more tokens a second do prompts give that are answered together?

The same engine answers prompts of one length, each with the same number of tokens, 1 to 32 of them at a time: with a
part of the experts resident, over an emulated link and out of a pack on disk. Tokens a second count the reading of the
prompts. transformers answers the same batches with everything resident. What a batch can gain is bounded by the experts
that its tokens share, so that the union of their experts, and the bytes copied for a token, stand beside each figure,
and beside the goal the most that any cache and any prefetcher could gain, and what the link would allow with the copies
of the measured cache that made the fewest.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.batch_accuracy import READ, measure
from bench.batch_table import table
from bench.generate import FULL, SMALL, checkpoint
from bench.subject import subject
from core.calibrate.texts import bundled, tokenize
from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.hf.files import model_path
from core.importing import import_model
from core.memory.link import scaled_gbps
from core.memory.pack import pack_at
from core.metrics import reduced
from core.policy.batching import NoScheduler, RandomScheduler, Scheduler, TokenScheduler
from core.session.batch_request import BatchRequest
from core.session.loading import own_memory
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord

__all__ = ["run", "table"]

GENERATED = "generated"
SIZES = (1, 4, 8, 16, 32)
PROMPT = 48  # tokens
SHARES = ("100%", "50%", "25%")
DISK, LINK = "disk", "link"
LATENCY_US = 10.0
GOAL = 6.0  # tokens a second of 16 at a time over those of one, with half of the experts resident
PLAIN: dict[str, object] = {
    "eviction": "lru",
    "scope": "layer",
    "predictor": "none",
    "bypass": False,
    "pins": "",
    "prefetch_beside": False,
    "predictor.floor": 0.0,
}
BYPASS = {**PLAIN, "eviction": "lfu", "bypass": True}
CACHES: dict[str, dict[str, object]] = {  # compared at half of the experts
    "lru": PLAIN,
    "lru, one pool": {**PLAIN, "scope": "global"},
    "lfu, bypass": BYPASS,
    "lfu, ahead": {**BYPASS, "predictor": "gate", "predictor.floor": 0.8},
    "lfu, beside": {**BYPASS, "predictor": "gate", "predictor.floor": 0.8, "prefetch_beside": True},
    "plec": {**PLAIN, "eviction": "plec", "scope": "global", "predictor": "gate", "prefetch_guard": False},
}

NETWORK: dict[str, object] = {**CACHES["plec"], "predictor": "routing_path"}
SCHEDULERS: dict[str, Callable[[], Scheduler] | None] = {
    "one batch": None,
    "none": NoScheduler,
    "random": RandomScheduler,
    "similarity": TokenScheduler,
}


@dataclass(frozen=True, slots=True)
class Work:
    """The prompts, as token ids, and how many tokens each answer has."""

    prompts: Sequence[Sequence[int]]
    tokens: int

    def first(self, count: int) -> list[list[int]]:
        """So many of the prompts."""
        return [list(ids) for ids in self.prompts[:count]]


def run(
    keep: Path,
    model: str = "demo",
    rounds: int = 3,
    tokens: int = 32,
    small: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures; returns the result as plain data. `keep` = the folder for a generated model and the packs; `tokens` =
    tokens of an answer."""
    sizes = SIZES[:2] if small else SIZES
    rounds, tokens = (1, 4) if small else (rounds, tokens)
    if model == GENERATED:
        model = str(checkpoint(keep, SMALL if small else FULL, say=say))
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        pack = (keep if model != "demo" else Path(made)) / f"{Path(model).name}.whole1.pack"
        if not pack_at(pack):
            say(f"importing {pack.name}")
            import_model(model, pack)
        engines = {
            name: _load(stack, name, path, host, max(sizes), tokens, say)
            for name, path, host in ((LINK, model, "auto"), (DISK, str(pack), "none"))
        }
        work = _work(engines[LINK], model, max(sizes), tokens)
        emulated = _emulated(engines[LINK], work)
        found: dict[str, Any] = {LINK: {}, DISK: {}}
        for name, engine in engines.items():
            for share in SHARES:
                settings = {**PLAIN, "budget": share, **(emulated if name == LINK else {"link": "own"})}
                found[name][share] = _sizes(engine, settings, work, sizes, rounds, f"{name} {share}", say)
        settings = {"budget": "50%", **emulated}
        found["caches"] = {
            name: _sizes(engines[LINK], {**one, **settings}, work, sizes, rounds, name, say)
            for name, one in CACHES.items()
        }
        found["schedulers"] = _schedulers(engines[LINK], {**PLAIN, **settings}, work, SCHEDULERS, rounds, say)
        if model == "demo":  # elsewhere the network would take longer to train than all of this
            say("training the network")
            texts, batches = bundled(model)[: 8 if small else None], [n for n in sizes if n > 1]
            found["accuracy"] = measure(engines[LINK], texts, work.prompts, tokens, batches, 600 if small else READ)
            network = {**settings, **NETWORK}
            found["caches"]["plec, network"] = _sizes(engines[LINK], network, work, sizes, rounds, "plec, network", say)
            ours = {"none, network": NoScheduler, "similarity, network": TokenScheduler}
            found["schedulers"] |= _schedulers(engines[LINK], network, work, ours, rounds, say)
        about = {**subject(engines[LINK]), "link_gbps": emulated["link_gbps"]}
    say("transformers")
    plain = _transformers(model, work, sizes, rounds)
    half, most = found[LINK]["50%"], str(max(s for s in sizes if s <= 16))
    one, resident = half["1"]["tok_s"], found[LINK]["100%"][most]["tok_s"]
    caches = found["caches"]
    frugal = min(caches, key=lambda name: caches[name][most]["bytes_per_token"])
    quickest = max(caches, key=lambda name: caches[name][most]["tok_s"])
    fewest, least = caches[frugal][most]["bytes_per_token"], half[most]["least_bytes_per_token"]
    return {
        **about,
        **found,
        "transformers": plain,
        "gain": half[most]["tok_s"] / one,
        "quickest": quickest,
        "gain_quickest": caches[quickest][most]["tok_s"] / one,
        "gain_bound": _fastest(least, resident, emulated["link_gbps"]) / one,
        "gain_frugal": _fastest(fewest, resident, emulated["link_gbps"]) / one,
        "frugal": frugal,
        "goal": GOAL,
        "prompt_tokens": PROMPT,
        "tokens": tokens,
        "rounds": rounds,
        "sizes": list(sizes),
    }


def _fastest(copied: float, resident_tok_s: float, gbps: float) -> float:
    """Tokens a second that nobody passes who copies so many bytes for each: as with everything resident, or as fast as
    the link brings these."""
    return min(resident_tok_s, gbps * 1e9 / max(copied, 1.0))


def _load(
    stack: ExitStack, name: str, path: str, host: str, most: int, tokens: int, say: Callable[[str], None]
) -> Engine:
    say(f"loading {Path(path).name} for {name}")
    settings = Settings({**PLAIN, "budget": "all", "link": "own", "telemetry": True})
    spec = LoadSpec.checked(path, settings, context=PROMPT + tokens + 16, sequences=most, host=host)
    engine = Engine.load(spec)
    stack.callback(engine.unload)
    engine.prompt.ends = set()  # every answer has the same number of tokens
    return engine


def _work(engine: Engine, model: str, most: int, tokens: int) -> Work:
    """Prompts out of the bundled texts, one after the other."""
    texts = (tokenize(engine.prompt.tokenizer, text).ids.tolist() for text in bundled(model))
    ids = (token for text in texts for token in text)
    return Work([list(islice(ids, PROMPT)) for _ in range(most)], tokens)


def _emulated(engine: Engine, work: Work) -> dict[str, Any]:
    """A link whose copy of an expert takes as many layers of this machine as on the reference machine."""
    steps = _answered(engine, work.first(1), work.tokens, 1)[1]
    layer_ms = median(s.total_ms for s in steps if s.phase == "decode") / engine.shape.layers
    gbps = scaled_gbps(layer_ms, engine.sizes.blob, LATENCY_US)
    return {"link": "emulated", "link_gbps": gbps, "link_latency_us": LATENCY_US}


def _sizes(
    engine: Engine,
    settings: Mapping[str, object],
    work: Work,
    sizes: Sequence[int],
    rounds: int,
    name: str,
    say: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """By batch size: the medians of some rounds, sizes by turns."""
    engine.change(settings)
    rows: dict[str, list[dict[str, float]]] = {str(size): [] for size in sizes}
    for number in range(rounds + 1):  # the first is warm-up and discarded
        say(f"{name}: round {number} of {rounds}" if number else f"{name}: warming up")
        for size in sizes if number else sizes[-1:]:
            row = _row(engine, work, size)
            if number:
                rows[str(size)].append(row)
    return {size: {key: median(one[key] for one in found) for key in found[0]} for size, found in rows.items()}


def _schedulers(
    engine: Engine,
    settings: Mapping[str, object],
    work: Work,
    schedulers: Mapping[str, Callable[[], Scheduler] | None],
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Two batches of half of the prompts each, by what divides them; None: all of them as one batch."""
    engine.change(settings)
    half = len(work.prompts) // 2
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in schedulers}
    for number in range(rounds + 1):
        say(f"schedulers: round {number} of {rounds}" if number else "schedulers: warming up")
        for name, found in rows.items():
            make, times = schedulers[name], engine.batching.regrouped
            times.clear()
            row = _row(engine, work, half if make else 2 * half, make() if make else None)
            row["scheduled_ms"] = median(one.ms for one in times) if times else 0.0
            if number:
                found.append(row)
    return {name: {key: median(one[key] for one in found) for key in found[0]} for name, found in rows.items()}


def _row(engine: Engine, work: Work, size: int, scheduler: Scheduler | None = None) -> dict[str, float]:
    """The figures of answering prompts, so many at a time: all of them once, or a few one by one; with a `scheduler`
    two batches of so many."""
    prompts = work.first(max(size, 4) if scheduler is None else 2 * size)
    seconds, steps = _answered(engine, prompts, work.tokens, size, scheduler)
    decode = [step for step in steps if step.phase == "decode"]
    figures, generated, layers = reduced(steps), len(prompts) * work.tokens, engine.shape.layers
    copied = sum(step.demand_bytes + step.prefetch_bytes for step in steps)
    lacking = sum(max(0, len(step.expert) - engine.expert_cache.slots) for step in decode)  # if all slots were of use
    return {
        "tok_s": generated / seconds,
        "pass_ms": median(step.total_ms for step in decode),
        "prefill_share": sum(step.total_ms for step in steps if step.phase == "prefill") / 1e3 / seconds,
        "stall_share": sum(step.stall_ms for step in steps) / 1e3 / seconds,
        "union": sum(len(step.expert) for step in decode) / layers / len(decode),
        "tokens_per_expert": sum(step.tokens for step in decode) * engine.shape.top_k * layers
        / sum(len(step.expert) for step in decode),
        "hit_rate": float(figures["hit_rate"] or 0.0),
        "bytes_per_token": copied / generated,
        "least_bytes_per_token": lacking * engine.sizes.blob / generated,
    }  # fmt: skip


def _answered(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, size: int, scheduler: Scheduler | None = None
) -> tuple[float, list[StepRecord]]:
    """Seconds, and the passes that it took."""
    sampling, steps = Sampling(max_new_tokens=tokens, temperature=0.0), dict[int, StepRecord]()
    began_s = time.perf_counter()
    requests = [BatchRequest(n, Ids(ids), sampling) for n, ids in enumerate(prompts)]
    for one in engine.generate_many(requests, size, scheduler=scheduler):
        if one.piece is not None and one.piece.step is not None:
            steps[one.piece.step.index] = one.piece.step
    return time.perf_counter() - began_s, list(steps.values())


@torch.inference_mode()
def _transformers(model: str, work: Work, sizes: Sequence[int], rounds: int) -> dict[str, float]:
    """Tokens a second of transformers' own grouped_mm, all resident, prompts counted; of each size the same prompts."""
    plain = AutoModelForCausalLM.from_pretrained(model_path(model), experts_implementation="grouped_mm").eval()
    own_memory(plain)
    found: dict[str, float] = {}
    for size in sizes:
        spans = [_plain_s(plain, work, size) for _ in range(rounds + 1)][1:]
        found[str(size)] = max(size, 4) * work.tokens / median(spans)
    return found


def _plain_s(plain: Any, work: Work, size: int) -> float:
    prompts, began_s = work.first(max(size, 4)), time.perf_counter()
    for at in range(0, len(prompts), size):
        cache, ids = DynamicCache(config=plain.config), torch.tensor(prompts[at : at + size])
        for _ in range(work.tokens):
            logits = cached_pass(plain, ids, cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
    return time.perf_counter() - began_s
