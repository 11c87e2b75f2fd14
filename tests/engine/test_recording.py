"""What is recorded of a pass: what the model and the predictors said, also those beside; only when asked for."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.measure.calibrate.gather import calibrate
from core.metrics.record import ShadowPredictions
from core.runtime.prediction.shadows import recorded
from core.settings.config import Settings
from core.settings.sampling import Sampling
from core.types import StepRecord
from tests.architectures.trial import known, random_model, save
from tests.decoded import passes_of
from tests.engine.profiles import drawn_profile
from tests.loaded import loaded
from tests.selection import layered
from tests.simulate.test_engine import restart

TEXT = "Why do caches work?"
Heard = Callable[[], tuple[list[StepRecord], list[torch.Tensor]]]


def answered(engine: Engine) -> list[StepRecord]:
    return passes_of(engine.generate(TEXT, Sampling(max_new_tokens=5)))


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


def test_prefetching_is_compared_with_none_and_that_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FEWEST": 1, "LEAD": 0, "LEARNING": 0, "BLOCK": 2, "MOST": 2, "SURE": 1e9}.items():
        monkeypatch.setattr(f"core.policy.comparison.{name}", value)
    monkeypatch.setattr("core.policy.throttle.REST", 3)
    monkeypatch.setattr("core.policy.throttle.LITTLE", 0.0)  # so tiny a model waits for next to nothing
    engine.change({"predictor": "gate", "prefetch_auto": True})
    steps, hooked = list[StepRecord](), list[int]()
    for _ in range(3):
        for piece in engine.generate(TEXT, Sampling(max_new_tokens=5)):
            step = piece.step
            if step is not None and step.phase == "decode" and (not steps or step is not steps[-1]):
                steps.append(step)
                hooked.append(hooks(engine))
    without, asked, rest = [False] * 2, [True] * 2, [False] * 3
    assert [s.predict_ms > 0 for s in steps] == [*without, *asked, *rest, *without, *asked, False]
    assert [n > min(hooked) for n in hooked] == [s.predict_ms > 0 for s in steps], "none, so that nothing waits for it"
    said = [text for _, text in engine.parts.telemetry.marks if text.startswith("prefetching")]
    assert [text.split(":")[0] for text in said] == ["prefetching paused, not told apart"] * 2
    assert "over 2 tokens each; compared again in 3 tokens" in said[0] and "in 6 tokens" in said[1]
    engine.change({"prefetch_auto": False})
    assert all(s.predict_ms > 0 for s in answered(engine) if s.phase == "decode")


def test_the_net_figure_is_there_only_while_something_is_prefetched(engine: Engine) -> None:
    assert all(s.net_ms == s.predict_ms == 0.0 for s in answered(engine))
    engine.change({"predictor": "all_next"})
    steps = answered(engine)
    assert any(s.net_ms != 0.0 for s in steps) and all(s.predict_ms > 0.0 for s in steps)
    stats = [piece.stats for piece in engine.generate(TEXT, Sampling(max_new_tokens=5)) if piece.stats is not None]
    assert stats[0].net_ms != 0.0


ASKED = {"gate", "stride", "expert_map"}  # of those that routing alone does not tell, the ones that need no profile


def named_by(beside: ShadowPredictions | None, name: str) -> list[tuple[int, int, int, float]]:
    """The predictions of one predictor in a pass: (at, layer, expert, score)."""
    by = [one for one, _ in beside.predictors].index(name)
    rows = beside.ranked[beside.ranked["by"] == by]
    return [(at, layer, expert, score) for _, _, at, layer, expert, score in rows.tolist()]


def hooks(engine: Engine) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in engine.model.modules())


@pytest.fixture
def heard(engine: Engine) -> Heard:
    """Answers from a cache as after a load: its passes and their logits."""

    def ask() -> tuple[list[StepRecord], list[torch.Tensor]]:
        restart(engine)
        logits: list[torch.Tensor] = []
        with engine.model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.clone())):
            return answered(engine), logits

    return ask


def test_other_predictors_are_recorded_beside_an_answer_that_stays_the_same(engine: Engine, heard: Heard) -> None:
    engine.change({"predictor": "gate"})
    engine.keep(probs=False, ranks=True, tokens=False)
    in_use, _ = heard()
    engine.keep(probs=False, ranks=False, tokens=False)
    engine.change({"predictor": "none"})
    plain, logits = heard()
    watched = hooks(engine)
    assert all(step.beside is None and step.record_ms == 0.0 for step in plain)
    engine.change({"telemetry": "lab"})
    steps, again = heard()
    assert len(steps) == len(plain) == len(in_use) > 3
    assert all(torch.equal(one, other) for one, other in zip(logits, again, strict=True))
    for off, on, used in zip(plain, steps, in_use, strict=True):
        assert on.outcome.tolist() == off.outcome.tolist() and on.prefetch_issued == on.predict_ms == 0
        assert on.beside is not None and {name for name, _ in on.beside.predictors} == ASKED
        assert used.ranked is not None and on.record_ms > 0.0
        assert named_by(on.beside, "gate") == [(at, *rest) for _, at, *rest in used.ranked.tolist()]
        assert named_by(on.beside, "stride")
    engine.change({"telemetry": "on"})
    after, logits_after = heard()
    assert all(step.beside is None and step.record_ms == 0.0 for step in after) and hooks(engine) == watched
    assert [step.outcome.tolist() for step in after] == [step.outcome.tolist() for step in plain]
    assert all(torch.equal(one, other) for one, other in zip(logits, logits_after, strict=True))


def test_a_profile_brings_those_that_need_it_with_their_parameters_as_set(engine: Engine) -> None:
    on, profile = Settings({"telemetry": "lab", "predictor.width": 3}), drawn_profile(engine)
    without = {name: dict(params) for name, params in recorded(on, None)}
    assert without.keys() == ASKED and without["gate"]["width"] == 3
    needy = {"default_vectors", "estimator", "hybrid", "routing_path"}
    assert {name for name, _ in recorded(on, profile)} == ASKED | needy
    assert recorded(Settings(), profile) == recorded(on.with_({"telemetry": "off"}), profile) == ()


def test_what_was_named_in_a_pass_that_broke_off_is_not_the_next_one_s(engine: Engine) -> None:
    engine.change({"telemetry": "lab"})
    steps = answered(engine)
    shadows = engine.parts.prediction.capture.shadows
    with torch.inference_mode():
        shadows.begin((0, [1]))
    seen = steps[-1].beside
    assert seen is not None and len(seen.ranked)
    empty, _ = shadows.take()
    assert not np.isin(empty.ranked["at"], range(engine.shape.layers)).any()


@pytest.mark.long(0.1)
@pytest.mark.parametrize(
    "model_type",
    layered([name for name in ("hy_v4", "qwen4_exp_text") if known(name)], quick=lambda name: name == "hy_v4"),
)
def test_a_model_with_several_residual_streams_is_recorded_midway(model_type: str, tmp_path: Path) -> None:
    every = {"mlp_layer_types": ["sparse"] * 4} if model_type == "hy_v4" else {}
    path = save(random_model(model_type, **every), tmp_path)
    with loaded(path, {"budget": "50%"}, dtype="float32", context=128) as engine:
        plain = [piece.token for piece in engine.generate("a b", Sampling(max_new_tokens=6))]
        tokens, steps = [], []
        for piece in engine.generate("a b", Sampling(max_new_tokens=6)):
            tokens.append(piece.token)
            steps.append(piece.step)
            if len(tokens) == 3:
                engine.change({"telemetry": "lab"})
        assert tokens == plain
        assert [step is not None and step.beside is not None for step in steps[1:-1]] == [False] * 2 + [True] * 4
        assert calibrate(engine, ["A few words to read. " * 4], parts={"defaults", "gate_recall", "curves"}).tokens > 60
