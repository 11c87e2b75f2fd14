"""Models that the program does not compute, or not near enough: their experts alone are in the fast arithmetic."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, Qwen3MoeForCausalLM

from core.runtime.program.experts import FastMath
from core.system.native.compile import supported
from tests.architectures.trial import random_model as any_random_model
from tests.architectures.trial import save
from tests.checkpoints import make_checkpoint
from tests.equality.fast import CLOSE, YARN, load, logits
from tests.equality.passes import PROMPT, plain_transformers, run
from tests.loaded import unloading
from tests.logged import Logged
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")

SCALED = YARN | dict(llama_4_scaling_beta=0.1, partial_rotary_factor=0.5)


CHANGED: dict[str, dict[str, object]] = {
    "olmoe": dict(clip_qkv=8.0),
    "gemma4_text": dict(hidden_size_per_layer_input=16),
}  # what is not known then


UNKNOWN = {  # and why
    "olmoe": "clip_qkv",
    "phimoe": "norms of the kind LayerNorm",
    "nemotron_h": "it has embeddings, norm_f",
    "gemma4_text": "it has embed_tokens_per_layer",
}


@pytest.mark.parametrize("arch", layered(UNKNOWN, quick=lambda arch: arch == "phimoe"))
def test_of_what_it_does_not_know_it_computes_the_experts(arch: str, tmp_path: Path, caplog: Logged) -> None:
    expect_experts(save_tokenizer(make_checkpoint(arch, tmp_path, **CHANGED.get(arch, {}))), UNKNOWN[arch], caplog)


@pytest.mark.long(0.1)  # test_of_what_it_does_not_know_it_computes_the_experts has what becomes of such models
def test_queries_that_are_scaled_by_position(tmp_path: Path, caplog: Logged) -> None:
    """In texts of more than 64 tokens."""
    path = save(any_random_model("mistral4", rope_parameters=SCALED), tmp_path)
    with unloading(load(path, dtype="float32", context=64)) as engine:
        assert engine.wiring.answering.hooked.program is not None
    expect_experts(path, "more than angles depends on positions", caplog)


def expect_experts(path: Path, why: str, caplog: Logged) -> None:
    """The experts alone are computed in the fast arithmetic: near the reference, and with the same bits whatever is
    resident."""
    ids = PROMPT[:20]
    with unloading(load(path, dtype="float32", arithmetic="reference")) as engine:
        wanted = logits(engine, ids, [19, 1])
    with caplog.at_level(logging.WARNING, "moestro.load"):
        engine = load(path, dtype="float32")
    with unloading(engine):
        assert engine.arithmetic.name == "fast_experts" and engine.arithmetic.fast
        assert "experts alone" in caplog.text and why in caplog.text
        assert all(isinstance(one, FastMath) for one in engine.wiring.math)
        found = logits(engine, ids, [19, 1])
        assert (found - wanted).abs().max() < CLOSE * wanted.abs().max()
        for budget in ("75%", "50%"):
            engine.change({"budget": budget})
            assert torch.equal(logits(engine, ids, [19, 1]), found), budget


def test_a_whole_model_is_tried(tmp_path: Path, caplog: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no module of a layer shows, such as a scale of the logits, is seen in those of a text."""
    own = Qwen3MoeForCausalLM.forward

    @functools.wraps(own)
    def scaled(self: object, *args: object, **kwargs: object) -> object:
        output = own(self, *args, **kwargs)
        output.logits = output.logits * 0.75
        return output

    monkeypatch.setattr(Qwen3MoeForCausalLM, "forward", scaled)
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path))
    with caplog.at_level(logging.WARNING, "moestro.load"):
        engine = load(path, dtype="float32")
    try:
        assert engine.wiring.answering.hooked.program is None
        assert "experts alone" in caplog.text and "by 0.33 of their size" in caplog.text
        plain = plain_transformers(path, torch.float32)
        with torch.inference_mode():
            wanted, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, 0)
        found = logits(engine, PROMPT, [len(PROMPT)], keep=len(PROMPT))
        assert (found - wanted[: len(PROMPT)]).abs().max() < CLOSE * wanted.abs().max()
    finally:
        engine.unload()
