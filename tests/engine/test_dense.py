"""Rounded dense layers: the answers are those of transformers with the weights that the codes stand for."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from core.engine import Engine
from core.errors import ModelError
from core.hf.quantized_linear import Linear, QuantizedLinear, format_for
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.system.native.compile import supported
from tests.checkpoints import make_checkpoint
from tests.equality.passes import plain_transformers, run
from tests.loaded import unloading
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

QUICK = [("gpt_oss", "int4-g64")]
# Of weights at which the likeliest tokens and experts lead by more than rounding; at others the two answers part
SEEDS = {"gpt_oss": 3, "qwen3_next": 2}
ROUNDING = 0.05  # of the logits' norm: bf16 sums in another order
pytestmark = pytest.mark.skipif(not supported(), reason="this CPU has no AVX2, so nothing is rounded")


def checkpoint(arch: str, folder: Path) -> Path:
    return save_tokenizer(make_checkpoint(arch, folder / arch, SEEDS.get(arch, 0), dtype=torch.bfloat16))


def spec(path: Path, **values: object) -> LoadSpec:
    return LoadSpec.checked(str(path), Settings({"budget": "50%"}), context=256, **values)


@pytest.mark.parametrize(
    ("arch", "format"),
    layered(
        [
            ("qwen3_moe", "int4-g32"),
            ("qwen3_moe", "int8-g32"),
            ("qwen3_moe", "int8"),
            ("qwen2_moe", "int4-g32"),
            ("gpt_oss", "int4-g64"),
            ("deepseek_v2", "int4-g32"),
            ("glm4_moe", "nf4"),
            ("qwen3_next", "int4-g32"),
            ("granitemoehybrid", "int8-g32"),
        ],
        quick=lambda case: case in QUICK,
    ),
)
def test_logits_are_those_of_what_the_codes_stand_for(arch: str, format: str, tmp_path: Path) -> None:
    path = checkpoint(arch, tmp_path)
    exact = plain_transformers(path, torch.bfloat16)
    want, plain = exact, plain_transformers(path, torch.bfloat16)
    whole = Engine.load(spec(path))
    before = whole.sizes
    whole.unload()
    with unloading(Engine.load(spec(path, dense=format, arithmetic="reference"))) as engine:
        rounded = {name: m for name, m in engine.model.named_modules() if isinstance(m, QuantizedLinear)}
        assert rounded
        for name, module in rounded.items():
            plain.get_submodule(name).weight.data.copy_(module.weight)
        got, _ = run(engine.model, engine.fresh_cache(), lambda step: None, steps=4)
        same, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, steps=4)
        exact_logits, _ = run(want, None, lambda step: None, steps=4)
        error = float((got - same).float().norm() / same.float().norm())
        moved = float((got[:24] - exact_logits[:24]).float().norm() / exact_logits[:24].float().norm())
        assert error < ROUNDING and moved > (0 if "8" in format else 3 * error), (error, moved)
        held = sum(t.nbytes for t in (*engine.model.parameters(), *engine.model.buffers()))
        held += sum(m._raw.nbytes for m in rounded.values())
        assert engine.sizes.dense == held < before.dense


def test_routers_embeddings_and_tied_heads_stay(tmp_path: Path) -> None:
    with unloading(Engine.load(spec(checkpoint("granitemoe", tmp_path), dense="int4-g32"))) as engine:
        kept = [m for m in engine.model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
        assert engine.model.get_input_embeddings() in kept
        assert isinstance(engine.model.get_output_embeddings(), nn.Linear) == engine.model.config.tie_word_embeddings
        assert not any(isinstance(m, QuantizedLinear) for site in engine.loaded.sites for m in site.router.modules())


def test_a_gate_of_one_number_stays(tmp_path: Path) -> None:
    with unloading(Engine.load(spec(checkpoint("qwen2_moe", tmp_path), dense="int8-g32"))) as engine:
        gates = [m for name, m in engine.model.named_modules() if name.endswith("shared_expert_gate")]
        assert gates and all(type(one) is nn.Linear for one in gates)


@pytest.mark.parametrize(
    ("name", "out", "columns", "format", "wanted"),
    [
        ("layers.3.self_attn.v_proj", 256, 1024, "int4-g64", "int8-g32"),
        ("layers.3.self_attn.v_proj", 256, 1024, "iq4_nl", "int8-g32"),
        ("layers.3.self_attn.v_proj", 256, 1024, "int8", "int8"),  # not of 4 bits
        ("layers.3.self_attn.v_proj", 512, 1024, "int4-g64", "int4-g64"),  # hardly shared
        ("layers.3.self_attn.k_proj", 256, 1024, "int4-g64", "int4-g64"),
        ("layers.3.mlp.down_proj", 256, 1024, "int4-g64", "int4-g64"),
    ],
)
def test_shared_values_have_8_bits_beside_4(name: str, out: int, columns: int, format: str, wanted: str) -> None:
    assert format_for(Linear(name, out, columns, False, 2 * out * columns, False), format) == wanted


@pytest.mark.parametrize("arithmetic", layered(["reference", "fast"], quick=lambda one: one == "reference"))
def test_both_arithmetics_load_values_of_8_bits_beside_4(arithmetic: str, tmp_path: Path) -> None:
    path = save_tokenizer(
        make_checkpoint("qwen3_moe", tmp_path / "shared", dtype=torch.bfloat16, num_key_value_heads=1)
    )
    with unloading(Engine.load(spec(path, dense="int4-g32", arithmetic=arithmetic))) as engine:
        formats = {
            name.rpartition(".")[2]: m.codec.name
            for name, m in engine.model.named_modules()
            if isinstance(m, QuantizedLinear)
        }
        assert formats["v_proj"] == "int8-g32"
        assert formats["q_proj"] == formats["k_proj"] == formats["o_proj"] == "int4-g32"
        assert engine.arithmetic.name == arithmetic


def test_where_no_layer_can_be_rounded_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Choose dense weights as in the checkpoint"):
        Engine.load(spec(checkpoint("qwen3_moe", tmp_path), dense="int4-g32", dtype="float32"))
