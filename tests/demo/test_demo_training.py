"""The demo model's training: fast experts, upcycling, schedule, resuming, and the cache figures of the card."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from demo import stages
from demo.corpus import build
from demo.model import FULL_SIZE, SEED_SIZE, make_model, padded_experts, sorted_experts, upcycle
from demo.traces import Trace, belady, lfu, lru


def test_fast_experts_equal_the_reference() -> None:
    torch.manual_seed(0)
    experts = make_model(FULL_SIZE, vocab_size=64).model.layers[0].mlp.experts
    hidden = torch.randn(50, 192)
    weights, index = torch.rand(50, 32).softmax(-1).topk(4, -1)
    with torch.no_grad():
        reference = type(experts).forward.__wrapped__(experts, hidden, index, weights)
        torch.testing.assert_close(sorted_experts(experts, hidden, index, weights), reference)
        in_bf16 = padded_experts(experts, hidden, index, weights)
    assert (in_bf16 - reference).norm() / reference.norm() < 0.02


def test_upcycling_clones_every_expert() -> None:
    small, full = make_model(SEED_SIZE, vocab_size=64), make_model(FULL_SIZE, vocab_size=64)
    upcycle(small.state_dict(), full, noise=0.0, seed=1)
    clones = full.model.layers[2].mlp.experts.down_proj.unflatten(0, (4, 8))
    assert torch.equal(clones, small.model.layers[2].mlp.experts.down_proj.unsqueeze(1).expand_as(clones))
    upcycle(small.state_dict(), full, noise=0.4, seed=1)
    first, second = full.model.layers[2].mlp.experts.down_proj[:2]
    assert 0.7 < torch.cosine_similarity(first.flatten(), second.flatten(), dim=0) < 0.95


def test_rate_rises_holds_and_falls() -> None:
    plan = stages.Plan(steps=1000, decay_from=400)
    rates = [plan.rate(step) for step in range(1000)]
    assert max(rates) == stages.PEAK_RATE == rates[399]
    assert rates[0] < rates[30] < rates[59]
    assert all(a >= b for a, b in itertools.pairwise(rates[400:]))
    assert rates[-1] <= 0.01 * stages.PEAK_RATE


@pytest.mark.long(0.1)
def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stages.TOKENS_PER_STEP, "seed", 256)
    build(tmp_path, facts_wanted=60, seed=1)
    plan = stages.Plan(10, 10)
    straight = stages.Stage("seed", SEED_SIZE, tmp_path, plan, seed=3)
    straight.update()
    straight.save()
    resumed = stages.Stage("seed", SEED_SIZE, tmp_path, plan, seed=4)
    assert resumed.resume() and resumed.step == 1
    resumed.batches.seed = straight.batches.seed
    resumed.batches.names.rng = straight.batches.names.rng
    straight.update()
    resumed.update()
    for name, parameter in straight.named.items():
        torch.testing.assert_close(resumed.named[name], parameter, rtol=1e-3, atol=2e-4, msg=name)


def brute_force_best(trace: Trace, slots: int) -> float:
    """The best hit rate any sequence of evictions gives."""
    states = {frozenset[int](): 0}
    for experts in trace:
        after: dict[frozenset[int], int] = {}
        for state, hits in states.items():
            now = hits + len(state & set(experts))
            room = slots - len(experts)
            others = state - set(experts)
            for kept in itertools.combinations(sorted(others), min(room, len(others))):
                key = frozenset(experts) | set(kept)
                after[key] = max(after.get(key, 0), now)
        states = after
    return max(states.values()) / sum(map(len, trace))


@pytest.mark.parametrize("seed", range(5))
def test_belady_is_the_best_there_is(seed: int) -> None:
    rng = random.Random(seed)
    trace: Trace = [tuple(sorted(rng.sample(range(6), 2))) for _ in range(25)]
    best = brute_force_best(trace, 3)
    assert belady(trace, 3) == pytest.approx(best)
    assert lru(trace, 3) <= best and lfu(trace, 3) <= best


def test_lru_by_hand() -> None:
    assert lru([(0,), (1,), (0,), (2,), (0,), (1,)], 2) == pytest.approx(2 / 6)
