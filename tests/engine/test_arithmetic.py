"""Which arithmetic computes a load, and its distance from the reference: measured, kept, and in all that is told of an
answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.engine import Engine, arithmetic
from core.engine.arithmetic import Arithmetic, Distance, kept_in
from core.engine.batch_request import BatchRequest
from core.errors import SettingError
from core.measure.distance import compare, measure, measured
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.system.native.compile import widths
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not widths(), reason="no kernels for this CPU")

GREEDY = Sampling(max_new_tokens=3, temperature=0.0)


def load(model: Path | str = "demo", **how: object) -> Engine:
    settings = Settings({"budget": "100%", "predictor": "none", "link": "own"})
    return Engine.load(LoadSpec.checked(str(model), settings, arithmetic="fast", context=128, **how))


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    engine = load(sequences=4)
    yield engine
    engine.unload()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    arithmetic.keep_in(tmp_path / "distances.json")
    yield tmp_path / "distances.json"
    arithmetic.keep_in(None)


def test_a_distance_is_measured_kept_and_in_every_answer(demo: Engine, kept: Path) -> None:
    *_, end = demo.generate("The ferry left", GREEDY)
    assert end.stats is not None
    assert (end.stats.arithmetic, end.stats.exact, end.stats.closeness, end.stats.distance_kl) == (
        "fast",
        True,
        None,
        None,
    )
    found = measured(demo, 24)
    assert found.tokens == 24 and 0 < found.kl <= found.kl_most < 0.5 and 0 < found.closeness < 0.5
    assert abs(math.log(found.perplexity / found.reference_perplexity)) < 0.1
    *_, end = demo.generate("The ferry left", GREEDY)
    assert end.stats is not None
    assert (end.stats.closeness, end.stats.distance_kl, end.stats.distance_tokens) == (found.closeness, found.kl, 24)
    manifest = demo.manifest()
    assert (manifest["arithmetic"], manifest["fallback"], manifest["exact"]) == ("fast", "", True)
    assert manifest["closeness"] == found.closeness and manifest["distance"] == found.facts()
    assert measure(demo, 24) == found, "the same bits again"

    assert arithmetic.known(demo.loaded.plan, demo.model_hash) == found
    assert arithmetic.known(demo.loaded.plan, "another model") is None
    assert [(of["model"], of["format"], one) for of, one in kept_in(kept)] == [("demo", "checkpoint", found)]


def test_a_later_load_has_the_distance(demo: Engine, kept: Path) -> None:
    found = Distance(10, 1e-4, 1e-3, 9, 5.0, 5.1, 0.01)
    arithmetic.keep(demo.loaded.plan, demo.model_hash, found)
    assert Engine(demo.loaded, demo.wiring).arithmetic == Arithmetic("fast", distance=found)


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.pop("kl"),
        lambda row: row.update(kl=math.nan),
        lambda row: row.update(agreed=11),
        lambda row: row.update(tokens=0, agreed=0),
    ],
)
def test_a_damaged_row_is_not_used(demo: Engine, kept: Path, damage: object) -> None:
    arithmetic.keep(demo.loaded.plan, demo.model_hash, Distance(10, 1e-4, 1e-3, 9, 5.0, 5.1, 0.01))
    assert arithmetic.known(demo.loaded.plan, demo.model_hash) is not None
    content = json.loads(kept.read_text())
    damage(next(iter(content.values())))  # type: ignore[operator]
    kept.write_text(json.dumps(content))
    assert arithmetic.known(demo.loaded.plan, demo.model_hash) is None and kept_in(kept) == []
    kept.write_text("{")
    assert arithmetic.known(demo.loaded.plan, demo.model_hash) is None


def test_the_reference_computes_what_the_fast_arithmetic_does_not_know(tmp_path: Path) -> None:
    engine = load(save_tokenizer(make_checkpoint("qwen3_moe", tmp_path)), blocks=2)
    try:
        assert engine.arithmetic == Arithmetic("reference", engine.arithmetic.fallback)
        assert "whole experts" in engine.arithmetic.fallback
        manifest = engine.manifest()
        assert (manifest["arithmetic"], manifest["fallback"]) == ("reference", engine.arithmetic.fallback)
        assert manifest["exact"] is False and engine.closeness == engine.loaded.plan.closeness
        with pytest.raises(SettingError, match="whole experts"):
            measure(engine, 8)
    finally:
        engine.unload()


def test_answers_of_a_batch_have_the_bits_of_each_alone(demo: Engine) -> None:
    asked = ["The ferry left at dawn", "On", "What does heapq.heappush do? It"]
    sampling = Sampling(max_new_tokens=4, temperature=0.0, logprobs=0)
    found: dict[int, list[float]] = {}
    for one in demo.generate_many([BatchRequest(at, text, sampling) for at, text in enumerate(asked)]):
        if one.piece is not None and one.piece.logprob is not None:
            found.setdefault(int(str(one.key)), []).append(one.piece.logprob.logprob)
        if one.piece is not None and one.piece.stats is not None:
            assert one.piece.stats.exact and one.piece.stats.closeness in (None, demo.closeness)
    assert demo.one_at_a_time == "", "the trial found no differing bit"
    alone = [[p.logprob.logprob for p in demo.generate(text, sampling) if p.logprob is not None] for text in asked]
    assert [found[at] for at in range(3)] == alone


def test_what_iscompared() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], dtype=torch.float64).log()
    q = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]], dtype=torch.float64).log()
    nll, nll_fast, kl, agreed, _ = compare(p, q, torch.tensor([0, 1])).tolist()
    assert nll == pytest.approx([math.log(2), 0.0]) and nll_fast == pytest.approx([math.log(4), math.log(4)])
    assert kl == pytest.approx([0.5 * math.log(2) + 0.25 * math.log(0.5), math.log(4)])
    assert agreed == [0.0, 0.0]
