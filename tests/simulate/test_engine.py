"""The simulator is the engine without bytes: the same hits, the same experts leaving, in the same order."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.expert_cache import ExpertCache
from core.engine import Engine
from core.policy.eviction import GONE
from core.profile.trace import ArrayTrace, Chunk, FileTrace, TraceHead, TraceWriter
from core.settings.config import Settings
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.simulate import Config, Replay
from core.simulate.run import maker
from core.types import Outcome, StepRecord
from tests.cache.machine import EXPERTS, LAYERS, build, hold
from tests.decoded import passes_of
from tests.selection import examples, layered

K = 2
NAMES = [v.name for v in variants("eviction")]
SCOPES = ["layer", "global"]
CASES = list(product(NAMES, SCOPES))


def turns(first: int) -> Callable[[tuple[str, str]], bool]:
    """Which cases guard every change: each policy in one scope, the scopes in turn from that of number `first`."""
    return lambda case: SCOPES.index(case[1]) == (NAMES.index(case[0]) + first) % 2


def routes(seed: int, tokens: int, experts: int = EXPERTS, layers: int = LAYERS, k: int = K) -> Any:
    """[tokens, layers, k] with favourites and some memory, so that policies disagree."""
    random = np.random.default_rng(seed)
    liked = random.gumbel(size=(layers, experts))
    noise = random.gumbel(size=(tokens, layers, experts))
    noise[1:] += noise[:-1]
    return np.argsort(-(liked + noise), 2)[..., :k]


def logged(slots: int, scope: str, name: str) -> tuple[ExpertCache, list[int]]:
    """A filled cache, and a list in which its policy writes down who leaves."""
    expert_cache, gone = build(slots, scope, name), list[int]()
    expert_cache.fill()
    left = expert_cache.policy.left

    def note(eid: Any) -> None:
        gone.append(eid)
        left(eid)

    expert_cache.policy.left = note  # type: ignore[method-assign]
    return expert_cache, gone


def simulated(slots: int, scope: str, name: str, ids: Any) -> Replay:
    return Replay(ArrayTrace(ids, EXPERTS), maker(Config(name, slots)), [slots], scope, "filled")


@pytest.mark.parametrize(("name", "scope"), layered(CASES, quick=turns(0)))
@examples(8, fewer=3)
@given(seed=st.integers(0, 2**32), slots=st.integers(LAYERS * K, LAYERS * EXPERTS))
def test_hits_and_victims_are_the_engines_own(name: str, scope: str, seed: int, slots: int) -> None:
    ids = routes(seed, 24)
    (real, left), replay = logged(slots, scope, name), simulated(slots, scope, name, ids)
    cache = replay.cache
    base = np.arange(LAYERS) * EXPERTS
    for now, token in enumerate(ids.tolist(), 1):
        real.core.now = now
        for step in [range(LAYERS)] if scope == "layer" else [[layer] for layer in range(LAYERS)]:
            left.clear()
            missed = []
            for layer in step:
                lease = hold(real, layer, token[layer])
                missed.append(sum(h.outcome == Outcome.MISS for h in lease.segments))
                evicted = len(left)
                real.release(lease)
                del left[evicted:]  # without a cache all leave here, in both
            wanted = np.array([token[layer] for layer in step]) + base[list(step)][:, None]
            where = cache.expert_index.layer_of if scope == "layer" else step[0]
            assert cache.together(wanted, now, where).tolist() == missed
            gone = cache.gone.tolist()
            for lane in range(cache.lanes):
                mine = slice(lane * cache.width, (lane + 1) * cache.width)
                assert [e for e in gone if mine.start <= e < mine.stop] == [
                    e for e in left if mine.start <= e < mine.stop
                ]
        assert [e for e, there in enumerate(cache.policy.score != GONE) if there] == [
            e for e in range(LAYERS * EXPERTS) if real.is_resident(e)
        ]
    real.copies.link.close()


def restart(engine: Engine) -> None:
    """The cache as it is filled after a load, before anything was asked."""
    expert_cache = engine.expert_cache
    expert_cache.core.evict_all()
    expert_cache.reshape(make_policy=expert_cache.make_policy)
    expert_cache.fill()
    expert_cache.core.now = 0
    expert_cache.prefetch_queue.guard.forget()


def recorded(engine: Engine, path: Path, questions: Sequence[str], tokens: int) -> list[StepRecord]:
    """Answers, whose routing and what the predictor named is written to a trace."""
    shape, steps = engine.shape, list[StepRecord]()
    for question in questions:
        steps += passes_of(engine.generate([{"role": "user", "content": question}], Sampling(max_new_tokens=tokens)))
    head = TraceHead(shape.layers, shape.experts, shape.top_k, predictor=engine.settings.choice("predictor"))
    with TraceWriter(path, head) as writer:
        for step in steps:
            writer.add(step)
    return steps


QUESTIONS = ["What does json.dumps do?", "Who wrote Faust?"]


@pytest.mark.long(0.1)  # tests/engine/test_placement.py replays global, pinned and bypassed ones
@pytest.mark.parametrize(
    "change",
    layered(
        [
            *({"eviction": name} for name in NAMES),
            {"scope": "global"},
            {"scope": "global", "eviction": "plec"},
            {"budget": "30%", "eviction": "lcp"},
        ],
        quick=lambda change: "scope" in change and len(change) == 2,
    ),
    ids=lambda change: "-".join(change.values()),
)
def test_a_recorded_chat_replays_request_by_request(demo: Engine, change: dict[str, object], tmp_path: Path) -> None:
    demo.change({**Settings({"budget": "50%", "link": "own"}), **change})
    restart(demo)
    shape, steps = demo.shape, recorded(demo, tmp_path / "t", QUESTIONS, 8)
    trace, settings = FileTrace(tmp_path / "t"), demo.settings
    name, params = settings.choice("eviction")
    replay = Replay(
        trace, maker(Config(name, 0, params=params)), [demo.expert_cache.slots], str(settings["scope"]), "filled"
    )
    (chunk,) = trace.chunks()
    assert len(chunk.sizes) == len(steps) > 8
    at = 0
    for step, size in zip(steps, chunk.sizes.tolist(), strict=True):
        before = replay.tally.misses.sum((0, 1))
        one = slice(at, at + size)
        there = replay.cache.policy.score != GONE
        replay.feed(
            Chunk(chunk.ids[one], np.array([size], np.int32), np.array([step.phase == "decode"]), chunk.rid[:1])
        )
        missed = step.outcome == Outcome.MISS
        assert ((step.outcome == Outcome.HIT) | missed).all()
        by_layer = np.bincount(step.layer[missed], minlength=shape.layers)
        assert (replay.tally.misses.sum((0, 1)) - before == by_layer).all()
        if size == 1 and settings["scope"] == "layer":  # nobody leaves before its use: who was there, hit
            eids = step.layer.astype(int) * shape.experts + step.expert
            assert (there[eids] != missed).all()
            for layer in range(shape.layers):
                asked, of = chunk.ids[at, layer], step.layer == layer
                hit = there[layer * shape.experts + asked.astype(int)]
                assert step.expert[of].tolist() == [*asked[hit].tolist(), *asked[~hit].tolist()]
        at += size
    assert np.flatnonzero(replay.cache.policy.score != GONE).tolist() == [
        e for e in range(shape.total) if demo.expert_cache.is_resident(e)
    ]
    assert replay.tally.misses.sum() > 0
    assert (replay.tally.misses.sum() == replay.tally.requests.sum()) == (name == "none")
