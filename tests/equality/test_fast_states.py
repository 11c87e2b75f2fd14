"""The fast arithmetic with gated delta nets: as test_fast, and what goes on from states that were kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.qwen3_next import modeling_qwen3_next

from core.engine import Engine
from core.memory.codec.native.threads import TORCHS, share, shared_by
from core.runtime.pipeline import Stopped
from core.runtime.program import row_steps
from core.settings.sampling import Sampling
from core.types import Ids
from tests.checkpoints import make_checkpoint, random_model
from tests.decoded import greedy
from tests.equality.fast import CLOSE, OTHERS, load, logits, read
from tests.equality.passes import PROMPT, plain_transformers, run
from tests.equality.test_fast import pytestmark as pytestmark
from tests.loaded import unloading
from tests.logged import Logged
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

KNOWN: dict[str, dict[str, object]] = {
    "qwen3_next": {},
    "qwen3_5_moe_text": dict(linear_value_head_dim=24, linear_num_value_heads=6),  # no multiple of the keys' width
}
ROUNDED = 0.1  # of a row of logits, where states are rounded to 8 bits: .03 to .05 of models of random weights
TEXT = torch.randint(3, 250, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module", params=layered(KNOWN, quick=lambda arch: arch == "qwen3_next"))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, model = tmp_path_factory.mktemp(request.param), random_model(request.param, **KNOWN[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)  # of norms, and of decays
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                _read_what_is_written(layer.linear_attn)
    model.save_pretrained(path)
    return save_tokenizer(path)


def _read_what_is_written(module: Any) -> None:
    """Have queries that are much like keys: else the norm of what they read, next to nothing, is of rounding."""
    width, heads = module.head_k_dim, module.num_k_heads
    if hasattr(module, "in_proj_qkvz"):
        q, k = module.in_proj_qkvz.weight.unflatten(0, (heads, -1))[:, : 2 * width].split(width, 1)
    else:
        q, k = module.in_proj_qkv.weight[: 2 * heads * width].chunk(2)
    mixed = module.conv1d.weight[: 2 * heads * width].chunk(2)
    for one, other in ((q, k), mixed):
        one.mul_(0.3).add_(other)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    engine = load(path, dtype="float32", sequences=4, context=256)
    assert engine.wiring.answering.hooked.program is not None
    engine.prompt.ends = set()
    yield engine
    engine.unload()


def test_logits_are_near_transformers(path: Path, engine: Engine) -> None:
    plain = plain_transformers(path, torch.float32)
    with torch.inference_mode():
        wanted, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, 0)
    found = logits(engine, PROMPT, [len(PROMPT)], keep=len(PROMPT))
    for row, other in zip(found, wanted, strict=False):
        assert (row - other).abs().max() < CLOSE * other.abs().max()


def test_no_bit_depends_on_how_it_is_computed(engine: Engine) -> None:
    before = shared_by()
    try:
        share(1)
        wanted = logits(engine, TEXT, [100])
        for threads in (1, 2, TORCHS):
            share(threads)
            for cuts in ([100], [1] * 100, [7] * 14 + [2], [99, 1], [2, 98]):
                assert torch.equal(logits(engine, TEXT, cuts), wanted), (threads, cuts)
            for others in ([[9, 8, 7]], OTHERS):
                for cuts in ([99, 1], [60, 40]):
                    assert torch.equal(logits(engine, TEXT, cuts, others), wanted), (threads, cuts, others)
    finally:
        share(before)


@pytest.mark.long(0.1)  # above, states in 32 bits; codes: test_fast.py
def test_states_in_16_bits(path: Path) -> None:
    with unloading(load(path, format="int4-g32-sym", dense="int4-g32", dtype="bfloat16")) as engine:
        assert engine.wiring.answering.hooked.program is not None
        wanted = logits(engine, TEXT, [100])
        for cuts in ([1] * 100, [7] * 14 + [2]):
            assert torch.equal(logits(engine, TEXT, cuts), wanted), cuts


def test_states_are_kept_and_put_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pass that breaks off between two layers, of a text in host memory, and in memory that another text has
    used."""
    monkeypatch.setattr(row_steps, "MOST", 9)
    pipeline, memory = engine.wiring.measuring, engine.wiring.pool.chat
    wanted = read(pipeline, memory.fresh(), TEXT)
    kv = memory.fresh()
    read(pipeline, kv, TEXT[:40])
    checkpoint = memory.checkpoint(kv)
    assert checkpoint is not None
    for kept in ([], [checkpoint]):
        with pytest.raises(Stopped):
            read(pipeline, kv, TEXT[40:60], breaks_off=True)
        kv.abort_pass(40)
        assert memory.rollback(kv, kept) == bool(kept)
    assert torch.equal(read(pipeline, kv, TEXT[40:]), wanted)
    kv = memory.fresh()
    with pytest.raises(Stopped):
        read(pipeline, kv, TEXT[:30], breaks_off=True)
    kv.abort_pass(0)
    assert memory.rollback(kv)
    read(pipeline, kv, TEXT[:70])
    stash = memory.stash(kv)
    read(pipeline, memory.fresh(), TEXT[50:])
    assert torch.equal(read(pipeline, memory.put_back(stash, 70), TEXT[70:]), wanted)
    assert torch.equal(read(pipeline, memory.put_back(stash, 40, checkpoint), TEXT[40:]), wanted)


@pytest.mark.parametrize("arch", layered(["qwen3_5_moe"], quick=lambda arch: False))
def test_the_text_model_of_one_that_reads_images(arch: str, tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint(arch, tmp_path))
    with unloading(load(path, arithmetic="reference", dtype="float32")) as engine:
        wanted = logits(engine, TEXT, [100])
    with unloading(load(path, dtype="float32")) as engine:
        assert engine.wiring.answering.hooked.program is not None
        found = logits(engine, TEXT, [60, 1, 39])
        assert (found - wanted).abs().max() < CLOSE * wanted.abs().max()


def _unlike(result: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return result[0], result[1] * 1.1


@pytest.mark.parametrize(
    ("function", "other"),
    [
        ("l2norm", lambda own: lambda x, **_: x),
        ("torch_recurrent_gated_delta_rule", lambda own: lambda *args, **how: _unlike(own(*args, **how))),
    ],
    ids=["every call", "a token that follows others"],
)
def test_what_computes_otherwise_is_not_known(
    function: str, other: Callable[[Any], Any], tmp_path: Path, caplog: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tokenizer(make_checkpoint("qwen3_next", tmp_path))
    monkeypatch.setattr(modeling_qwen3_next, function, other(getattr(modeling_qwen3_next, function)))
    with caplog.at_level(logging.WARNING, "moestro.load"), unloading(load(path, dtype="float32")) as engine:
        assert engine.wiring.answering.hooked.program is None
        assert "Qwen3NextGatedDeltaNet computes in a way that is not known" in caplog.text


@dataclass
class Answer:
    ids: list[int]  # with those of the prompt
    logits: torch.Tensor
    cached: int


def answer(engine: Engine, ids: Sequence[int]) -> Answer:
    """... of six tokens, from what is kept of earlier ones."""
    seen, said, cached = list[torch.Tensor](), list[int](), 0
    for piece in engine.generate(Ids(ids), Sampling(max_new_tokens=6), None, greedy(seen), reuse=True):
        if piece.kind == "prefill":
            cached = piece.cached
        if piece.token is not None:
            said.append(piece.token)
    return Answer([*ids, *said], torch.stack(seen), cached)


def test_a_turn_has_the_bits_of_the_text_read_anew(engine: Engine) -> None:
    first = answer(engine, TEXT[:30])
    prompt = [*first.ids, *TEXT[30:40]]
    found = answer(engine, prompt)
    assert found.cached == len(first.ids) - 1
    engine.fresh_cache()  # takes the memory
    later = answer(engine, [*found.ids, *TEXT[40:50]])
    assert later.cached == len(found.ids) - 1
    for one, ids in ((found, prompt), (later, [*found.ids, *TEXT[40:50]])):
        for chats in (0, 4):
            engine.change({"kv_chats": chats})
        anew = answer(engine, ids)
        assert anew.cached == 0 and anew.ids == one.ids and torch.equal(anew.logits, one.logits)
