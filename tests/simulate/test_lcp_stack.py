"""LCP's hits at every size in one reading: the same as one cache replayed for each size, whatever is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import TraceError
from core.profile.trace import ArrayTrace
from core.simulate import Config, curves, lcp_stack
from core.simulate.curves import measure_curves, routed_hits
from core.simulate.run import maker

needs_native = pytest.mark.skipif(not lcp_stack.available(), reason="no native code can be compiled here")


def routed(seed: int, tokens: int, layers: int, experts: int, k: int, skew: float = 2.0) -> npt.NDArray[Any]:
    """Ids [T, L, k], some experts asked for more often than others."""
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(tokens, layers, experts)) + skew * rng.random((layers, experts))
    return scores.argsort(-1)[..., ::-1][..., :k].astype(np.int16)


@needs_native
@given(
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 90),
    layers=st.integers(1, 3),
    experts=st.integers(2, 20),
    k=st.integers(1, 4),
    skew=st.sampled_from([0.0, 3.0]),
)
def test_hits_are_those_of_one_cache_for_each_size(
    seed: int, tokens: int, layers: int, experts: int, k: int, skew: float
) -> None:
    k = min(k, experts)
    ids = routed(seed, tokens, layers, experts, k, skew)
    found = routed_hits(ids, experts)
    assert found is not None
    replayed = measure_curves(ArrayTrace(ids, experts), maker(Config("lcp", k)))
    assert np.allclose(found[0], replayed.hit, atol=1e-12) and found[1] == replayed.tokens == tokens


def test_without_native_code_the_last_tokens_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = routed(0, 60, 2, 12, 2)
    monkeypatch.setattr(lcp_stack, "available", lambda: False)
    monkeypatch.setattr(curves, "FEW", 40)
    found = routed_hits(ids, 12)
    assert found is not None and found[1] == 40
    assert np.allclose(found[0], measure_curves(ArrayTrace(ids[-40:], 12), maker(Config("lcp", 2))).hit)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
def test_it_ends_when_nobody_wants_it_any_more(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lcp_stack, "available", lambda: native)
    assert routed_hits(routed(0, 50, 1, 8, 2), 8, lambda: False) is None


def test_what_no_model_asks_for_is_refused() -> None:
    with pytest.raises(TraceError, match="no decoded token"):
        routed_hits(np.zeros((0, 2, 2), np.int16), 8)
    with pytest.raises(ValueError, match="experts 0 to 8 of 8"):
        lcp_stack.places(np.array([[[0, 8]]], np.int16), 8, rho=0.25, omega=128)


@needs_native
@pytest.mark.long
def test_a_long_session_is_read_once() -> None:
    """48 layers of 128 experts, 100 000 tokens, in seconds: each token is read once, and no expert moves further than
    the place where it was."""
    tokens, layers, experts, k = 100_000, 48, 128, 8
    ids = np.tile(routed(0, 4000, layers, experts, k), (tokens // 4000, 1, 1))
    asked = 0

    def wanted() -> bool:
        nonlocal asked
        asked += 1
        return True

    found = lcp_stack.places(ids, experts, rho=0.25, omega=128, wanted=wanted)
    assert found is not None and asked == tokens // lcp_stack.PIECE
    assert (found.sum(1) == tokens * k).all(), "each request is counted once"
    moves = (found * np.arange(1, experts + 1)).sum() / found.sum()
    assert moves < experts / 2, "places passed by a request"
