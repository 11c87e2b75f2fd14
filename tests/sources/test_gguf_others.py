"""GGUF models of latent attention, of states and of sliding windows: imported, of other forms, and refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.errors import ModelError
from core.importing import import_model
from core.importing.sources import open_source
from core.memory.pack import Manifest
from tests.gguf_writer.models import OTHERS, YARN
from tests.gguf_writer.raw import ARRAY, BOOL, TEXT, U32, Raw, Row, array
from tests.gguf_writer.write import experts_in, make_gguf
from tests.selection import layered
from tests.sources.test_imported import ours, plainly, theirs


@pytest.mark.long(0.3)
@pytest.mark.parametrize("arch", OTHERS)
def test_imported_and_loaded_it_has_the_logits_of_its_dequantised_weights(arch: str, tmp_path: Path) -> None:
    _, file = make_gguf(arch, tmp_path, experts_in("Q8_0"))
    pack = import_model(str(file), tmp_path / "pack")
    assert Manifest.load(pack).format == "int8-g32"
    assert torch.equal(ours(pack), theirs(file, tmp_path / "reference"))


@pytest.mark.long(0.2)
@pytest.mark.parametrize("arch", OTHERS)
def test_a_gguf_in_16_bits_has_the_logits_of_the_checkpoint(arch: str, tmp_path: Path) -> None:
    """A_log as well: rounded to 16 bits, it is what it was. In 32 bits are what the converter writes so."""
    checkpoint, file = make_gguf(arch, tmp_path, in_16_bits, dtype=torch.bfloat16)
    pack = import_model(str(file), tmp_path / "pack")
    assert torch.equal(ours(pack, "auto"), plainly(checkpoint, torch.bfloat16))


def in_16_bits(name: str) -> str:
    short = name.endswith(".weight") and not any(part in name for part in ("norm", "ffn_gate_inp", "conv1d"))
    return "BF16" if short else "F32"


def opened(file: Path) -> dict[str, Any]:
    with open_source(file) as source:
        config: dict[str, Any] = source.config
    return config


@pytest.mark.long(0.3)
def test_a_file_of_mistrals_own_format_is_the_same_model(tmp_path: Path) -> None:
    said = {"attention.temperature_scale": 0.1, "attention.temperature_length": 32, "expert_gating_func": 1}
    more = {f"deepseek2.{key}": value for key, value in said.items()}
    checkpoint, file = make_gguf("mistral4", tmp_path, ggml="deepseek2", tokenizer=more)
    stored = load_file(checkpoint / "model.safetensors")
    with open_source(file) as source:
        assert source.config["model_type"] == "mistral4"
        assert set(source.tensors.tensors) == set(stored)
        assert all(torch.equal(source.tensors.read(name), tensor) for name, tensor in stored.items())


@pytest.mark.long(0.3)
def test_the_first_files_of_mistral_small_4_do_not_say_how_it_scales_queries(tmp_path: Path) -> None:
    rope = dict(YARN, llama_4_scaling_beta=0.1, original_max_position_embeddings=8192)
    whole = Raw.of(make_gguf("mistral4", tmp_path, rope_parameters=rope)[1])
    whole.pairs = [pair for pair in whole.pairs if b"temperature" not in pair[0]]
    assert opened(whole.write(tmp_path / "old.gguf"))["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    whole.set("mistral4.rope.scaling.original_context_length", U32, 4096)
    with pytest.raises(ModelError, match="does not say how it scales its queries"):
        opened(whole.write(tmp_path / "other.gguf"))


@pytest.mark.long(0.5)
def test_layers_of_glm_5_2_that_select_nothing_themselves(tmp_path: Path) -> None:
    """By what the file says, by the weights it has, or by llama.cpp's pattern."""
    made = dict(num_hidden_layers=8, mlp_layer_types=["dense"] + ["sparse"] * 7, max_position_embeddings=1 << 20)
    _, file = make_gguf("glm_moe_dsa", tmp_path, indexer_types=["full"] * 8, **made)
    whole = Raw.of(file)
    key = "glm-dsa.attention.indexer.types"

    def selecting() -> list[int]:
        with open_source(whole.write(tmp_path / "written.gguf")) as source:
            kinds = source.config["indexer_types"]
            held = {int(name.split(".")[2]) for name in source.tensors.tensors if ".indexer." in name}
        found = [n for n, kind in enumerate(kinds) if kind == "full"]
        assert sorted(held) == found
        return found

    assert selecting() == list(range(8))
    whole.set(key, ARRAY, array(BOOL, [True, False] * 4))
    assert selecting() == [0, 2, 4, 6]
    whole.pairs = [pair for pair in whole.pairs if pair[0] != key.encode()]
    assert selecting() == [0, 1, 2, 6]  # all have weights for it
    for part in ("attn_k.weight", "attn_q_b.weight", "proj.weight", "k_norm.weight", "k_norm.bias"):
        whole.drop(f"blk.5.indexer.{part}")
    assert selecting() == [0, 1, 2, 3, 4, 6, 7]
    whole.set(key, ARRAY, array(BOOL, [True] * 8))
    with pytest.raises(ModelError, match=r"lacks blk\.5\.indexer\.attn_k\.weight"):
        selecting()


@pytest.mark.long(0.1)
def test_a_model_is_known_by_its_tokenizer_and_its_settings(tmp_path: Path) -> None:
    _, file = make_gguf("glm4_moe_lite", tmp_path, tokenizer={"tokenizer.ggml.pre": "deepseek-v3"})
    assert opened(file)["model_type"] == "deepseek_v3"


@pytest.mark.parametrize(
    ("arch", "field", "text"),
    layered(
        [
            ("jamba", {"jamba.attention.head_count_kv": [0, 2, 2, 0]}, "weights of its layer 1 are not"),
            ("jamba", {"jamba.attention.head_count_kv": [0, 0, 0, 0]}, "differ in their heads"),
            ("mimo_v2_flash", {"mimo2.attention.head_count_kv": [2] * 7}, "other heads or sinks"),
            ("mimo_v2_flash", {"mimo2.attention.sliding_window_pattern": [1] * 7}, "other heads or sinks"),
            ("kimi_linear", {"kimi-linear.expert_weights_norm": False}, "weighs experts"),
            ("kimi_linear", {"kimi-linear.moe_latent_size": 32}, "moe_latent_size"),
            ("granitemoehybrid", {"granitehybrid.ssm.inner_size": 100}, "is no multiple of"),
            ("nemotron_h", {"nemotron_h_moe.expert_gating_func": 1}, "scores experts"),
            ("mistral4", {"mistral4.rope.scaling.type": "none"}, "YaRN"),
            ("mistral4", {"mistral4.attention.temperature_length": 64}, "temperature_length"),
            ("glm_moe_dsa", {"glm-dsa.attention.indexer.types": [2] * 4}, "indexer.types"),
            ("glm_moe_dsa", {"glm-dsa.attention.value_scale": 0.5}, "value_scale"),
        ],
        quick=lambda case: False,
    ),
)
def test_what_cannot_be_carried_over_is_refused(arch: str, field: dict[str, Any], text: str, tmp_path: Path) -> None:
    _, file = make_gguf(arch, tmp_path, tokenizer=field)
    with pytest.raises(ModelError, match=text):
        opened(file)


@pytest.mark.long(0.3)
def test_layers_that_are_not_evenly_spaced_are_refused(tmp_path: Path) -> None:
    whole = Raw.of(make_gguf("jamba", tmp_path, num_hidden_layers=8)[1])
    for part in ("gate_inp", "gate_exps", "up_exps", "down_exps"):
        whole.drop(f"blk.3.ffn_{part}.weight")
    with pytest.raises(ModelError, match="not evenly spaced"):
        opened(whole.write(tmp_path / "uneven.gguf"))


@pytest.mark.long(0.3)
def test_mimo_files_that_do_not_say_how_values_are_scaled(tmp_path: Path) -> None:
    whole = Raw.of(make_gguf("mimo_v2_flash", tmp_path)[1])
    whole.pairs = [pair for pair in whole.pairs if b"value_scale" not in pair[0]]
    with pytest.raises(ModelError, match=r"does not say mimo2\.attention\.value_scale"):
        opened(whole.write(tmp_path / "old.gguf"))


@pytest.mark.long(0.3)
@pytest.mark.parametrize(("arch", "name"), [("nemotron_h", "blk.1.ffn_gate_exps"), ("jamba", "blk.0.ssm_norm")])
def test_weights_that_an_architecture_does_not_have_are_refused(arch: str, name: str, tmp_path: Path) -> None:
    whole = Raw.of(make_gguf(arch, tmp_path)[1])
    like = whole.row("blk.1.ffn_up_exps.weight")
    whole.rows.append(Row(f"{name}.weight".encode(), like.shape, like.type, len(whole.data)))
    whole.data += bytes(4 * math.prod(like.shape))
    with pytest.raises(ModelError, match=f"does not know .{name}"):
        opened(whole.write(tmp_path / "more.gguf"))


@pytest.mark.long(0.3)
def test_a_state_that_would_not_decay_is_refused(tmp_path: Path) -> None:
    whole = Raw.of(make_gguf("nemotron_h", tmp_path)[1])
    at = whole.row("blk.0.ssm_a").offset
    whole.data = whole.data[:at] + bytes(4) + whole.data[at + 4 :]
    with open_source(whole.write(tmp_path / "zero.gguf")) as source, pytest.raises(ModelError, match="would not decay"):
        source.tensors.read("backbone.layers.0.mixer.A_log")


@pytest.mark.parametrize(
    ("ggml", "why"),
    [
        ("deepseek", "no model type"),
        ("deepseek2-ocr", "no model type"),
        ("deci", "no model type"),
        ("mistral3", "has no experts"),
        ("step35", "only as a part of Step 3.7"),
        ("llama-embed", "vectors"),
        ("nomic-bert-moe", "vectors"),
    ],
)
def test_architectures_without_a_model_that_writes_text_say_why(ggml: str, why: str, tmp_path: Path) -> None:
    file = Raw(3, [], [], b"")
    file.set("general.architecture", TEXT, ggml)
    with pytest.raises(ModelError, match=f"architecture '{ggml}': .*{why}.*Choose a model of another architecture"):
        opened(file.write(tmp_path / "model.gguf"))
