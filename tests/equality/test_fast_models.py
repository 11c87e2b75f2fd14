"""The fast arithmetic of each model that its program knows: near transformers' logits, with the same bits however a
prompt is cut."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from core.memory.codec.native.threads import share
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.architectures.tiny import tiny
from tests.architectures.trial import random_model as any_random_model
from tests.architectures.trial import save, transformers_own
from tests.checkpoints import make_checkpoint, random_model
from tests.equality.fast import CLOSE, KNOWN, OTHERS, distance, load, logits, read
from tests.equality.passes import PROMPT, plain_transformers, run
from tests.loaded import unloading
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")


WHOLE = (
    "qwen3_vl_moe",
    "glm4v_moe",
    "kimi_k25",
    "mistral3",
    "qwen3_omni_moe_thinker",
    "minimax_m3_vl",
)  # their text part
LATENT = "deepseek_v2", "deepseek_v3", "glm4_moe_lite"
QUICK = ("qwen2_moe",)  # shared experts, and a layer without any
ROUNDED = 0.05  # of a row of logits, where states are rounded to 8 bits: .006 to .029


@pytest.fixture(scope="module", params=layered(KNOWN, quick=QUICK.__contains__))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, model = (tmp_path_factory.mktemp(request.param), random_model(request.param, **KNOWN[request.param]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "bias" not in name:
                parameter.uniform_(0.5, 1.5)  # of norms
            if "q_norm" in name and model.config.model_type == "gemma4_text":
                parameter.mul_(0.25)  # scores are not scaled otherwise
        for name, buffer in model.named_buffers():
            if "scalar" in name:
                buffer.uniform_(0.5, 1.5)  # of layers
    model.save_pretrained(path)
    return save_tokenizer(path)


def test_logits_are_near_transformers(path: Path) -> None:
    plain = plain_transformers(path, torch.float32)
    with unloading(load(path, dtype="float32")) as engine:
        assert engine.wiring.answering.hooked.program is not None
        with torch.inference_mode():
            wanted, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, 0)
        found = logits(engine, PROMPT, [len(PROMPT)])
        assert (found - wanted[-1]).abs().max() < CLOSE * wanted[-1].abs().max()
        for cuts in ([1] * len(PROMPT), [10, 9, 5]):
            assert torch.equal(logits(engine, PROMPT, cuts), found), cuts


@pytest.mark.parametrize("arch", layered(WHOLE, quick=lambda arch: False))
def test_models_of_text_and_images(arch: str, tmp_path: Path) -> None:
    path, found = save(any_random_model(arch), tmp_path), []
    for arithmetic in ("fast", "reference"):
        with unloading(load(path, dtype="float32", arithmetic=arithmetic)) as engine:
            assert (engine.wiring.answering.hooked.program is not None) == (arithmetic == "fast")
            found.append(logits(engine, PROMPT, [10, 9, 5]))
    assert (found[0] - found[1]).abs().max() < CLOSE * found[1].abs().max()


def test_limits_of_some_layers(tmp_path: Path) -> None:
    """Step 3.7 Flash limits what its last layers' activations multiply, of experts and of the shared one."""
    tight: dict[str, object] = {"swiglu_limits": [0, 0, 0, 0.02], "swiglu_limits_shared": [0, 0, 0.01, 0]}
    config = AutoConfig.for_model("step3p7", **tiny("step3p7")).text_config.to_dict()
    path = save(
        any_random_model("step3p7", text_config={**config, **tight, "moe_router_scaling_factor": 1.5}), tmp_path
    )
    plain = transformers_own(path, torch.float32)
    with unloading(load(path, dtype="float32")) as engine:
        assert engine.wiring.answering.hooked.program is not None
        with torch.inference_mode():
            wanted, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, 0)
        found = logits(engine, PROMPT, [len(PROMPT)])
        assert (found - wanted[-1]).abs().max() < CLOSE * wanted[-1].abs().max()


@pytest.mark.parametrize("arch", layered(["afmoe", "minimax_m2"], quick=lambda arch: arch == "afmoe"))
def test_routers_that_are_asked_get_what_they_take(arch: str, tmp_path: Path) -> None:
    """States of three dimensions, or more than states."""
    path, answers = save_tokenizer(make_checkpoint(arch, tmp_path)), list[list[int]]()
    with unloading(load(path, dtype="float32")) as engine:
        for predictor in ("none", "gate"):
            engine.change({"budget": "50%", "predictor": predictor})
            pieces = engine.generate(Ids(PROMPT), Sampling(max_new_tokens=9))
            answers.append([piece.token for piece in pieces if piece.token is not None])
    assert answers[0] == answers[1]


@pytest.mark.long(0.1)  # test_biases_of_experts_and_sinks has it of one model
@pytest.mark.parametrize(("path", "dense"), itertools.product(KNOWN, ("checkpoint", "int4-g32")), indirect=["path"])
def test_rounded_weights(path: Path, dense: str) -> None:
    assert distance(path, format="int4-g32-sym", dense=dense) < ROUNDED


def test_biases_of_experts_and_sinks(tmp_path: Path) -> None:
    model = random_model("gpt_oss", attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    assert distance(save_tokenizer(tmp_path), format="int8") < ROUNDED


@pytest.mark.long(0.2)  # tests/runtime/program/test_absorb.py, test_attend.py have its rows in any pieces
@pytest.mark.parametrize("path", LATENT, indirect=True)
def test_no_bit_of_latent_attention_depends_on_how_it_is_computed(path: Path) -> None:
    how = dict(dtype="bfloat16", format="int4-g32", dense="int4-g32", context=256, sequences=4)
    ids = torch.randint(3, 250, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with unloading(load(path, **how)) as engine:
        assert engine.wiring.answering.hooked.program is not None
        share(1)
        wanted = logits(engine, ids, [150])
        ways = (1, 2, 3), ([140] + [1] * 10, [1] * 20 + [130], [150])
        for threads, cuts in itertools.product(*ways):
            share(threads)
            assert torch.equal(logits(engine, ids, cuts), wanted), (threads, cuts)
            assert torch.equal(logits(engine, ids, cuts, OTHERS), wanted), (threads, cuts)
        pool, pipeline = engine.wiring.pool, engine.wiring.measuring
        kv = pool.take(256)
        read(pipeline, kv, ids[:140])
        kept = kv.memory.stash(kv)
        read(pipeline, kv.memory.fresh(), ids[::-1])
        assert torch.equal(read(pipeline, kv.memory.put_back(kept, 77), ids[77:]), wanted)
        pool.clear()
