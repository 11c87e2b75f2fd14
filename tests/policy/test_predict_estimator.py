"""The network that estimates a layer's routing: by hand, and that it learns what a router does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from core.policy.predict.nets import estimator
from core.policy.predict.nets.estimator import Batch, Estimator
from tests.policy.nets import EXPERTS, HIDDEN, LAYERS, SIZES, Held, K, drawn


def test_the_estimator_by_hand() -> None:
    net = Estimator(2, 2, 2, 2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net.reduce.weight.copy_(torch.eye(2))
        net.place.weight[1] = torch.tensor([0.0, 1.0])
        net.inner.weight.copy_(torch.eye(2))
        net.outer.weight.copy_(2 * torch.eye(2))
        net.norm.weight.fill_(1.0)
        net.head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    # x = (1, 0) + (0, 1) = (1, 1), then 1 + 2 * silu(1) on both sides: the norm makes (0, 0) of two equal numbers.
    net.requires_grad_(False)
    assert net(torch.tensor([[1.0, 0.0]]), torch.tensor(1))[0] == pytest.approx(torch.zeros(2))
    # x = (1, -1) + (0, 1) = (1, 0), plus 2 * silu: (1 + 2 * .7311, 0); normed: (1, -1); head: (1, -3).
    assert net(torch.tensor([[1.0, -1.0]]), torch.tensor(1))[0] == pytest.approx(torch.tensor([1.0, -3.0]), abs=1e-4)
    predicted = net.probabilities(torch.tensor([[1.0, -1.0]]), 1)
    assert predicted.dtype == torch.float32
    assert predicted[0] == pytest.approx(torch.tensor([1.0, -3.0]).softmax(0), abs=1e-4)


def test_the_estimator_learns_what_a_router_does() -> None:
    states, probs = drawn(600)
    shares: list[float] = []
    net = estimator.train(
        Held(states, probs),
        **SIZES,
        width=48,
        epochs=20,
        rate=5e-3,
        batch=128,
        progress=lambda text, share: shares.append(share),
    )
    untrained = Estimator(LAYERS, EXPERTS, HIDDEN, 48)
    fresh = drawn(200, seed=1)
    learnt, before = (estimator.recall(one, Held(*fresh), K) for one in (net, untrained))
    assert torch.isnan(learnt[0])
    assert (learnt[1:] > 0.8).all() and (before[1:] < 0.6).all()
    assert shares[-1] == 1.0 and shares == sorted(shares)
    assert not any(parameter.requires_grad for parameter in net.parameters()) and not net.training


@pytest.mark.long(0.1)
def test_training_an_estimator_lowers_the_divergence_from_the_router() -> None:
    states, probs = drawn(300)
    net = estimator.train(Held(states, probs), **SIZES, width=48, epochs=40, rate=5e-3, batch=64)
    predicted = torch.stack([net.probabilities(states[:, layer - 1], layer) for layer in range(1, LAYERS)], 1)
    kl = functional.kl_div(predicted.log(), probs[:, 1:].float(), reduction="sum") / predicted[..., 0].numel()
    uniform = functional.kl_div(torch.full_like(predicted, 1 / EXPERTS).log(), probs[:, 1:].float(), reduction="sum")
    assert kl < 0.2 * uniform / predicted[..., 0].numel()


def test_an_estimator_needs_examples() -> None:
    """A model of one layer has none."""
    states, probs = drawn(10)
    with pytest.raises(ValueError, match="no states"):
        estimator.train(Held(states[:, :1], probs[:, :1]), **SIZES)


@pytest.mark.parametrize(("count", "epochs"), [(10, 20), (30, 7), (1000, 1)])
def test_few_examples_are_seen_often_and_many_once(count: int, epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as makes about STEPS minibatches, but at most MOST_EPOCHS times."""
    monkeypatch.setattr(estimator, "STEPS", 20)
    passes = list[int]()

    class Counted(Held):
        def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
            passes.append(0)
            for one in super().batches(size, generator):
                passes[-1] += len(one.layer)
                yield one

    examples = Counted(torch.zeros(count, 2, 4), torch.full((count, 2, 3), 1 / 3))
    assert estimator.train(examples, layers=2, experts=3, hidden=4, width=8, batch=10) is not None
    assert passes == [count] * epochs
