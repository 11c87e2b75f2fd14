"""Routers that the program asks for a predictor: they answer as transformers' do, and layers whose predictions would
fetch nothing are computed without a call of the predictor, and all is as if it had been called."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.cache.expert_cache import ExpertCache
from core.engine import Engine
from core.runtime.moe_step import MoEStep
from core.runtime.prediction.view import EngineView
from core.runtime.prefetcher import Prefetcher
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from tests.checkpoints import make_checkpoint
from tests.loaded import unloading
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": dict(mlp_only_layers=[1]),
    "glm4_moe": dict(n_group=2, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5),
    "deepseek_v3": {},
    "gpt_oss": {},
    "minimax_m2": {},  # whose routers take a bias of their block
}
PLANS: dict[str, dict[str, object]] = {
    "gate": {"predictor": "gate"},
    "last state": {"predictor": "gate", "predictor.gate.last_state": True},
    "two ahead": {"predictor": "gate", "predictor.distance": 2, "predictor.width": 1},
    "deadline": {"predictor": "gate", "prefetch_deadline": True},
}


def load(path: Path | str, budget: str, **how: object) -> Engine:
    settings = Settings({"budget": budget, "predictor": "gate", "link": "own", "eviction": "lru", "scope": "layer"})
    return Engine.load(LoadSpec.checked(str(path), settings, **{"arithmetic": "fast", "context": 128} | how))


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with unloading(load("demo", "85%")) as engine:
        yield engine


def answer(engine: Engine, tokens: int) -> list[Any]:
    """The text, the requests of each decoded token, and what was prefetched, of an answer after a prompt."""
    with engine.workbench("A test begins.") as bench:
        bench.start_over()
    found, seen = list[Any](), list[object]()
    for piece in engine.generate("The ferry left", Sampling(max_new_tokens=tokens, temperature=0.0)):
        found.append(piece.text)
        if (step := piece.step) is not None and not any(step is one for one in seen):
            seen.append(step)
            counts = step.prefetch_issued, step.prefetch_used, step.prefetch_wasted, step.evicted_bytes
            found.append((step.ids.tolist(), step.expert.tolist(), step.outcome.tolist(), counts))
    return found


@pytest.mark.parametrize("arch", layered(KINDS, quick=lambda arch: arch in ("qwen2_moe", "glm4_moe", "minimax_m2")))
def test_it_asks_as_hooks_would(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ask, asked = save_tokenizer(make_checkpoint(arch, tmp_path, **KINDS[arch])), EngineView.ask, list[Any]()

    def heard(view: EngineView, layers: Sequence[int], *state: Any) -> Any:
        scores = ask(view, layers, *state)
        if len(view.ids) == 1:
            asked.append((view.layer, tuple(layers), view._answers is not None, scores))
        return scores

    monkeypatch.setattr(EngineView, "ask", heard)
    monkeypatch.setattr(Prefetcher, "skips", False)
    with unloading(load(path, "100%", dtype="float32")) as engine:
        engine.change({"predictor.distance": 2, "predictor.gate.last_state": True})
        asked.clear()  # what passes that the load timed have asked
        text, by_program = answer(engine, 8)[0], [*asked]
        asked.clear()
        assert engine.wiring.answering.step.prefetcher is not None
        engine.wiring.answering.step.prefetcher.program_asks = False
        assert answer(engine, 8)[0] == text
        assert [own for *_, own, _ in by_program] == [True] * len(asked)
        assert asked and not any(own for *_, own, _ in asked)
        for (layer, layers, _, found), (*of, _, wanted) in zip(by_program, asked, strict=True):
            assert [layer, layers] == of
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
            k = engine.shape.top_k
            assert np.array_equal(np.argsort(-found)[:, :k], np.argsort(-wanted)[:, :k])


@pytest.mark.parametrize("plan", PLANS)
def test_layers_that_would_fetch_nothing(plan: str, demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have landed before the next layer, so that no event depends on time."""
    native, computed, prefetch = list[int](), MoEStep.computed, ExpertCache.prefetch

    def heard(step: MoEStep, first: int, chosen: Sequence[list[int]]) -> None:
        native.extend(range(first, first + len(chosen)))
        computed(step, first, chosen)

    def landed(cache: ExpertCache, *args: Any) -> None:
        prefetch(cache, *args)
        while not cache.quiet():
            time.sleep(0)

    monkeypatch.setattr(MoEStep, "computed", heard)
    monkeypatch.setattr(ExpertCache, "prefetch", landed)
    plain = {name: demo.settings[name] for name in ("predictor.distance", "predictor.width")}
    demo.change(PLANS[plan])
    try:
        wanted = answer(demo, 40)
        assert 100 < len(native) < 39 * demo.shape.layers
        native.clear()
        monkeypatch.setattr(Prefetcher, "skips", False)
        assert answer(demo, 40) == wanted
        assert not native
    finally:
        demo.change(plain | {"predictor.gate.last_state": False, "prefetch_deadline": False})
