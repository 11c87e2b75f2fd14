"""The entropy of gate weights: numpy, torch and Python numbers say the same, and recorded figures keep their bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from core.policy.substitute.entropy import entropy, entropy_of_token


def gates(experts: int) -> np.ndarray:
    """fp64 [500, k] as routers give them, in fp32: peaked and flat, with zeros, not all renormalised."""
    rng = np.random.default_rng(experts)
    weights = rng.dirichlet([0.4] * experts, 500) * rng.choice([1.0, 0.3, 2.5], (500, 1))
    weights[:100][rng.random((100, experts)) < 0.5] = 0.0
    weights[100:110], weights[110:120] = 1.0 / experts, np.eye(experts)[0]
    return weights.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("experts", [1, 2, 3, 4, 6, 8, 10, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_arrays_tensors_and_numbers_agree(experts: int, temperature: float) -> None:
    weights = gates(experts)
    found = entropy(weights, temperature)
    assert found.dtype == np.float64 and found.shape == (500,) and ((found >= 0) & (found <= 1)).all()
    tensor = entropy(torch.from_numpy(weights), temperature, torch)
    assert tensor.dtype == torch.float64
    np.testing.assert_allclose(tensor.numpy(), found, rtol=0, atol=1e-14)
    np.testing.assert_allclose([entropy_of_token(row, temperature) for row in weights.tolist()], found, atol=1e-14)


@pytest.mark.parametrize("experts", [2, 4, 8])
def test_the_figures_of_profiles_and_recordings_keep_their_bits(experts: int) -> None:
    """In these very steps profiles and recordings have always been computed; leading dimensions change nothing."""
    weights = gates(experts)
    shares = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    expected = np.clip(-(shares * logs).sum(-1) / max(np.log(experts), 1e-30), 0.0, 1.0)
    assert entropy(weights).tobytes() == expected.tobytes()
    assert entropy(weights.reshape(5, 100, experts)).tobytes() == expected.tobytes()


def test_by_hand() -> None:
    weights = [0.3, 0.1]
    bits = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert entropy_of_token(weights) == pytest.approx(bits) == float(entropy(np.array(weights)))
