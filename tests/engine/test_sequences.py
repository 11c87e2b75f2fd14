"""Each answer is a sequence of its own: its request in records and traces, its exactness, its KV, which outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.policy.predict import Prediction, Predictor, View
from core.profile.trace import FileTrace, TraceHead, TraceWriter
from core.settings.sampling import Sampling
from core.types import StepRecord

TEXT = "Why do caches work?"
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)


def passes(engine: Engine, turned: dict[int, dict[str, object]] | None = None, text: str = TEXT) -> list[StepRecord]:
    """The passes of one answer, each once; `turned` = settings to change after so many tokens."""
    steps: list[StepRecord] = []
    tokens = 0
    for piece in engine.generate(text, GREEDY):
        if piece.step is not None and (not steps or piece.step is not steps[-1]):
            steps.append(piece.step)
        if piece.kind == "token":
            tokens += 1
            engine.change((turned or {}).get(tokens, {}))
    return steps


class Listener(Predictor):
    """Hears of which request every layer is."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def predict(self, view: View) -> Sequence[Prediction]:
        self.heard.append(view.request)
        return ()


def test_records_predictors_and_traces_name_the_request(engine: Engine, tmp_path: Path) -> None:
    engine.change({"predictor": "recent"})
    engine.predictor_host.predictor = listener = Listener()
    shape = engine.shape
    with TraceWriter(tmp_path / "t", TraceHead(shape.layers, shape.experts, shape.top_k)) as writer:
        first, second = passes(engine), passes(engine)
        for step in (*first, *second):
            writer.add(step)
    assert [step.rows for step in first] == [((1, step.tokens),) for step in first]
    assert [step.rows for step in second] == [((2, step.tokens),) for step in second]
    assert listener.heard == [1] * len(first) * shape.layers + [2] * len(second) * shape.layers
    rid = np.concatenate([chunk.rid for chunk in FileTrace(tmp_path / "t").chunks()])
    assert rid.tolist() == [1] * len(first) + [2] * len(second)


def test_what_is_measured_is_no_request(engine: Engine) -> None:
    passes(engine)
    with engine.workbench("test") as bench:
        bench.run([3, 17, 42], bench.kv.fresh())
    assert {step.rows[0][0] for step in passes(engine)} == {2}


def test_a_sequence_is_lossy_by_itself(engine: Engine) -> None:
    """Until what was computed lossily of it is computed again; the next one is not affected."""
    engine.change({"miss": "drop"})
    before = passes(engine)
    lossy = engine.wiring.kv.holder
    assert lossy is not None and not lossy.exact and not all(step.lossless for step in before)
    engine.change({"miss": "wait"})
    assert all(step.exact for step in passes(engine, text="another question"))
    assert not lossy.exact and engine.wiring.kv.holder is not lossy

    engine.change({"miss": "drop"})
    steps = passes(engine, {3: {"miss": "wait"}})
    phases = [step.phase for step in steps]
    again = phases.index("prefill", phases.index("decode"))
    assert [step.exact for step in steps] == [False] * again + [True] * (len(steps) - again)
    assert {step.rows[0][0] for step in steps} == {3}, "what is read again belongs to the same request"
    now = engine.wiring.kv.holder
    assert now is not None and now.exact


def test_a_pass_after_a_lossy_one_is_not_exact_though_nothing_was_changed_in_it(engine: Engine) -> None:
    engine.change({"miss": "drop"})
    steps = passes(engine, {2: {"rho": 0}})  # still on, but nothing may be dropped any more
    assert steps[-1].lossless and not steps[-1].exact


def test_a_kv_outlives_its_answer_and_can_be_continued(engine: Engine) -> None:
    seen: list[torch.Tensor] = []
    hook = engine.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0].clone()))
    longer = list(engine.generate(TEXT, GREEDY))
    hook.remove()
    tokens = [piece.token for piece in longer if piece.token is not None]
    prompt = engine.prompt.tokens(TEXT)
    list(engine.generate(TEXT, Sampling(max_new_tokens=4, temperature=0.0)))
    kv = engine.wiring.kv.holder
    assert kv is not None and kv.length == len(prompt) + 3  # the last token was drawn, not computed
    with engine.workbench("test") as bench:
        for at in (3, 4):
            assert torch.equal(bench.run([tokens[at]], kv, "decode"), seen[at + 1])
        assert kv.length == len(prompt) + 5
        assert bench.kv.fresh() is bench.kv.holder is not kv
        with pytest.raises(AssertionError, match="another sequence"):
            bench.run([tokens[5]], kv, "decode")
