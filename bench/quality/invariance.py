"""bench invariance: how many logits have other bits when they are computed in another way.

Budget, eviction policy, prefetcher, threads and where misses are computed are combined with the pieces in which a text
is read, the number of texts in a pass, and whether its beginning is taken over from an earlier text: 2,592 ways. Each
prompt is read in EACH of them, which are drawn without repetition. All logits after its tokens are compared with those
of the same text read alone in one pass, with everything resident. The fast arithmetic promises that none differs; of
the reference the same is counted for comparison."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bench.harness.engines import model_of, token_stream
from bench.harness.run import RESIDENT, Result, Run, Suite
from core.engine import Engine
from core.memory.codec.native.threads import share
from core.runtime.batch import Batch, Share
from core.runtime.pipeline import Pipeline
from core.runtime.sequence_kv import SequenceKV
from core.runtime.warmup import Split, Threads
from core.system.wording import grid
from core.types import Phase

LENGTH = 72  # tokens of a prompt
REUSED = 29  # of them, taken over
EACH = 8  # ways in which a prompt is read
RESIDENT_WAY = {**RESIDENT, "predictor": "none", "eviction": "lru", "miss_placement": "wait"}
WAYS: dict[str, tuple[Any, ...]] = {
    "budget": ("25%", "50%", "100%"),
    "eviction": ("lru", "lfu", "lcp"),
    "predictor": ("none", "gate"),
    "miss_placement": ("wait", "host", "measured"),
    "threads": (1, 2),
    "pieces": (1, 7, 64, LENGTH),
    "batch": (1, 4, 16),
    "reuse": (False, True),
}
SMALL: dict[str, tuple[Any, ...]] = {
    "budget": ("25%",),
    "eviction": ("lru",),
    "predictor": ("gate",),
    "miss_placement": ("wait", "host"),
    "threads": (1, 2),
    "pieces": (7, LENGTH),
    "batch": (1, 4),
    "reuse": (False, True),
}


class Way(NamedTuple):
    """One combination."""

    budget: str
    eviction: str
    predictor: str
    miss_placement: str
    threads: int
    pieces: int
    batch: int
    reuse: bool


class FixedThreads(Threads):
    """The same for every pass."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)

    def use(self, phase: Phase, tokens: int = 0) -> None:
        torch.set_num_threads(self.token.plain)
        share(self.token.ours)


def measure(run: Run, model: str = "demo", prompts: int = 20) -> Result:
    name, found = model_of(run, model), dict[str, Any]()
    for arithmetic in ("fast", "reference"):
        with run.loaded(name, RESIDENT_WAY, arithmetic=arithmetic, context=128, sequences=16) as engine:
            found[arithmetic] = engine.arithmetic.facts() | _counted(run, engine, prompts)
    return {"length": LENGTH, "reused": REUSED, "arithmetics": found}


def _counted(run: Run, engine: Engine, prompts: int) -> Result:
    stream, ways = token_stream(engine), SMALL if run.small else WAYS
    texts = [list(itertools.islice(stream, LENGTH)) for _ in range(prompts)]
    assert len(texts[-1]) == LENGTH, "there is less text than that"
    threads, before = torch.get_num_threads(), engine.settings
    compared, differing, runs = 0, 0, 0
    of = {f"{name} {value}": [0, 0] for name, values in ways.items() for value in values}  # compared, differing
    try:
        alone = Way("100%", "lru", "none", "wait", 1, LENGTH, 1, False)
        wanted = [read for text in texts for (read,) in [_read(engine, alone, [text])]]
        every = [Way(*values) for values in itertools.product(*ways.values())]
        drawn = random.Random(1).sample(every, min(EACH * prompts, len(every)))
        for runs, way in enumerate(sorted(drawn), 1):
            if not runs % EACH:
                run.say(f"{engine.arithmetic.name}: {runs} of {len(drawn)}")
            at = [(runs + i) % prompts for i in range(way.batch)]
            read = _read(engine, way, [texts[i] for i in at])
            total = sum(one.numel() for one in read)
            off = sum(_differing(one, wanted[i]) for i, one in zip(at, read, strict=True))
            compared, differing = compared + total, differing + off
            for one, value in way._asdict().items():
                of[f"{one} {value}"][0] += total
                of[f"{one} {value}"][1] += off
    finally:
        torch.set_num_threads(threads)
        engine.change(dict(before))
    return {"runs": runs, "logits": compared, "differing": differing, "of": of}


@torch.inference_mode()
def _read(engine: Engine, way: Way, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[n, V] of each text: the logits after its tokens, without those of the first that were taken over."""
    wiring, kept = engine.wiring, engine.parts.memory.prefix_cache
    if any(engine.settings[name] != value for name, value in way._asdict().items() if name in RESIDENT_WAY):
        engine.change(
            {
                "budget": way.budget,
                "eviction": way.eviction,
                "predictor": way.predictor,
                "miss_placement": way.miss_placement,
            }
        )
    split = Split(1, way.threads) if engine.arithmetic.fast else Split(way.threads)
    with engine.workbench("The bits of its logits are being compared."):
        pipeline = Pipeline(wiring.answering.hooked, wiring.answering.step, FixedThreads(split))
        try:
            first = texts[0]
            if way.reuse:
                earlier = [*first[:REUSED], first[REUSED] ^ 1, *first[:5]]  # another token there
                kv = wiring.kv.fresh()
                _pass(pipeline, [Share(earlier, kv)])
                kept.end(earlier, len(earlier), kv, [])
            kvs = [_memory(engine, len(text)) for text in texts] if len(texts) > 1 else [wiring.kv.fresh()]
            if way.reuse:
                kvs[0] = kept.begin(first, "", kvs[0].memory if len(texts) > 1 else None).kv
                assert kvs[0].length == REUSED, "the beginning was not taken over"
            return [torch.cat(rows) for rows in _pieces(pipeline, way.pieces, texts, kvs)]
        finally:
            pipeline.end()
            wiring.pool.clear()
            kept.clear()


def _memory(engine: Engine, positions: int) -> SequenceKV:
    kv = engine.wiring.pool.take(positions)
    assert kv is not None, "the load has room for as many texts"
    return kv


def _pieces(
    pipeline: Pipeline, size: int, texts: Sequence[Sequence[int]], kvs: Sequence[SequenceKV]
) -> list[list[torch.Tensor]]:
    """The logits of each text, read in pieces together with the others' next ones."""
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while shares := list(_next(size, texts, kvs)):
        logits = _pass(pipeline, [one for _, one in shares])
        for (at, _), rows in zip(shares, logits, strict=True):
            found[at].append(rows)
    return found


def _next(size: int, texts: Sequence[Sequence[int]], kvs: Sequence[SequenceKV]) -> Iterator[tuple[int, Share]]:
    for at, (text, kv) in enumerate(zip(texts, kvs, strict=True)):
        if kv.length < len(text):
            yield at, Share(text[kv.length : kv.length + size], kv, 1 + at)


def _pass(pipeline: Pipeline, shares: Sequence[Share]) -> list[torch.Tensor]:
    """[t, V] fp32 of each share."""
    counts = [len(one.tokens) for one in shares]
    most = max(counts)
    batch = Batch("decode" if most == 1 else "prefill", tuple(shares))
    pipeline.begin(batch)
    logits = pipeline.forward(batch, keep=most).float().clone()
    if len(logits) == sum(counts):
        return list(logits.split(counts))
    return [rows[-count:] for rows, count in zip(logits.split(most), counts, strict=True)]  # others' rows before them


def _differing(ours: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many logits have other bits than those at the same places from the end."""
    return int((ours.view(torch.int32) != wanted[-len(ours) :].view(torch.int32)).sum())


def table(f: Result) -> list[str]:
    fast, reference = (f["arithmetics"][name] for name in ("fast", "reference"))
    rows = [(one, *(f"{of['of'][one][1]:,} of {of['of'][one][0]:,}" for of in (fast, reference))) for one in fast["of"]]
    rows += [("all", *(f"{of['differing']:,} of {of['logits']:,}" for of in (fast, reference)))]
    return [
        f"logits with other bits than alone, whole and resident: {fast['runs']} runs of {f['prompts']} prompts of "
        f"{f['length']} tokens in each arithmetic; {f['device']}",
        *grid(("", "fast", "reference"), rows),
        *([f"  the fast arithmetic does not compute this model: {fast['fallback']}"] if fast["fallback"] else []),
    ]


SUITE = Suite(measure, table, small={"prompts": 4})
