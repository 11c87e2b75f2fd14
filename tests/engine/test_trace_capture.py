"""What is kept for a recording is what the model and the predictor said; nothing is kept unless it was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from core.engine import Engine
from core.settings.sampling import Sampling
from core.types import StepRecord

TEXT = "Why do caches work?"


def answered(engine: Engine) -> list[StepRecord]:
    """The passes of one answer, each once."""
    steps: list[StepRecord] = []
    for piece in engine.generate(TEXT, Sampling(max_new_tokens=5)):
        if piece.step is not None and (not steps or piece.step is not steps[-1]):
            steps.append(piece.step)
    return steps


def test_distributions_guesses_and_tokens_of_every_pass(engine: Engine) -> None:
    shape = engine.shape
    engine.change({"predictor": "gate"})
    engine.keep(probs=True, ranks=True, tokens=True)
    steps = answered(engine)
    for step in steps:
        assert step.probs is not None and step.ranked is not None and step.tok is not None
        assert step.probs.shape == (shape.layers, step.tokens, shape.experts) and step.probs.dtype == np.float16
        assert step.probs.sum(2) == pytest.approx(1.0, abs=0.01)
        likeliest = -np.sort(-step.probs, 2)[..., : shape.top_k]  # of these the router takes the experts
        assert np.take_along_axis(step.probs, step.ids.astype(np.int64), 2) == pytest.approx(likeliest, abs=1e-3)
        assert (np.diff(step.ranked["at"]) >= 0).all() and set(step.ranked["at"].tolist()) == set(range(shape.layers))
        assert (step.ranked["layer"] == (step.ranked["at"] + 1) % shape.layers).all()
        assert (step.ranked["of"] == 0).all() and ((step.ranked["score"] >= 0) & (step.ranked["score"] <= 1)).all()
    assert np.concatenate([s.tok for s in steps if s.tok is not None]).tolist()[
        : steps[0].tokens
    ] == engine.prompt.tokens(TEXT)
    engine.keep(probs=False, ranks=False, tokens=False)
    assert all(s.probs is None and s.ranked is None and s.tok is None for s in answered(engine))


def test_keeping_changes_no_token(engine: Engine) -> None:
    plain = [piece.token for piece in engine.generate(TEXT, Sampling(max_new_tokens=5)) if piece.kind == "token"]
    engine.keep(probs=True, ranks=True, tokens=True)
    again = [piece.token for piece in engine.generate(TEXT, Sampling(max_new_tokens=5)) if piece.kind == "token"]
    assert again == plain and plain


def test_prefetching_that_does_not_pay_is_paused_and_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.policy.prefetch.throttle.WINDOW", 2)
    monkeypatch.setattr("core.policy.prefetch.throttle.REST", 3)
    monkeypatch.setattr("core.cache.counts.PrefetchCost.net_ms", lambda *_: -1e6)
    engine.change({"predictor": "recent", "prefetch_auto": True})
    steps = [s for _ in range(2) for s in answered(engine) if s.phase == "decode"]
    assert [s.predict_ms > 0 for s in steps] == [True] * 4 + [False] * 3 + [True]
    assert [text for _, text in engine.parts.telemetry.marks if text.startswith("prefetching")] == [
        "prefetching paused: it cost 1000000.00 ms a token more than it saved; next try in 3 tokens",
        "prefetching is tried again",
    ]
    engine.change({"prefetch_auto": False})
    assert all(s.predict_ms > 0 for s in answered(engine) if s.phase == "decode")


def test_the_net_figure_is_there_only_while_something_is_prefetched(engine: Engine) -> None:
    assert all(s.net_ms == s.predict_ms == 0.0 for s in answered(engine))
    engine.change({"predictor": "all_next"})
    steps = answered(engine)
    assert any(s.net_ms != 0.0 for s in steps) and all(s.predict_ms > 0.0 for s in steps)
    stats = [piece.stats for piece in engine.generate(TEXT, Sampling(max_new_tokens=5)) if piece.stats is not None]
    assert stats[0].net_ms != 0.0
