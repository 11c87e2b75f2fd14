"""Calibration against plain transformers: every part, recomputed token by token from the model's own weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.engine.texts import tokenize
from core.measure.calibrate.gather import calibrate
from core.policy.substitute.entropy import entropy
from core.profile import Profile
from core.profile.trace import Chunk
from core.profile.trace.chunk import RANKED
from core.settings.calibration import CalibrationSettings
from core.simulate import Config
from core.simulate.curves import measure_curves
from core.simulate.run import maker
from tests.profile.conftest import MakeEngine
from tests.profile.oracle import Oracle, Passed
from tests.selection import layered
from tests.simulate.test_curves import Recorded

LONG = "The quick brown fox jumps over the lazy dog, and over the fence behind it. " * 2  # two windows of 128
TEXTS: list[Any] = [
    "An expert that is not asked is not loaded.",
    LONG,
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4, of course."}],
]
BRIEF = CalibrationSettings(path_tokens=60, path_answer=12)
GATHERED = set("counts pairs defaults gate_recall tae maps likeness norms peaks curves".split())
L, E, K, H, WINDOW = 3, 8, 4, 64, 128


@pytest.fixture(scope="module")
def truth(chat_model: Callable[[str], Path]) -> Oracle:
    return Oracle(chat_model("qwen3_moe"))


def windows(engine: Engine) -> list[list[int]]:
    every = [tokenize(engine.prompt.tokenizer, text).ids.tolist() for text in TEXTS]
    return [ids[at : at + WINDOW] for ids in every for at in range(0, len(ids), WINDOW)]


@pytest.fixture(scope="module")
def gathered(engine: Engine, truth: Oracle) -> tuple[Profile, list[list[int]], list[Passed]]:
    read = windows(engine)
    profile = calibrate(engine, TEXTS, parts=GATHERED, source="three texts")
    return profile, read, [truth.read(ids) for ids in read]


def joined(passed: list[Passed], name: str, layer: int) -> torch.Tensor:
    return torch.cat([getattr(one, name)[layer] for one in passed])


def test_what_it_says_of_itself(gathered: tuple[Profile, list[list[int]], list[Passed]]) -> None:
    profile, read, _ = gathered
    assert (profile.layers, profile.experts, profile.top_k, profile.hidden) == (L, E, K, H)
    assert profile.tokens == sum(map(len, read)) and profile.source == "three texts" and len(read) == 4
    assert set(profile.parts()) == GATHERED == set(profile.settings["gathered"])  # type: ignore[call-overload]
    assert profile.settings["dtype"] == "float32"


def test_counts_and_pairs(gathered: tuple[Profile, list[list[int]], list[Passed]]) -> None:
    profile, _, passed = gathered
    for layer in range(L):
        ids, weights = joined(passed, "ids", layer), joined(passed, "weights", layer)
        shares = torch.zeros(len(ids), E).scatter_(1, ids, weights / weights.sum(-1, keepdim=True))
        for i in range(E):
            assert profile.counts[layer, i] == (ids == i).any(-1).sum()
            for j in range(E):
                both = ((ids == i).any(-1) & (ids == j).any(-1)).sum() * (i != j)
                least = torch.minimum(shares[:, i], shares[:, j]).sum() * (i != j)
                assert profile.pairs[layer, i, j] == both
                assert profile.pairs_weighted[layer, i, j] == pytest.approx(float(least), rel=1e-4, abs=1e-5)


def test_default_vectors(gathered: tuple[Profile, list[list[int]], list[Passed]]) -> None:
    profile, _, passed = gathered
    assert profile.defaults is not None and profile.defaults.shape == (L, E, H)
    for layer in range(L):
        ids, outs = joined(passed, "ids", layer), joined(passed, "outs", layer)
        for expert in range(E):
            at = ids == expert
            mean = outs[at].mean(0) if at.any() else torch.zeros(H)
            np.testing.assert_allclose(profile.defaults[layer, expert], mean.numpy(), rtol=2e-3, atol=2e-5)
    assert np.abs(profile.defaults).max() > 1e-3


def test_likeness(gathered: tuple[Profile, list[list[int]], list[Passed]], truth: Oracle) -> None:
    """Every expert on every input: there are fewer than are kept."""
    profile, read, passed = gathered
    assert profile.likeness is not None and sum(map(len, read)) <= 256
    for layer in range(L):
        experts, given = truth.blocks[layer].experts, joined(passed, "hidden", layer)
        with torch.no_grad():
            outs = torch.stack([torch.stack([truth.expert(experts, e, x) for x in given]) for e in range(E)])
        expected = torch.cosine_similarity(outs[:, None], outs[None], dim=-1).mean(-1)
        np.testing.assert_allclose(profile.likeness[layer], expected.numpy(), atol=2e-3)
    assert profile.likeness[:, range(E), range(E)].min() == 1 and np.abs(profile.likeness).min() < 0.2


def test_output_norms(gathered: tuple[Profile, list[list[int]], list[Passed]]) -> None:
    profile, _, passed = gathered
    assert profile.norms is not None and profile.norms.min() > 0
    for layer in range(L):
        ids, lengths = joined(passed, "ids", layer), joined(passed, "outs", layer).norm(dim=-1)
        for expert in range(E):
            assert profile.norms[layer, expert] == pytest.approx(float(lengths[ids == expert].mean()), rel=1e-4)


def test_largest_outputs(gathered: tuple[Profile, list[list[int]], list[Passed]]) -> None:
    profile, _, passed = gathered
    for layer in range(L):
        ids, largest = joined(passed, "ids", layer), joined(passed, "outs", layer).abs().amax(-1)
        for expert in range(E):
            assert profile.peaks[layer, expert] == pytest.approx(float(largest[ids == expert].max()), rel=1e-4)


def test_the_first_tokens_of_every_window_count_less(engine: Engine, truth: Oracle) -> None:
    profile = calibrate(engine, TEXTS, parts={"pairs"}, warmup=10)
    passed = [truth.read(ids) for ids in windows(engine)]
    for layer in range(L):
        expected = np.zeros((E, E))
        for one in passed:
            for at, chosen in enumerate(one.ids[layer].tolist()):
                expected[np.ix_(chosen, chosen)] += min(1.0, (at + 1) / 10)
        np.fill_diagonal(expected, 0.0)
        np.testing.assert_allclose(profile.pairs[layer], expected, rtol=1e-5)


def test_hit_curves_token_by_token(gathered: tuple[Profile, list[list[int]], list[Passed]], truth: Oracle) -> None:
    """The routing and what the routers say early, as a trace, through the same measurement."""
    profile, _, passed = gathered
    ids = torch.stack([joined(passed, "ids", layer) for layer in range(L)], 1).numpy()
    last = joined(passed, "hidden", L - 1)
    rows = []
    for layer in range(L):
        states = joined(passed, "hidden", layer - 1) if layer else torch.cat([last[:1], last[:-1]])
        order = truth.route(truth.blocks[layer], states)[0].argsort(dim=-1, descending=True, stable=True).tolist()
        for token in range(0 if layer else 1, len(ids)):
            rows += [(token, -1, layer, expert, 1 - rank / E) for rank, expert in enumerate(order[token])]
    some = np.ones(len(ids), np.int32)
    chunk = Chunk(ids.astype(np.uint8), some, some > 0, some, ranked=np.array(rows, RANKED))
    expected = measure_curves(Recorded([chunk], L, E, K), maker(Config("lcp", K)))
    found = profile.curves()
    assert found is not None and found.tokens == len(ids) == expected.tokens
    np.testing.assert_allclose(found.hit, expected.hit, atol=1e-6)
    np.testing.assert_allclose(found.chosen, expected.chosen, atol=0.02)
    np.testing.assert_allclose(found.cached, expected.cached, atol=0.02)


def test_gate_recall_and_similarity(gathered: tuple[Profile, list[list[int]], list[Passed]], truth: Oracle) -> None:
    profile, _, passed = gathered
    assert np.isnan(profile.gate_recall[0])
    for layer in range(1, L):
        before, now = joined(passed, "hidden", layer - 1), joined(passed, "hidden", layer)
        told, true = truth.route(truth.blocks[layer], before)[2], joined(passed, "ids", layer)
        hits = sum(len({*a} & {*b}) for a, b in zip(told.tolist(), true.tolist(), strict=True))
        assert profile.gate_recall[layer] == pytest.approx(hits / true.numel(), rel=1e-5)
        cosine = torch.cosine_similarity(before, now, dim=-1).mean()
        assert profile.similarity[layer - 1] == pytest.approx(float(cosine), rel=1e-4)
    assert 0 < profile.gate_recall[1:].min() < 1
    assert profile.default_recall is not None and np.isnan(profile.default_recall[0])
    assert profile.default_recall[1:].min() > 0 and not np.array_equal(
        profile.default_recall[1:], profile.gate_recall[1:]
    )


def test_entropy_percentiles(gathered: tuple[Profile, list[list[int]], list[Passed]]) -> None:
    profile, _, passed = gathered
    for layer in range(L):
        values = entropy(joined(passed, "weights", layer).double().numpy())
        exact = np.percentile(values, np.arange(101), method="inverted_cdf")
        np.testing.assert_allclose(profile.tae[layer], exact, atol=2e-4)
        softer = np.percentile(
            entropy(joined(passed, "weights", layer).double().numpy(), 1.2), np.arange(101), method="inverted_cdf"
        )
        np.testing.assert_allclose(profile.tae_tempered[layer, -1], softer, atol=2e-4)


def test_maps_and_their_embeddings(gathered: tuple[Profile, list[list[int]], list[Passed]]) -> None:
    """Not full: one for each text as it is read, its mean, then one for each token, in order."""
    profile, _, passed = gathered
    assert profile.maps is not None and profile.map_keys is not None
    keys, maps = [], []
    for one in passed:
        each = torch.stack(one.probs, 1)
        keys += [one.embedded.mean(0, keepdim=True), one.embedded]
        maps += [each.mean(0, keepdim=True), each]
    np.testing.assert_allclose(profile.map_keys, torch.cat(keys).numpy(), rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(profile.maps, torch.cat(maps).numpy(), rtol=2e-3, atol=1e-4)


@pytest.mark.long(0.1)
@pytest.mark.parametrize("arch", layered(["gpt_oss", "deepseek_v3", "mixtral"], quick=lambda arch: arch == "gpt_oss"))
def test_other_architectures(arch: str, make_engine: MakeEngine) -> None:
    """Biases in experts, grouped routers with a correction, another top-k: what must hold for any model."""
    engine = make_engine(arch)
    profile = calibrate(engine, TEXTS[:1], parts=GATHERED)
    shape, tokens = engine.shape, profile.tokens
    assert profile.counts is not None and profile.pairs is not None and profile.defaults is not None
    assert profile.counts.sum(1).tolist() == [tokens * shape.top_k] * shape.layers
    assert profile.pairs.sum((1, 2)).tolist() == [tokens * shape.top_k * (shape.top_k - 1)] * shape.layers
    np.testing.assert_array_equal(profile.pairs, profile.pairs.transpose(0, 2, 1))
    assert ((np.abs(profile.defaults).max(-1) > 0) == (profile.counts > 0)).all()
    assert profile.maps is not None and np.isfinite(profile.maps).all() and len(profile.maps) == tokens + 1
    np.testing.assert_allclose(profile.maps.astype(float).sum(-1), 1, atol=5e-3)
    assert profile.gate_recall is not None and (profile.gate_recall[1:] >= 0).all()


@pytest.mark.long(0.1)
def test_the_same_texts_and_seed_give_the_same_profile(engine: Engine, make_engine: MakeEngine) -> None:
    parts, other = (
        {"counts", "defaults", "maps", "estimator", "path"},
        make_engine(settings={"budget": "100%", "eviction": "lfu", "scope": "global"}),
    )
    first, again = (calibrate(one, TEXTS[2:], parts=parts, settings=BRIEF) for one in (engine, other))
    assert set(first.parts()) == parts
    for name in ("counts", "defaults", "maps", "map_keys"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert first.nets.keys() == again.nets.keys()
    assert all(torch.equal(first.nets[name], again.nets[name]) for name in first.nets)
