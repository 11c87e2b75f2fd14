"""The fast arithmetic: near transformers' logits, and the same bits however a prompt is cut, whatever goes along,
whatever is resident, and however many threads compute."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.memory.codec.native.threads import share
from core.runtime.batch import Batch, Share
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.system.native.compile import widths
from tests.checkpoints import make_checkpoint
from tests.equality.passes import PROMPT, plain_transformers, run
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not widths(), reason="no kernels for this CPU")

KNOWN = ("qwen3_moe", "mixtral")  # what the program computes; all others fall back
CLOSE = 1e-4  # of the largest logit: fp32 sums in another order
ROUNDED = 0.05  # the same where x is rounded to 8 bits
OTHERS = [[5] * 9, [9, 8, 7], [11]]  # of a batch


def load(path: Path | str, **how: object) -> Engine:
    settings = Settings({"budget": "100%", "predictor": "none", "link": "own"})
    return Engine.load(LoadSpec.checked(str(path), settings, arithmetic="fast", context=128, **how))


@pytest.fixture(scope="module", params=layered(KNOWN, quick=lambda arch: arch == "qwen3_moe"))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    engine = load("demo", sequences=4)
    assert engine.wiring.answering.hooked.program is not None
    yield engine
    engine.unload()


def logits(engine: Engine, ids: Sequence[int], cuts: Sequence[int], others: Sequence[list[int]] = ()) -> torch.Tensor:
    """[V] after the ids, read in pieces, the last of them along with other texts."""
    wiring = engine.wiring
    pool, pipeline, at = wiring.pool, wiring.measuring, 0
    kvs = [pool.take(128) for _ in range(1 + len(others))]
    try:
        for i, cut in enumerate(cuts):
            shares = [Share(ids[at : at + cut], kvs[0], 1)]
            if i == len(cuts) - 1:
                shares += [Share(one, kv, 2 + n) for n, (one, kv) in enumerate(zip(others, kvs[1:], strict=True))]
            batch = Batch("decode" if cut == 1 else "prefill", tuple(shares))
            pipeline.begin(batch)
            found = pipeline.forward(batch)[0].clone()
            at += cut
        return found
    finally:
        pipeline.end()
        pool.clear()


def test_logits_are_near_transformers(path: Path) -> None:
    plain = plain_transformers(path, torch.float32)
    engine = load(path, dtype="float32")
    try:
        assert engine.wiring.answering.hooked.program is not None
        with torch.inference_mode():
            wanted, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, 0)
        for cuts in ([len(PROMPT)], [1] * len(PROMPT), [10, 9, 5]):
            off = (logits(engine, PROMPT, cuts) - wanted[-1]).abs().max() / wanted[-1].abs().max()
            assert off < CLOSE, (cuts, off)
    finally:
        engine.unload()


@pytest.mark.parametrize("dense", ["checkpoint", "int4-g32"])
def test_rounded_weights(path: Path, dense: str) -> None:
    """Near the reference arithmetic with the same weights."""
    found = []
    for arithmetic in ("fast", "reference"):
        spec = LoadSpec.checked(
            str(path),
            Settings({"predictor": "none"}),
            arithmetic=arithmetic,
            format="int4-g32-sym",
            dense=dense,
            dtype="bfloat16",
        )
        engine = Engine.load(spec)
        try:
            assert (engine.wiring.answering.hooked.program is not None) == (arithmetic == "fast")
            found.append(logits(engine, PROMPT, [len(PROMPT)]))
        finally:
            engine.unload()
    assert (found[0] - found[1]).norm() < ROUNDED * found[1].norm()


def test_no_bit_depends_on_how_it_is_computed(demo: Engine) -> None:
    ids = torch.randint(3, 4000, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    share(1)
    wanted = logits(demo, ids, [40])
    for settings in ({"budget": "100%"}, {"budget": "50%"}, {"budget": "25%", "scope": "global", "eviction": "lfu"}):
        demo.change(settings)
        for cuts in ([40], [1] * 40, [7] * 5 + [5], [39, 1]):
            assert torch.equal(logits(demo, ids, cuts), wanted), (settings, cuts)
        for others in ([[9, 8, 7]], OTHERS):
            assert torch.equal(logits(demo, ids, [39, 1], others), wanted), (settings, others)
            assert torch.equal(logits(demo, ids, [20, 20], others), wanted), (settings, others)
    demo.change({"budget": "50%", "predictor": "gate"})
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    texts = ["".join(piece.text for piece in demo.generate("The ferry left", sampling) if piece.text) for _ in range(2)]
    assert texts[0] == texts[1] != ""


def test_what_it_does_not_know_is_computed_by_the_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_tokenizer(make_checkpoint("olmoe", tmp_path))
    with caplog.at_level(logging.WARNING, "moestro.load"):
        engine = load(path, dtype="float32")
    try:
        assert engine.wiring.answering.hooked.program is None
        assert "reference arithmetic" in caplog.text
    finally:
        engine.unload()
