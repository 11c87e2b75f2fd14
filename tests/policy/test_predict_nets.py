"""The networks that predict routing: against transformers' T5, against themselves in pieces, and that they learn."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import T5Config, T5Model

from core.policy.predict.nets import estimator, path
from core.policy.predict.nets.estimator import Batch, Estimator
from core.policy.predict.nets.path import WINDOW, RoutingPathNet
from core.policy.predict.nets.t5 import start_weights
from core.policy.predict.nets.training import batches, seeded
from tests.policy.nets import EXPERTS, HIDDEN, LAYERS, SIZES, TOKENS, Held, K, drawn, equal, passages


def test_the_routing_path_predictor_is_a_t5() -> None:
    """transformers' T5 with the same weights gives the same states."""
    net = RoutingPathNet(LAYERS, EXPERTS, TOKENS, d_model=16, d_ff=24, heads=3, d_kv=8, blocks=2)
    start_weights(net)
    theirs = T5Model(
        T5Config(vocab_size=len(TOKENS) + 1, d_model=16, d_ff=24, num_heads=3, d_kv=8, num_layers=2, dropout_rate=0.0)
    ).eval()
    weights = {"shared.weight": net.embed.weight}
    for side, blocks, bias, norm in (
        ("encoder", net.encoder, net.reads, net.read_norm),
        ("decoder", net.decoder, net.writes, net.write_norm),
    ):
        weights[f"{side}.final_layer_norm.weight"] = norm.weight
        weights[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = bias.values.weight
        for i, block in enumerate(blocks):
            here, last = f"{side}.block.{i}.layer", 1 if side == "encoder" else 2
            weights |= {f"{here}.0.SelfAttention.{n}.weight": getattr(block.attend, n).weight for n in "qkvo"}
            weights |= {f"{here}.{last}.DenseReluDense.{n}.weight": getattr(block, n).weight for n in ("wi", "wo")}
            weights |= {
                f"{here}.0.layer_norm.weight": block.norm.weight,
                f"{here}.{last}.layer_norm.weight": block.ff_norm.weight,
            }
            if side == "decoder":
                weights |= {f"{here}.1.EncDecAttention.{n}.weight": getattr(block.cross, n).weight for n in "qkvo"}
                weights[f"{here}.1.layer_norm.weight"] = block.cross_norm.weight
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    prompt, ids = torch.randint(5, 45, (2, 150)), torch.randint(5, 45, (2, 40))
    mask = torch.arange(150) < torch.tensor([[150], [90]])
    with torch.no_grad():
        wanted = theirs(input_ids=net.places(prompt), attention_mask=mask, decoder_input_ids=net.places(ids))
        logits, _ = net.decode(ids, net.encode(prompt, mask))
        expected = net.heads(wanted.last_hidden_state).unflatten(-1, (LAYERS, EXPERTS))
    assert logits.shape == (2, 40, LAYERS, EXPERTS)
    assert torch.allclose(logits, expected, atol=1e-4)


@torch.no_grad()
def test_token_by_token_is_the_same_as_all_at_once() -> None:
    net = RoutingPathNet(LAYERS, EXPERTS, TOKENS, d_ff=32, heads=2, d_kv=8)
    ids = torch.randint(0, 50, (1, 30))
    whole, _ = net.decode(ids, net.encode(ids[:, :8]))
    state, pieces = net.encode(ids[:, :8]), []
    for part in ids.split([1, 1, 9, 1, 18], dim=1):
        logits, state = net.decode(part, state)
        pieces.append(logits)
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-5)


@pytest.mark.long(0.1)
@torch.no_grad()
def test_the_decoder_looks_back_on_a_window_and_no_farther() -> None:
    net = RoutingPathNet(LAYERS, EXPERTS, TOKENS, d_ff=32, heads=2, d_kv=8, blocks=1)
    ids = torch.randint(5, 45, (1, WINDOW + 20))
    changed = ids.clone()
    changed[0, :20] = 5
    prompt, last = ids[:, :4], []
    for one in (ids, changed):
        state = net.encode(prompt)
        for part in one.split(1, dim=1):
            logits, state = net.decode(part, state)
        assert state.own[0] is not None and state.own[0].keys.shape[2] == WINDOW - 1
        last.append(logits)
    assert torch.equal(*last)


def test_tokens_that_were_never_seen_share_a_place() -> None:
    net = RoutingPathNet(LAYERS, EXPERTS, torch.tensor([3, 7, 9]))
    assert net.places(torch.tensor([[3, 7, 9, 0, 8, 100]])).tolist() == [[1, 2, 3, 0, 0, 0]]
    assert RoutingPathNet(LAYERS, EXPERTS, torch.tensor([])).places(torch.tensor([3])).tolist() == [0]


def test_its_size_is_the_papers_with_the_vocabulary_of_t5() -> None:
    net = RoutingPathNet(12, 128, torch.arange(32127))
    assert sum(p.numel() for p in net.parameters()) * 4 / 1e6 == pytest.approx(7.21, abs=0.1)


def test_weight_decay_moves_no_token_that_no_batch_has() -> None:
    """Nor a rare one between two of its batches: within Adam's moments, decay is a step of full size: .05 here."""
    net = path.train(passages(24), experts=EXPERTS, epochs=5)
    assert net is not None
    with seeded(0):
        start = RoutingPathNet(LAYERS, EXPERTS, net.tokens).embed.weight[0]  # the row of tokens that it does not know
    assert torch.allclose(net.embed.weight[0], start.detach(), rtol=1e-2)


def test_rows_of_a_batch_are_about_as_long_as_each_other() -> None:
    rows, batch = 203, 8
    lengths = torch.randint(1, 100, (rows,), generator=torch.Generator().manual_seed(0))

    def padded(*how: Any) -> int:
        pick = batches(rows, batch, torch.Generator().manual_seed(0), *how)
        steps = -(-rows // batch)
        for first in (0, steps):
            drawn = [pick(first + at) for at in range(steps)]
            assert sorted(torch.cat(drawn).tolist()) == list(range(rows)), "every row once an epoch"
        return sum(len(one) * int(lengths[one].max()) for one in drawn)

    assert padded(lengths.tolist()) < 1.1 * int(lengths.sum()) < padded() / 1.5


@pytest.mark.long(0.1)
def test_the_routing_path_predictor_learns_which_way_a_token_goes() -> None:
    net = path.train(passages(48), experts=EXPERTS, epochs=25, rate=3e-3)
    assert net is not None
    assert (path.recall(net, passages(10, seed=1)) > 0.85).all()
    assert K / EXPERTS < 0.5


def test_passages_longer_than_the_window_are_cut() -> None:
    (long,) = passages(1, length=WINDOW + 40)
    net = path.train([long._replace(prompt=[])], experts=EXPERTS, epochs=1)
    assert net is not None
    assert path.recall(net, [long]).shape == (LAYERS,)
    with pytest.raises(ValueError, match="no tokens"):
        path.train([], experts=EXPERTS)


def test_a_seed_gives_the_same_net_and_leaves_other_random_numbers_alone() -> None:
    states, probs = drawn(40)
    data = passages(4)
    torch.manual_seed(1)
    undisturbed = torch.rand(3)
    torch.manual_seed(1)
    for one, again, other in (
        [estimator.train(Held(states, probs), **SIZES, width=8, epochs=2, seed=seed) for seed in (0, 0, 1)],
        [path.train(data, experts=EXPERTS, epochs=1, seed=seed) for seed in (0, 0, 1)],
    ):
        assert one is not None and again is not None and other is not None
        assert equal(one, again) and not equal(one, other)
    assert torch.equal(torch.rand(3), undisturbed)


def test_training_can_be_cancelled() -> None:
    cancel, seen = threading.Event(), list[float]()

    def progress(text: str, share: float) -> None:
        seen.append(share)
        cancel.set()

    assert estimator.train(Held(*drawn(600)), **SIZES, epochs=50, progress=progress, cancel=cancel) is None
    assert path.train(passages(20), experts=EXPERTS, epochs=50, progress=progress, cancel=cancel) is None
    assert len(seen) == 1 and seen[0] < 0.1


class Kept:
    tensors: Mapping[str, torch.Tensor] | None = None

    def read(self) -> Mapping[str, torch.Tensor] | None:
        return self.tensors

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def drop(self) -> None:
        self.tensors = None


@pytest.mark.long(0.1)
def test_a_cancelled_training_goes_on_to_the_same_net() -> None:
    state, data, cancel = Kept(), passages(20), threading.Event()
    whole = path.train(data, experts=EXPERTS, epochs=6)

    def progress(text: str, share: float) -> None:
        if share > 0.4:
            cancel.set()

    assert path.train(data, experts=EXPERTS, epochs=6, progress=progress, cancel=cancel, state=state) is None
    assert state.tensors, "what was learnt is kept"
    seen: list[float] = []
    again = path.train(data, experts=EXPERTS, epochs=6, progress=lambda text, share: seen.append(share), state=state)
    assert whole is not None and again is not None and equal(whole, again)
    assert min(seen) > 0.4 and state.tensors is None


def test_training_works_where_gradients_are_switched_off() -> None:
    with torch.inference_mode():
        states, probs = drawn(20)
        assert estimator.train(Held(states, probs), **SIZES, width=8, epochs=1) is not None


def test_a_profile_gives_the_nets_back() -> None:
    guessing = Estimator(LAYERS, EXPERTS, HIDDEN, 8)
    walking = RoutingPathNet(LAYERS, EXPERTS, TOKENS, d_ff=32, heads=2, d_kv=8, blocks=1)
    (weights, settings), (more, others) = estimator.to_tensors(guessing), path.to_tensors(walking)
    assert all(name.startswith("estimator.") for name in weights) and all(name.startswith("path.") for name in more)
    nets = {name: tensor.float() for name, tensor in {**weights, **more}.items()}  # as a profile keeps them
    kept: dict[str, object] = {**settings, **others}
    assert equal(estimator.from_tensors(nets, kept), guessing)
    assert equal(path.from_tensors(nets, kept), walking)
    with pytest.raises(KeyError):
        estimator.from_tensors(nets, {})
    with pytest.raises(RuntimeError):
        estimator.from_tensors(more, kept)


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
