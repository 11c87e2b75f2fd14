"""bench batch: how many more tokens a second do prompts give that are answered together?

The same engine answers prompts of one length, each with the same number of tokens, 1 to 32 of them at a time: with a
part of the experts resident, over an emulated link and out of a pack on disk. Tokens a second count the reading of the
prompts. transformers answers the same batches with everything resident. What a batch can gain is bounded by the experts
that its tokens share, so each figure comes with the union of their experts and the bytes copied for a token, and the
goal with the most that any cache and any prefetcher could gain, and with what the link would allow with the copies of
the measured cache that made the fewest."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.harness.engines import READ, emulated_link, model_of, pack_of, token_stream
from bench.harness.figures import medians
from bench.harness.paired import ratios
from bench.harness.run import Result, Run, Suite
from bench.speed.batch_result import PLACES, table
from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.engine.loading import own_memory
from core.engine.texts import bundled
from core.hf.cached_pass import cached_pass
from core.hf.files import model_path
from core.measure.calibrate.gather import calibrate
from core.metrics import reduced
from core.policy.batching import NoScheduler, RandomScheduler, Scheduler, TokenScheduler
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord

SIZES = (1, 4, 8, 16, 32)
PROMPT = 48  # tokens
SHARES = ("100%", "50%", "25%")
PARTS = 8  # of the decode passes, by which hits are compared
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
PIPELINED = "similarity, pipelined"
Schedulers = Mapping[str, Callable[[], Scheduler] | None]  # None: all of them as one batch
SCHEDULERS: Schedulers = {
    "one batch": None,
    "none": NoScheduler,
    "random": RandomScheduler,
    "similarity": TokenScheduler,
    "similarity, quarters": TokenScheduler,  # two batches of a quarter of the prompts each ...
    PIPELINED: TokenScheduler,  # ... and four, of which two are regrouped while the others are computed
}
BY_NETWORK: Schedulers = {"none, network": NoScheduler, "similarity, network": TokenScheduler}
By = dict[str, dict[str, Any]]
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Bench:
    """Prompts as token ids, how many tokens each answer has, how many are answered at a time, and how often."""

    run: Run
    prompts: Prompts
    tokens: int
    sizes: Sequence[int]
    rounds: int

    def emulated(self, engine: Engine) -> dict[str, Any]:
        """A link as slow for this machine as the reference machine's is for its layers."""
        steps = _answered(engine, self.prompts[:1], self.tokens, 1)[1]
        layer_ms = median(step.total_ms for step in steps if step.phase == "decode") / engine.shape.layers
        return emulated_link(layer_ms, engine.sizes.blob)

    def everything(self, linked: Engine, disk: Engine, link: Mapping[str, object]) -> dict[str, Any]:
        """By place and share of the experts; with half of them by cache and by scheduler."""
        found: dict[str, Any] = {place: {} for place in PLACES}
        for place, engine, own in (("link", linked, link), ("disk", disk, {"link": "own"})):
            for share in SHARES:
                found[place][share] = self.by_size(engine, {**PLAIN, "budget": share, **own}, f"{place} {share}")
        half = {"budget": "50%", **link}
        found["caches"] = {name: self.by_size(linked, {**one, **half}, name) for name, one in CACHES.items()}
        found["schedulers"] = schedulers = self.by_scheduler(linked, {**PLAIN, **half}, SCHEDULERS)
        found["shares"] = shares(schedulers)
        return found

    def with_network(self, engine: Engine, link: Mapping[str, object], found: dict[str, Any]) -> None:
        """Adds what a cache and schedulers make of the trained network's predictions (`bench path` counts these)."""
        self.run.say("training the network")
        limit, network = 600 if self.run.small else READ, {"budget": "50%", **link, **NETWORK}
        texts = bundled("demo")[: 8 if self.run.small else None]
        engine.use_profile(calibrate(engine, texts, parts={"path"}, limit=limit))
        found["caches"]["plec, network"] = self.by_size(engine, network, "plec, network")
        found["schedulers"] |= self.by_scheduler(engine, network, BY_NETWORK)

    def by_size(self, engine: Engine, settings: Mapping[str, object], what: str) -> By:
        """By batch size: the medians of some rounds."""
        engine.change(settings)
        _row(engine, self.prompts, self.tokens, self.sizes[-1])  # warm-up
        each = partial(_row, engine, self.prompts, self.tokens)
        found = self.run.by_turns(self.sizes, lambda size, _: each(size), self.rounds, warm=False, what=what)
        return {str(size): of_rounds(rows) for size, rows in found.items()}

    def by_scheduler(self, engine: Engine, settings: Mapping[str, object], schedulers: Schedulers) -> By:
        """Two batches of half of the prompts each, by what divides them."""
        engine.change(settings)
        count = len(self.prompts)

        def one(name: str, number: int) -> dict[str, Any]:
            make, times = schedulers[name], engine.batching.regrouped
            times.clear()
            if make is None:
                row = _row(engine, self.prompts, self.tokens, count)
            else:
                size = count // (4 if name in ("similarity, quarters", PIPELINED) else 2)
                row = _row(engine, self.prompts, self.tokens, size, make(), pipelined=name == PIPELINED)
            return {**row, "scheduled_ms": median(one.ms for one in times) if times else 0.0}

        found = self.run.by_turns([*schedulers], one, self.rounds, what="schedulers")
        return {name: of_rounds(rows) for name, rows in found.items()}

    @torch.inference_mode()
    def by_transformers(self, model: str) -> dict[str, float]:
        """Tokens a second of transformers' own grouped_mm, all resident, prompts counted; of each size the same
        prompts."""
        plain = AutoModelForCausalLM.from_pretrained(model_path(model), experts_implementation="grouped_mm").eval()
        own_memory(plain)
        each = partial(_plain_s, plain, self.prompts, self.tokens)
        found = self.run.by_turns(self.sizes, lambda size, _: each(size), self.rounds, what="transformers")
        return {str(size): max(size, 4) * self.tokens / median(seconds) for size, seconds in found.items()}


def measure(run: Run, model: str = "demo", rounds: int = 5, tokens: int = 32) -> Result:
    """`tokens` = tokens of an answer."""
    sizes, path = SIZES[:2] if run.small else SIZES, model_of(run, model)
    pack = str(pack_of(run, path, "whole1"))
    load: dict[str, Any] = {"context": PROMPT + tokens + 16, "sequences": max(sizes), "endless": True}
    everything = {**PLAIN, "budget": "all", "link": "own", "telemetry": "on"}
    with (
        run.loaded(path, everything, host="auto", **load) as linked,
        run.loaded(pack, everything, host="none", **load) as disk,
    ):
        stream = token_stream(linked)
        bench = Bench(run, [list(islice(stream, PROMPT)) for _ in range(max(sizes))], tokens, sizes, rounds)
        link = bench.emulated(linked)
        found = bench.everything(linked, disk, link)
        if model == "demo":  # elsewhere the network would take longer to train than all of this
            bench.with_network(linked, link, found)
    return {
        **found,
        "lost": lost(found),
        **gains(found, str(max(s for s in sizes if s <= 16)), link["link_gbps"]),
        "model": run.about["model"],
        "link_gbps": link["link_gbps"],
        "transformers": bench.by_transformers(path),
        "prompt_tokens": PROMPT,
        "sizes": list(sizes),
    }


def of_rounds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of figures over rounds, their tokens a second in each, and the hits by parts of the last one."""
    return {
        **medians([{name: row[name] for name in row if name != "hit_blocks"} for row in rows]),
        "tok_s_rounds": [row["tok_s"] for row in rows],
        "scheduled_shares": [row.get("scheduled_ms", 0.0) / (2 * row["pass_ms"]) for row in rows],
        "hit_blocks": rows[-1]["hit_blocks"],
    }


def shares(rows: By) -> dict[str, list[float]]:
    """By round: what regrouping takes of two passes, and how much longer an answer takes where it is pipelined."""
    quarters, pipelined = rows["similarity, quarters"]["tok_s_rounds"], rows[PIPELINED]["tok_s_rounds"]
    return {
        "scheduling": rows["similarity"]["scheduled_shares"],
        "pipelined": [a / b - 1 for a, b in zip(quarters, pipelined, strict=True)],
        "speedup": [
            a / b for a, b in zip(rows["similarity"]["tok_s_rounds"], rows["none"]["tok_s_rounds"], strict=True)
        ],
    }


def lost(found: Mapping[str, Any]) -> dict[str, list[float]]:
    """Cache -> the hit rate that it loses from 4 sequences at a time to 16, by parts of the answers."""
    sizes = {name: (of.get("4"), of.get("16")) for name, of in found["caches"].items()}
    return {
        name: [a - b for a, b in zip(few["hit_blocks"], many["hit_blocks"], strict=True)]
        for name, (few, many) in sizes.items()
        if few and many
    }


def gains(found: Mapping[str, Any], most: str, gbps: float) -> dict[str, Any]:
    """Tokens a second of `most` at a time over one, with half of the experts resident: with the same cache, with the
    fastest one, and at most: as with everything resident, or as fast as the link brings what has to be copied."""
    half, caches = found["link"]["50%"], found["caches"]
    one, resident = half["1"]["tok_s"], found["link"]["100%"][most]["tok_s"]
    frugal = min(caches, key=lambda name: caches[name][most]["bytes_per_token"])
    quickest = max(caches, key=lambda name: caches[name][most]["tok_s"])

    def fastest(copied: float) -> float:
        return float(min(resident, gbps * 1e9 / max(copied, 1.0)) / one)

    return {
        "gain": half[most]["tok_s"] / one,
        "quickest": quickest,
        "gain_quickest": caches[quickest][most]["tok_s"] / one,
        "gain_bound": fastest(half[most]["least_bytes_per_token"]),
        "gain_frugal": fastest(caches[frugal][most]["bytes_per_token"]),
        "frugal": frugal,
        "goal": GOAL,
    }


def _row(engine: Engine, prompts: Prompts, tokens: int, size: int, *how: Any, **more: Any) -> dict[str, Any]:
    """The figures of answering prompts, so many at a time: all of them once, or a few one by one; with a scheduler, as
    `_answered` takes it, all, in two batches of so many, or four where they are pipelined."""
    prompts = prompts if how else prompts[: max(size, 4)]
    seconds, steps = _answered(engine, prompts, tokens, size, *how, **more)
    decode = [step for step in steps if step.phase == "decode"]
    figures, generated, layers = reduced(steps), len(prompts) * tokens, engine.shape.layers
    copied = sum(step.demand_bytes + step.prefetch_bytes for step in steps)
    experts = sum(len(step.expert) for step in decode)
    lacking = sum(max(0, len(step.expert) - engine.expert_cache.slots) for step in decode)  # if all slots were of use
    return {
        "tok_s": generated / seconds,
        "pass_ms": median(step.total_ms for step in decode),
        "prefill_share": sum(step.total_ms for step in steps if step.phase == "prefill") / 1e3 / seconds,
        "stall_share": sum(step.stall_ms for step in steps) / 1e3 / seconds,
        "union": experts / layers / len(decode),
        "tokens_per_expert": sum(step.tokens for step in decode) * engine.shape.top_k * layers / experts,
        "hit_rate": float(figures["hit_rate"] or 0.0),
        "hit_blocks": ratios(*([sum(one[name]) for one in _parts(decode)] for name in ("hits", "requests"))),
        "bytes_per_token": copied / generated,
        "least_bytes_per_token": lacking * engine.sizes.blob / generated,
    }


def _parts(steps: Sequence[StepRecord]) -> list[dict[str, list[int]]]:
    """The hits and requests of passes in PARTS equal parts, whatever their number."""
    at = [round(part * len(steps) / PARTS) for part in range(PARTS + 1)]
    rows = [steps[first:last] for first, last in pairwise(at)]
    return [{"hits": [s.hits for s in one], "requests": [s.requests for s in one]} for one in rows]


def _answered(
    engine: Engine, prompts: Prompts, tokens: int, size: int, by: Scheduler | None = None, *, pipelined: bool = False
) -> tuple[float, list[StepRecord]]:
    """Seconds, and the passes that it took."""
    sampling, steps = Sampling(max_new_tokens=tokens, temperature=0.0), dict[int, StepRecord]()
    began_s = time.perf_counter()
    requests = [BatchRequest(n, Ids(ids), sampling) for n, ids in enumerate(prompts)]
    for one in engine.generate_many(requests, size, scheduler=by, pipelined=pipelined):
        if one.piece is not None and one.piece.step is not None:
            steps[one.piece.step.index] = one.piece.step
    return time.perf_counter() - began_s, list(steps.values())


def _plain_s(plain: Any, prompts: Prompts, tokens: int, size: int) -> float:
    prompts, began_s = prompts[: max(size, 4)], time.perf_counter()
    for at in range(0, len(prompts), size):
        cache, ids = DynamicCache(config=plain.config), torch.tensor(prompts[at : at + size])
        for _ in range(tokens):
            logits = cached_pass(plain, ids, cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
    return time.perf_counter() - began_s


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 4})
