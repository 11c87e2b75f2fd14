"""Every number type: weights as gguf dequantises them, codes that mean the same, and experts held in our formats."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from core.hf.checkpoint import CheckpointReader
from core.hf.skeleton import meta_skeleton
from core.importing.sources import Source
from core.importing.sources.gguf import open_gguf
from core.importing.sources.gguf.blocks import EXACT, HELD, decode
from core.memory.codec import QuantizedTensor, format_of, make_codec
from tests.gguf_writer.blocks import random_blocks
from tests.gguf_writer.write import Choice, T, experts_in, make_gguf
from tests.selection import layered

CPU = torch.device("cpu")
WIDE = dict(hidden_size=256, moe_intermediate_size=256, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2)
READ = ("Q8_0", "Q3_K", "IQ4_XS", "BF16")  # with every change; every kind with `--all`
PACKED = ("Q4_K", "Q8_0", "MXFP4")  # likewise; what the codes of each kind mean is tried of all
QUANTIZED = (
    "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 NVFP4 "
    "IQ3_S IQ3_XXS IQ2_S IQ2_XS IQ2_XXS IQ1_M IQ1_S TQ1_0 TQ2_0"
).split()
HALF, TINY = 2.0**-11, 2.0**-25  # rounding to float16: relative, and where it is subnormal


def mixed(name: str) -> str:
    """As in a Q4_K_M file: Q4_K, Q6_K for the down projections of half of the layers; Q8_0 for attention."""
    if "ffn_down_exps" in name and name.startswith("blk.0."):
        return "Q6_K"
    return "Q4_K" if "_exps" in name else "Q6_K" if name == "token_embd.weight" else "Q8_0" if "attn" in name else "F32"


def stored(source: Source, name: str) -> torch.Tensor:
    """A tensor of the file as gguf itself reads and dequantises it, fp32."""
    reader = gguf.GGUFReader(source.path)
    tensor = next(t for t in reader.tensors if t.name == name)
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))


def bound(coded: QuantizedTensor) -> torch.Tensor:
    """How far a weight may be off once scales and zeros are float16."""
    scale = coded.scale.float().abs().repeat_interleave(32, -1)
    if coded.zero is None:
        return coded.dequantized().abs() * HALF + 127 * TINY
    zero = coded.zero.float().abs().repeat_interleave(32, -1)
    return (8 * scale + zero) * HALF + 9 * TINY


@pytest.mark.parametrize("kind", HELD)
def test_codes_mean_what_gguf_dequantises(kind: str) -> None:
    raw = random_blocks(T[kind], 4096 * 4 // gguf.GGML_QUANT_SIZES[T[kind]][0]).reshape(2, 4, -1)
    wanted = torch.from_numpy(gguf.quants.dequantize(raw, T[kind]))
    coded = decode(kind, torch.from_numpy(raw))
    assert coded is not None and coded.format == HELD[kind] and coded.codes.shape == wanted.shape == (2, 4, 2048)
    weights = coded.dequantized()
    if kind in EXACT:
        assert torch.equal(weights, wanted)
    else:  # a last digit of float32
        torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=float(wanted.abs().max()) * 2**-22)
    halved = (
        coded
        if format_of(coded.format).scale
        else coded._replace(scale=coded.scale.half(), zero=None if coded.zero is None else coded.zero.half())
    )
    off = (halved.dequantized() - wanted).abs()
    assert torch.equal(off, torch.zeros_like(off)) if kind in EXACT else bool((off <= bound(coded)).all())


def test_scales_that_no_format_holds_are_not_given_as_codes() -> None:
    blocks = torch.from_numpy(random_blocks(T.MXFP4, 4))
    blocks[2, 0] = 255
    assert decode("MXFP4", blocks) is None
    blocks = torch.from_numpy(random_blocks(T.Q4_K, 4))
    blocks[1, :2] = torch.tensor([60000.0], dtype=torch.float16).view(torch.uint8)
    assert (held := decode("Q4_K", blocks)) is not None and held.held_in("int4-g32") is None
    blocks[2, 2:4] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    assert decode("Q4_K", blocks) is None
    blocks = torch.from_numpy(random_blocks(T.TQ2_0, 4))
    assert decode("TQ2_0", blocks) is not None
    blocks[3, 5] |= 3  # which no file has
    assert decode("TQ2_0", blocks) is None
    assert decode("Q5_1", blocks) is None


@pytest.mark.parametrize("kind", layered([*QUANTIZED, "BF16", "F16", "F32"], quick=lambda kind: kind in READ))
def test_experts_read_as_gguf_dequantises_them(kind: str, tmp_path: Path) -> None:
    _, file = make_gguf("qwen3_moe", tmp_path, experts_in(kind), **WIDE)
    with open_gguf(file) as source:
        for part in ("gate", "up", "down"):
            name = f"model.layers.1.mlp.experts.2.{part}_proj.weight"
            wanted = stored(source, f"blk.1.ffn_{part}_exps.weight")
            read = source.tensors.read(name)
            assert torch.equal(read.float(), wanted[2])
            assert read.dtype == {"BF16": torch.bfloat16, "F16": torch.float16}.get(kind, torch.float32)
            coded = source.tensors.coded(name)
            assert (coded is None) == (kind not in HELD)
            if coded is not None and kind in EXACT:
                assert torch.equal(coded.dequantized(), wanted[2])


@pytest.mark.parametrize("kind", layered(HELD, quick=lambda kind: kind in PACKED))
@pytest.mark.parametrize("arch", layered(["qwen3_moe", "mixtral"], quick=lambda arch: arch == "qwen3_moe"))
def test_packed_experts_mean_what_the_file_says(arch: str, kind: str, tmp_path: Path) -> None:
    fields = (
        WIDE
        if arch == "qwen3_moe"
        else dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_local_experts=4)
    )
    _, file = make_gguf(arch, tmp_path, experts_in(kind), **fields)
    with open_gguf(file) as source:
        assert source.exact_format == HELD[kind]
        parts, packed, coded = through_codec(source, tmp_path, HELD[kind])
        for name, weight in parts.items():
            off = (packed[name] - weight).abs()
            part = coded[name]
            assert isinstance(part, QuantizedTensor)
            assert not off.any() if kind in EXACT else bool((off <= bound(part)).all())


@pytest.mark.parametrize("each", [True, False], ids=["by expert", "by tensor"])
def test_what_weights_of_nvfp4_are_multiplied_by(each: bool, tmp_path: Path) -> None:
    """Tensors NAME.scale are kept beside the codes; those of activations change nothing."""
    factors = [0.5, 1.5, 0.001, 3.0] if each else [0.7]
    written: dict[str, torch.Tensor] = {}

    def also(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in tensors if "_exps.weight" in name or "attn_output.weight" in name]:
            own = torch.tensor(factors if "_exps" in name else factors[:1])
            written[name] = own
            tensors |= {name.replace("weight", "scale"): own, name.replace("weight", "input_scale"): own}
        return tensors

    def choice(name: str) -> str:
        return "NVFP4" if "_exps.weight" in name or "attn_output.weight" in name else "F32"

    _, file = make_gguf("qwen3_moe", tmp_path, choice, also=also, **WIDE, head_dim=64)
    with open_gguf(file) as source:
        assert source.exact_format == "nvfp4"
        name = "blk.1.attn_output.weight"
        dense = source.tensors.read("model.layers.1.self_attn.o_proj.weight")
        torch.testing.assert_close(dense.float(), stored(source, name) * written[name], rtol=2**-8, atol=0)
        parts, packed, _ = through_codec(source, tmp_path, "nvfp4")
        for part, weight in parts.items():
            assert torch.equal(packed[part], weight), part
        for part in ("gate", "up", "down"):
            name = f"blk.0.ffn_{part}_exps.weight"
            wanted = stored(source, name) * written[name].view(-1, 1, 1)
            for expert in range(4):
                read = source.tensors.coded(f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight")
                assert read is not None
                torch.testing.assert_close(read.dequantized(), wanted[expert], rtol=2**-23, atol=0)


def through_codec(
    source: Source, folder: Path, format: str, layer: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, QuantizedTensor | torch.Tensor]]:
    """One expert: as read (dequantised), what its blob means in fp32, and as it is given to the codec."""
    shell = folder / "shell"
    shell.mkdir(exist_ok=True)
    reader = CheckpointReader(meta_skeleton(source.write_shell(shell)), source.tensors)
    numbers = source.numbers if format in (source.exact_format, *source.formats) else None
    site = reader.sites[0]
    codec = make_codec(
        format, specs=site.parts, dtype=torch.float32, device=CPU, is_transposed=site.is_transposed, stored=numbers
    )
    parts, given = reader.read(layer, 1), reader.read_coded(layer, 1)
    slot = torch.zeros(codec.slot_bytes, dtype=torch.uint8)
    codec.place(codec.encode(given), slot)
    views = codec.views(slot)
    return (
        parts,
        {n: codec.dequantize(views, n).float() if n in views.weights else views.plain[n].float() for n in parts},
        given,
    )


def test_experts_that_a_model_keeps_transposed_and_interleaved(tmp_path: Path) -> None:
    """gpt_oss in MXFP4, as it is published."""
    _, file = make_gguf("gpt_oss", tmp_path, experts_in("MXFP4"))
    with open_gguf(file) as source:
        assert (source.exact_format, source.label) == ("mxfp4", "GGUF MXFP4")
        parts, packed, given = through_codec(source, tmp_path, "mxfp4")
        assert isinstance(given["gate_up_proj"], QuantizedTensor) and given["gate_up_proj"].codes.shape == (64, 192)
        assert all(torch.equal(packed[name], parts[name]) for name in parts)
        gate = stored(source, "blk.0.ffn_gate_exps.weight")
        assert torch.equal(parts["gate_up_proj"][:, ::2], gate[1].t())


def test_a_mix_is_held_as_it_is(tmp_path: Path) -> None:
    _, file = make_gguf("qwen3_moe", tmp_path, mixed, **WIDE)
    with open_gguf(file) as source:
        assert (source.formats, source.label) == (("q4_k/q6_k", "q4_k"), "GGUF Q4_K and Q6_K")
        assert source.exact_format is None and source.numbers is not None
        assert source.notes == (
            "gate: Q4_K: codes and scales kept exactly",
            "up: Q4_K: codes and scales kept exactly",
            "down: Q6_K (1 of 2): codes and scales kept exactly; Q4_K (1 of 2): codes and scales kept exactly",
        )
        for layer, format in enumerate(source.formats):
            parts, packed, given = through_codec(source, tmp_path, format, layer=layer)
            assert all(isinstance(one, QuantizedTensor) for one in given.values())
            assert all(torch.equal(packed[name], parts[name]) for name in parts)
        parts, packed, _ = through_codec(source, tmp_path, "q4_k")  # the user's choice for all
        error = (packed["down_proj"] - parts["down_proj"]).norm() / parts["down_proj"].norm()
        assert 0 < error < 0.12


@pytest.mark.parametrize(
    ("gate", "up", "down", "formats"),
    [
        ("Q4_K", "Q5_K", "Q6_K", "q5_k/q6_k"),  # which holds the codes of both
        ("Q4_K", "Q6_K", "Q4_K", "q6_k/q4_k"),  # which does not: as many weights, so the one with more bits
        ("Q3_K", "Q3_K", "Q5_K", "q3_k/q5_k"),
        ("BF16", "BF16", "Q8_0", "int8-g32"),
        ("BF16", "BF16", "F32", "checkpoint"),
        ("Q8_0", "Q8_0", "F16", "int8-g32"),
    ],
)
def test_the_formats_of_a_layer(gate: str, up: str, down: str, formats: str, tmp_path: Path) -> None:
    of = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    _, file = make_gguf(
        "qwen3_moe", tmp_path, lambda name: next((of[part] for part in of if part in name), "F32"), **WIDE
    )
    with open_gguf(file) as source:
        assert source.formats == (formats, formats)
        parts, packed, _ = through_codec(source, tmp_path, formats)
        for name, weight in parts.items():
            assert (packed[name] - weight).norm() <= 0.2 * weight.norm()


def test_experts_whose_inputs_are_no_blocks_of_256_keep_codes(tmp_path: Path) -> None:
    """As of Gemma 4: down projections have 704 inputs, for which llama.cpp takes another type than for the others."""
    narrow = WIDE | {"moe_intermediate_size": 96}
    _, file = make_gguf("qwen3_moe", tmp_path, lambda name: "Q8_0" if "down_exps" in name else mixed(name), **narrow)
    with open_gguf(file) as source:
        assert source.formats == ("q4_k/int8-g32",) * 2, "each matrix by its own inputs"
        assert source.notes[0] == "gate: Q4_K: codes and scales kept exactly"
        parts, packed, given = through_codec(source, tmp_path, "int4-g32")  # the user's choice
        held = given["gate_up_proj"]
        assert isinstance(held, QuantizedTensor) and held.format == "q4_k"
        near = held.held_in("int4-g32")
        assert near is not None
        assert bool(((packed["gate_up_proj"] - parts["gate_up_proj"]).abs() <= bound(near)).all())


@pytest.mark.parametrize("choice", [mixed, experts_in("BF16"), experts_in("F16"), experts_in("F32")])
def test_dense_weights_keep_their_numbers_or_become_bfloat16(choice: Choice, tmp_path: Path) -> None:
    _, file = make_gguf("qwen3_moe", tmp_path, choice, **WIDE)
    with open_gguf(file) as source:
        quantized = choice is mixed
        assert source.dense_dtype == (
            torch.bfloat16
            if quantized or choice("_exps.weight") == "BF16"
            else torch.float16
            if choice("_exps.weight") == "F16"
            else torch.float32
        )
        wanted = stored(source, "token_embd.weight")
        read = source.tensors.read("model.embed_tokens.weight")
        assert torch.equal(read, wanted.bfloat16() if quantized else wanted)
        gate = source.tensors.read("model.layers.1.mlp.gate.weight")
        assert gate.dtype == torch.float32 and torch.equal(gate, stored(source, "blk.1.ffn_gate_inp.weight"))
        assert torch.equal(source.tensors.read("model.embed_tokens.weight", 5), read[5:6])


def test_quantized_rows_of_q_and_k_are_put_back_in_order(tmp_path: Path) -> None:
    checkpoint, file = make_gguf("mixtral", tmp_path, lambda name: "Q8_0" if "attn_" in name else "F32")
    with open_gguf(file) as source:
        for key, tensor in load_file(checkpoint / "model.safetensors").items():
            if "self_attn" in key:
                off = (source.tensors.read(key).float() - tensor).norm() / tensor.norm()
                assert off < 0.01, key
