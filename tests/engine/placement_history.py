"""Answers through random histories of where misses are computed: budgets, policies, prefetchers, links, placements,
threads, and who leads the tokens, changed between answers and within them, on a CPU or on the fake GPU. Each seed is a
load of its own, so that a history that was interrupted goes on with the next one.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from core.engine import Engine
from core.errors import MoestroError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids
from tests.decoded import greedy
from tests.fake_cuda import FakeCuda, installed
from tests.loaded import unloading

DEVICES = "cpu", "cuda"
TOKENS = 24  # of an answer
PROMPT = Ids(torch.randint(3, 250, (20,), generator=torch.Generator().manual_seed(2)).tolist())
ALL: Mapping[str, object] = {"budget": "100%", "miss_placement": "wait", "predictor": "none", "link": "own"}
LINKS: Mapping[str, object] = {"link": "emulated", "link_gbps": 0.05, "link_latency_us": 5}
HOSTED: Mapping[str, object] = {"miss_placement": "host", "host_threads": 1}
CHANGES: Mapping[str, tuple[object, ...]] = {
    "budget": ("35%", "45%", "60%"),
    "miss_placement": ("wait", "host", "measured"),
    "host_threads": (0, 1, 2),
    "eviction": ("lru", "lfu", "fifo", "lcp", "none"),
    "predictor": ("none", "none", "gate"),
    "predictor.distance": (0, 1, 2),
    "predictor.gate.last_state": (False, False, True),
    "prefetch_deadline": (False, False, True),
    "scope": ("layer", "global"),
    "bypass": (False, False, True),
}
OF_CPU: Mapping[str, tuple[object, ...]] = {"link_gbps": (0.01, 0.2, 5.0), "drafts": ("off", "lookup")}
OF_GPU: Mapping[str, tuple[object, ...]] = {
    "link": ("own", "own", "emulated"),
    "gpu_decode": ("host", "device", "device", "graph", "auto"),
}


@contextmanager
def engine_on(device: str, path: Path, seed: int) -> Iterator[Engine]:
    """An engine in the fast arithmetic with everything resident. On the fake GPU of every third seed the host's native
    code attends to tokens, elsewhere what the race detector follows; that no access was a race, and that nothing stays
    pinned, is asserted at the end."""
    how = {"format": "int8", "arithmetic": "fast", "dtype": "bfloat16", "context": 128, "device": device}
    settings = Settings({**LINKS, **ALL, **({"link": "emulated"} if device == "cpu" else {})})
    spec = LoadSpec.checked(str(path), settings, **how)
    if device == "cpu":
        with unloading(Engine.load(spec)) as engine:
            yield engine
        return
    from tests.fake_cuda.experts import fast_experts

    with installed(FakeCuda(seed=seed), kernels=True) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr("core.engine.pass_wiring.PREFILL_CHUNK", 4)
        fast_experts(fake, patch, watched=seed % 3 != 2)
        with unloading(Engine.load(spec)) as engine:
            assert engine.arithmetic.name == "fast_experts", engine.arithmetic
            yield engine
            lost = engine.parts.host.failed  # what its threads may still write to is kept
        assert not fake.races.found, fake.races.found[:3]
        assert lost or not fake.pinned.used


def answer(engine: Engine, tokens: int = TOKENS) -> torch.Tensor:
    """[tokens, V] before each token of a greedy answer."""
    seen = list[torch.Tensor]()
    assert list(engine.generate(PROMPT, Sampling(max_new_tokens=tokens), draw=greedy(seen)))
    return torch.stack(seen)


class History:
    """Of one load. `seen` counts tokens, and what they did."""

    def __init__(self, engine: Engine, device: str, seed: int) -> None:
        self._engine, self._draw, self.seen = engine, random.Random(seed), Counter[str]()
        self._known = {**CHANGES, **(OF_CPU if device == "cpu" else OF_GPU)}
        self._wanted = answer(engine)
        engine.change({"budget": "35%", **HOSTED, **({"gpu_decode": "device"} if device == "cuda" else {})})

    def goes_on(self, tokens: int) -> None:
        """Answers with so many tokens in all: each has the bits of the one with everything resident, and its budget is
        kept."""
        while self.seen["tokens"] < tokens:
            self._engine.parts.drafter.gate.fixed = self._draw.choice([None, 2, 8])
            self._answer()
            self._engine.expert_cache.check_integrity()
            self._change(0.6)

    def _answer(self) -> None:
        engine, draw, logits = self._engine, self._draw, list[torch.Tensor]()
        ends = draw.choice([1, 7, *[10**9] * 6])  # broken off after so many passes
        for piece in engine.generate(PROMPT, Sampling(max_new_tokens=TOKENS), draw=greedy(logits)):
            step, led = piece.step, engine.parts.device_decode.step
            if step is not None:
                assert step.device_bytes <= step.budget_bytes
                joined = step.host_computed if led is not None and led.join is not None else 0
                seen = {"tokens": step.tokens, "hosted": step.host_computed, "joined": joined, "drafted": step.drafted}
                self.seen.update({**seen, "admitted": step.host_admitted, "copied": step.demand_bytes})
            ends -= 1
            if not ends:
                break
            if draw.random() < 0.15:
                self._change(0.15)
        assert torch.equal(torch.stack(logits), self._wanted[: len(logits)]), dict(engine.settings.data)

    def _change(self, share: float) -> None:
        """Settings anew, each with this likelihood; of those that do not go together nothing is changed."""
        draw = self._draw
        with suppress(MoestroError):
            self._engine.change({name: draw.choice(of) for name, of in self._known.items() if draw.random() < share})
