"""The arithmetic of a load: its distance is measured, kept and told; it leaves torch's threads to others."""

import json
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch

from core.engine import Engine, arithmetic, program_trial, wiring
from core.engine.arithmetic import BOUND, ENOUGH, ROUNDING_BF16, Arithmetic, Distance, kept_in
from core.engine.batch_request import BatchRequest
from core.engine.distance import PIECES, compare, distance_of, within
from core.engine.program_trial import MEASURING
from core.errors import SettingError
from core.measure.distance import measure, measured
from core.memory.store import Cancelled
from core.runtime.warmup import choose_threads
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.param import declared
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from tests.checkpoints import make_checkpoint
from tests.loaded import loaded, unloading
from tests.logged import Logged
from tests.threads import torch_threads
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")

GREEDY = Sampling(max_new_tokens=3, temperature=0.0)
SMALL = Distance(10, 1e-4, 1e-5, 1e-3, 9, 5.0, 5.1, 0.01)


def load(model: Path | str = "demo", **how: object) -> Engine:
    settings = Settings({"budget": "100%", "predictor": "none", "link": "own"})
    return Engine.load(LoadSpec.checked(str(model), settings, context=128, **{"arithmetic": "fast", **how}))


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:  # other modules' loads have measured it, perhaps
        patch.setattr(arithmetic, "_of_process", {})
        patch.setattr(arithmetic, "_file", None)
        engine = load(sequences=4)
    yield engine
    engine.unload()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    arithmetic.keep_in(file := tmp_path / "not there yet" / "distances.json")
    yield file
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
    arithmetic.keep(demo.loaded.plan, demo.model_hash, SMALL)
    assert Engine(demo.loaded, demo.wiring).arithmetic == Arithmetic("fast", distance=SMALL)


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
    arithmetic.keep(demo.loaded.plan, demo.model_hash, SMALL)
    assert arithmetic.known(demo.loaded.plan, demo.model_hash) is not None
    content = json.loads(kept.read_text())
    damage(next(iter(content.values())))  # type: ignore[operator]
    kept.write_text(json.dumps(content))
    assert arithmetic.known(demo.loaded.plan, demo.model_hash) is None and kept_in(kept) == []
    kept.write_text("{")
    assert arithmetic.known(demo.loaded.plan, demo.model_hash) is None


def test_the_reference_computes_what_the_fast_arithmetic_does_not_know(tmp_path: Path) -> None:
    """Here blocks of an expert whose second matrix has not whole blocks of a scale in each."""
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path))
    with unloading(load(path, format="int8", blocks=2)) as engine:
        assert engine.arithmetic == Arithmetic("reference", engine.arithmetic.fallback)
        assert "experts of this form" in engine.arithmetic.fallback
        manifest = engine.manifest()
        assert (manifest["arithmetic"], manifest["fallback"]) == ("reference", engine.arithmetic.fallback)
        assert manifest["exact"] is True and engine.closeness == engine.loaded.plan.closeness == 0.0
        with pytest.raises(SettingError, match="experts of this form"):
            measure(engine, 8)


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


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "tiny"))


class Seen:
    def __init__(self, cancel: threading.Event | None = None) -> None:
        self.cancel, self.measured = cancel, 0

    def __call__(self, text: str, share: float) -> None:
        self.measured += text == MEASURING
        if self.measured and self.cancel is not None:
            self.cancel.set()


def test_by_default_the_demo_model_is_fast_by_measurement(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_trial, "PIECES", PIECES)
    assert declared(LoadSpec)["arithmetic"].default == LoadSpec().arithmetic == "auto"
    for measures in (True, False):
        progress = Seen()
        with unloading(Engine.load(LoadSpec(), progress)) as engine:
            found = engine.arithmetic.distance
            assert engine.arithmetic == Arithmetic("fast", distance=found) and found is not None
            assert found.tokens >= ENOUGH and found.kl_high < BOUND + ROUNDING_BF16
            assert (progress.measured > 0) == measures
            assert engine.manifest()["arithmetic"] == "fast"
            assert not engine.expert_cache.counts.demand_bytes, "what is recorded begins after it"
    assert [one for _, one in kept_in(kept)] == [found]


def test_beyond_the_bound_the_reference_computes(tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: Logged) -> None:
    """What was measured lives for the process where no file is named."""
    monkeypatch.setattr(arithmetic, "BOUND", -1.0)
    monkeypatch.setattr(arithmetic, "_of_process", {})
    monkeypatch.setattr(arithmetic, "_file", None)
    how = dict(dtype="float32", format="int8")
    sampling, wanted, found = Sampling(max_new_tokens=4, temperature=0.0, logprobs=0), [], []
    for chosen, measures in (("reference", False), ("auto", True), ("auto", False), ("fast", False)):
        progress = Seen()
        spec = LoadSpec.checked(str(tiny), Settings({"predictor": "none"}), context=128, arithmetic=chosen, **how)
        with caplog.at_level(logging.INFO, "moestro.load"):
            engine = Engine.load(spec, progress)
        try:
            assert (progress.measured > 0) == measures
            found.append(engine.arithmetic)
            wanted.append([piece.logprob for piece in engine.generate("On", sampling) if piece.token is not None])
        finally:
            engine.unload()
    assert [one.name for one in found] == ["reference", "reference", "reference", "fast"]
    assert found[0].fallback == found[3].fallback == "" and found[1] == found[2]
    assert "distance is not surely within -1" in found[1].fallback and found[1].fallback in caplog.text
    assert wanted[0] == wanted[1] == wanted[2] != wanted[3]
    assert found[3].distance is not None, "it was kept"


def test_a_load_is_cancelled_while_it_measures(tiny: Path, kept: Path) -> None:
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        Engine.load(LoadSpec.checked(str(tiny), arithmetic="auto", context=128), Seen(cancel), cancel)
    assert cancel.is_set() and not kept.exists()


@pytest.mark.parametrize(
    ("tokens", "kl", "error", "dtype", "why"),
    [
        (1000, 0.0022, 0.0004, "bfloat16", ""),  # the demo model
        (1000, 0.0022, 0.0004, "float16", "not surely within 0.002"),
        (1000, 0.0022, 0.0004, "float32", "not surely within 0.002"),
        (1000, 0.0012, 0.0003, "float32", ""),
        (200, 0.0022, 0.0010, "bfloat16", "not surely within 0.004"),
        (99, 0.0001, 0.0, "bfloat16", "too few tokens"),
        (1000, math.nan, math.nan, "float32", "not surely within"),
    ],
)
def test_the_bound(tokens: int, kl: float, error: float, dtype: str, why: str) -> None:
    found = arithmetic.objection(replace(SMALL, tokens=tokens, kl=kl, kl_error=error, agreed=9), dtype)
    assert why in found and bool(found) == bool(why)
    assert not why or f"over {tokens} tokens" in found


def test_as_much_text_is_read_as_time_allows() -> None:
    def widths(seconds_a_piece: float, seconds_a_token: float) -> list[int]:
        found: list[int] = []

        def now() -> float:
            return seconds_a_piece * len(found) + seconds_a_token * sum(found)

        for piece in within([range(129)] * 11, 20.0, 120.0, now):
            found += [len(piece) - 1]
        assert now() <= (20.0 if sum(found) > 112 else 120.0) or len(found) == 1
        return found

    assert widths(0.0, 0.001) == [16, 32, 64, *[128] * 8]
    assert widths(0.0, 0.05) == [16, 32, 64, 128, 128], "18.4 s, and one more would take 6.4"
    assert widths(3.0, 0.0) == [16, 32, 64, 128, 128, 128]
    assert widths(30.0, 0.0) == [16, 32, 64], "as many as are enough to tell"
    assert widths(0.0, 3.0) == [16], "96 s more would be too late"


def test_the_error_is_that_of_stretches() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = {ids: torch.randn(2, len(ids), 7, generator=draw) for ids in (tuple(range(6)) * 8, tuple(range(5)) * 4)}
    pieces = [[*ids, 0] for ids in logits]
    found = distance_of(iter(pieces), lambda ids: logits[tuple(ids)][0], lambda ids: logits[tuple(ids)][1])
    kls = [
        (p.double().softmax(-1) * (p.double().log_softmax(-1) - q.double().log_softmax(-1))).sum(-1)
        for p, q in logits.values()
    ]
    means = [float(one.mean()) for kl in kls for one in (kl[:16], kl[16:32], kl[32:48]) if len(one)]
    assert found.tokens == 68 and found.kl == pytest.approx(float(torch.cat(kls).mean()))
    assert len(means) == 5 and found.kl_error == pytest.approx(stdev(means) / math.sqrt(5))
    assert found.kl_high == pytest.approx(found.kl + 1.96 * found.kl_error, rel=1e-4)


def test_what_is_compared() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], dtype=torch.float64).log()
    q = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]], dtype=torch.float64).log()
    nll, nll_fast, kl, agreed, _ = compare(p, q, torch.tensor([0, 1])).tolist()
    assert nll == pytest.approx([math.log(2), 0.0]) and nll_fast == pytest.approx([math.log(4), math.log(4)])
    assert kl == pytest.approx([0.5 * math.log(2) + 0.25 * math.log(0.5), math.log(4)])
    assert agreed == [0.0, 0.0]


def test_a_load_chooses_among_all_threads_whatever_was_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_of_process", {})
    monkeypatch.setattr(arithmetic, "_file", None)
    offered: list[int] = []

    def offer(*about: Any, **how: Any) -> Any:
        offered.append(torch.get_num_threads())
        return choose_threads(*about, **how)

    monkeypatch.setattr(wiring, "choose_threads", offer)
    with torch_threads(2):
        for arithmetics in ("auto", "auto", "reference"):
            with loaded(model, {"budget": "100%"}, context=128, arithmetic=arithmetics) as engine:
                assert list(engine.generate("a few words", Sampling(max_new_tokens=3, temperature=0.0)))
            assert torch.get_num_threads() == 2
    assert offered == [2, 2, 2]
