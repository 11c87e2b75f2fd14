"""A GGUF model gives back the very model it was made from: names, order of rows, config and logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from core.errors import ModelError
from core.hf.checkpoint import CheckpointReader
from core.hf.skeleton import meta_skeleton
from core.importing.job import refusal
from core.importing.sources import open_source
from core.importing.sources.gguf import open_gguf
from core.importing.sources.gguf.architectures import ARCHITECTURES as READ
from core.importing.sources.gguf.refused import REFUSED
from tests.architectures.tiny import tiny
from tests.architectures.trial import writers
from tests.gguf_writer.models import ARCHITECTURES, OTHERS
from tests.gguf_writer.page import CLOSE, LISTED, page
from tests.gguf_writer.raw import Raw, Row
from tests.gguf_writer.write import all_f32, make_gguf, write_gguf
from tests.selection import layered

ALL = ARCHITECTURES | OTHERS
LOGARITHM = "A_log"  # the converter stores -exp(A_log)
IDS = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(3))
DIFFERING: dict[str, set[str]] = {  # config values that mean the same, or that nothing uses
    "mixtral": {"head_dim"},
    "ernie4_5_moe": {"head_dim"},
    "gpt_oss": {"rope_parameters"},  # without defaults
    "deepseek_v3": {"rope_parameters", "num_nextn_predict_layers"},
    "glm4_moe": {"num_nextn_predict_layers"},
    "dots1": {"sliding_window", "head_dim"},
    "lfm2_moe": {"hidden_act"},
    "qwen3_5_moe_text": {"rope_parameters", "intermediate_size", "linear_num_heads", "linear_head_dim"},
    "qwen3_next": {"linear_num_heads", "linear_head_dim"},
    "llama4_text": {"rope_parameters"},  # divisors of frequencies, not what they were computed from
    "exaone_moe": {"sliding_window_pattern"},
    "dbrx": {"attn_config", "ffn_config"},
    "granitemoehybrid": {"max_position_embeddings"},  # which files say otherwise
    "nemotron_h": {"max_position_embeddings", "intermediate_size"},
}
PAGE = Path(__file__).parents[2] / "docs" / "gguf.md"


def logits(directory: Path) -> torch.Tensor:
    model = writers(AutoConfig.from_pretrained(directory))[0].from_pretrained(directory, local_files_only=True)
    with torch.no_grad():
        return model(IDS).logits


def read_back(source: Any, shell: Path) -> dict[str, torch.Tensor]:
    """Every weight of a source, which also makes a checkpoint of them in `shell`."""
    shell.mkdir()
    source.write_shell(shell)
    read = {name: source.tensors.read(name) for name in source.tensors.tensors}
    joined = {name: t.flatten(0, 1) if ".experts.mlp." in name else t for name, t in read.items()}  # DBRX's stacks
    save_file(joined, shell / "model.safetensors", metadata={"format": "pt"})
    return read


@pytest.mark.parametrize("arch", layered(ALL, quick=lambda arch: arch in ("gpt_oss", "qwen3_moe")))
def test_the_model_is_the_one_it_was_made_from(arch: str, tmp_path: Path) -> None:
    checkpoint, file = make_gguf(arch, tmp_path)
    shell = tmp_path / "shell"
    with open_source(file) as source:
        read = read_back(source, shell)
        stored, joined = load_file(checkpoint / "model.safetensors"), load_file(shell / "model.safetensors")
        assert set(read) == set(stored)
        for name, tensor in read.items():
            assert (tensor.dtype, tuple(tensor.shape)) == source.tensors.tensors[name]
            if name.endswith(LOGARITHM):
                torch.testing.assert_close(joined[name], stored[name], rtol=0, atol=1e-6)
            else:
                assert torch.equal(joined[name], stored[name]), name
        reader = CheckpointReader(meta_skeleton(shell), source.tensors)
        with CheckpointReader(meta_skeleton(checkpoint), checkpoint) as wanted:
            for layer, site in enumerate(wanted.sites):
                for expert in (0, site.num_experts - 1):
                    got, parts = reader.read(layer, expert), wanted.read(layer, expert)
                    assert set(got) == set(parts) and all(torch.equal(got[part], parts[part]) for part in parts)
            assert reader.dense_names() == wanted.dense_names(), "every other weight is asked for once"
    was, config = load_config(checkpoint), load_config(shell)
    differing = {name for name in was | config if was.get(name) != config.get(name)} - {"_name_or_path"}
    assert differing <= DIFFERING.get(arch, set()), {name: (was.get(name), config.get(name)) for name in differing}
    is_close = any(name.endswith(LOGARITHM) for name in read)
    assert is_close == (ALL[arch]["ggml"] in CLOSE)
    mine, theirs = logits(shell), logits(checkpoint)
    assert (mine - theirs).abs().max() <= (1e-5 * theirs.abs().max() if is_close else 0.0)


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_the_config_says_what_the_model_was_made_with(arch: str, tmp_path: Path) -> None:
    checkpoint, file = make_gguf(arch, tmp_path, rms_norm_eps=3e-6)
    wanted = load_config(checkpoint)
    with open_gguf(file) as source:
        config = source.config
    differing = {name for name, value in config.items() if value != wanted.get(name)}
    assert differing <= {"architectures", "head_dim", "rope_parameters", "num_experts", "mlp_only_layers"}
    assert config["rms_norm_eps"] == 3e-6 and config["rope_parameters"]["rope_theta"] > 0
    assert config["num_experts_per_tok"] == wanted["num_experts_per_tok"]


def load_config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = AutoConfig.from_pretrained(directory).to_dict()
    return found


def test_files_of_before_stacked_experts_and_with_gate_and_up_in_one(tmp_path: Path) -> None:
    checkpoint, file = make_gguf("mixtral", tmp_path)
    stored = load_file(checkpoint / "model.safetensors")
    with open_gguf(file) as source:
        whole = {name: raw(source, name) for name in source.header.tensors}
    old, fused = dict(whole), dict(whole)
    for layer in range(3):
        for part in ("gate", "up", "down"):
            stacked = old.pop(f"blk.{layer}.ffn_{part}_exps.weight")
            old |= {f"blk.{layer}.ffn_{part}.{e}.weight": stacked[e] for e in range(8)}
        pair = [fused.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        fused[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(pair, dim=1)
    for name, tensors in (("old", old), ("fused", fused)):
        folder = tmp_path / name
        folder.mkdir()
        config = load_config(checkpoint)
        with open_gguf(write_gguf(folder, "llama", config, tensors, all_f32, {}, convert_names=False)) as again:
            for key in stored:
                assert torch.equal(again.tensors.read(key), stored[key]), (name, key)
            assert again.tensors.coded("model.layers.0.block_sparse_moe.experts.3.w1.weight") is None


@pytest.mark.parametrize(
    ("arch", "ggml", "apart", "joint", "whole"),
    [
        ("deepseek_v2", "deepseek2", ("attn_k_b", "attn_v_b"), "attn_kv_b", "self_attn.kv_b_proj"),
        ("qwen3_next", "qwen3next", ("attn_qkv", "attn_gate"), "ssm_in", "linear_attn.in_proj_qkvz"),
    ],
)
def test_files_of_before_a_projection_was_taken_apart(
    arch: str, ggml: str, apart: tuple[str, str], joint: str, whole: str, tmp_path: Path
) -> None:
    checkpoint, file = make_gguf(arch, tmp_path)
    stored = load_file(checkpoint / "model.safetensors")
    with open_source(file) as source:
        tensors = {name: raw(source, name) for name in source.header.tensors}
        read = {name: source.tensors.read(name) for name in stored}
    for layer in range(3):
        for name in apart:
            del tensors[f"blk.{layer}.{name}.weight"]
        tensors[f"blk.{layer}.{joint}.weight"] = stored[f"model.layers.{layer}.{whole}.weight"]
    (tmp_path / "old").mkdir()
    file = write_gguf(tmp_path / "old", ggml, load_config(checkpoint), tensors, all_f32, {}, convert_names=False)
    with open_gguf(file) as source:
        assert set(source.tensors.tensors) == set(stored)
        assert all(torch.equal(source.tensors.read(name), read[name]) for name in stored)


def raw(source: Any, name: str) -> torch.Tensor:
    """A tensor as the file has it."""
    entry = source.header.tensors[name]
    handle = source.parts[0].open("rb")
    with handle:
        handle.seek(entry.offset)
        return torch.frombuffer(bytearray(handle.read(entry.bytes)), dtype=torch.float32).view(entry.shape)


@pytest.mark.parametrize(
    ("arch", "field", "text"),
    [
        ("qwen3_moe", {"qwen3moe.attention.sliding_window": 512}, "attention.sliding_window"),
        ("qwen3_moe", {"qwen3moe.final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "scores experts"),
        ("qwen3_moe", {"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale"),
        ("qwen3_moe", {"qwen3moe.rope.scaling.type": "longrope"}, "longrope"),
        ("granitemoe", {"granitemoe.rope.scaling.finetuned": False}, "without rotary embedding"),
        ("deepseek_v2", {"deepseek2.expert_weights_norm": True}, "weighs experts"),
        ("qwen3_moe", {"qwen3moe.attention.scale": 0.5}, "attention.scale"),
        ("afmoe", {"afmoe.expert_weights_norm": False}, "weighs experts"),
        ("qwen3_5_moe_text", {"qwen35moe.full_attention_interval": 2}, "not each 2th"),
        ("gemma4_text", {"gemma4.attention.shared_kv_layers": 2}, "shared_kv_layers"),
        ("gemma4_text", {"gemma4.rope.dimension_count_swa": 8}, "only a part of the dimensions"),
        ("llama4_text", {"llama4.attention.sliding_window": 0}, "rotates queries and keys in every layer"),
        ("phimoe_long", {"phimoe.context_length": 8192}, "a factor that its file does not have"),
        ("dbrx", {"dbrx.attention.layer_norm_epsilon": 1e-6}, "another epsilon"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(arch: str, field: dict[str, Any], text: str, tmp_path: Path) -> None:
    _, file = make_gguf(arch, tmp_path, tokenizer=field)
    with pytest.raises(ModelError, match=text):
        open_gguf(file)


def test_models_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint, file = make_gguf("qwen3_moe", tmp_path)
    with open_gguf(file) as source:
        tensors = {name: raw(source, name) for name in source.header.tensors}
    dense = {name: tensor for name, tensor in tensors.items() if "ffn" not in name}
    for ggml, weights, text in (
        ("grok", tensors, "'grok': transformers has no model type for it. Choose .*qwen3moe"),
        ("rnd1", tensors, "it fills in masked words"),
        ("starcoder", tensors, "'starcoder': Moestro does not read it yet. Import .* safetensors"),
        ("llama", tensors, "6 tensors that Moestro does not know .*attn_k_norm.weight"),
        ("qwen3moe", dense, "no experts"),
    ):
        folder = tmp_path / ggml
        folder.mkdir()
        with pytest.raises(ModelError, match=text):
            open_gguf(write_gguf(folder, ggml, load_config(checkpoint), weights, all_f32, {}, convert_names=False))


def test_a_vision_model_is_read_as_the_text_model_that_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_vl_moe", **tiny("qwen3_vl_moe"))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    text = config.text_config.to_dict()
    prefix = "model.language_model."
    weights = {  # the published checkpoints have experts transposed
        name.replace(prefix, "model."): tensor.transpose(1, 2) if ".experts." in name else tensor
        for name, tensor in model.state_dict().items()
        if name.startswith((prefix, "lm_head"))
    }
    file = write_gguf(tmp_path, "qwen3vlmoe", text, weights, all_f32, {"qwen3vlmoe.n_deepstack_layers": 3})
    with open_gguf(file) as source:
        assert source.config["model_type"] == "qwen3_moe"
        read_back(source, tmp_path / "shell")
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "shell"), model(IDS).logits)


def test_a_tensor_that_only_other_models_of_the_architecture_have_is_refused(tmp_path: Path) -> None:
    """A gate for embeddings of each layer, in a model without such embeddings: left out, it would change the result."""
    _, file = make_gguf("gemma4_26b", tmp_path)
    assert refusal(file) == ""
    whole = Raw.of(file)
    whole.rows.append(Row(b"blk.1.inp_gate.weight", (64, 16), 0, len(whole.data)))
    whole.data += bytes(4 * 64 * 16)
    found = refusal(whole.write(file))
    assert "per_layer_input_gate" in found and "Import the model's safetensors version instead." in found


def test_layers_that_only_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    checkpoint, file = make_gguf(
        "glm4_moe", tmp_path, num_hidden_layers=4, tokenizer={"glm4moe.nextn_predict_layers": 1}
    )
    whole = Raw.of(file)
    whole.rows.append(Row(b"blk.3.nextn.enorm.weight", (64,), 0, len(whole.data)))
    whole.data += bytes(256)
    with open_gguf(whole.write(file)) as source:
        assert source.config["num_hidden_layers"] == 3
        assert not any("layers.3." in name for name in source.tensors.tensors)
        assert "model.layers.2.mlp.gate.weight" in source.tensors.tensors
    assert checkpoint.is_dir()


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
    ],
)
def test_stretched_rotary_embeddings(field: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    _, file = make_gguf("qwen3_moe", tmp_path, tokenizer={f"qwen3moe.{key}": value for key, value in field.items()})
    with open_gguf(file) as source:
        assert source.config["rope_parameters"] == {"rope_theta": 10000.0, **wanted}


def test_frequencies_that_are_divided_as_llama_3_does(tmp_path: Path) -> None:
    rope = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    checkpoint, file = make_gguf(
        "mixtral", tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **rope}
    )
    with open_gguf(file) as source:
        divisors = source.config["rope_parameters"]["short_factor"]
        assert len(divisors) == 8 and divisors[0] == 1 < divisors[1] < divisors[-1] == 8
        read_back(source, tmp_path / "shell")
    torch.testing.assert_close(logits(tmp_path / "shell"), logits(checkpoint), rtol=0, atol=1e-5)


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.gguf_writer.page > docs/gguf.md"


def test_an_architecture_is_read_or_refused_and_each_that_is_read_is_tried() -> None:
    assert not READ.keys() & REFUSED.keys() and REFUSED.keys() <= set(LISTED)
    assert READ.keys() == {made["ggml"] for made in ALL.values()} | {"qwen3vlmoe"}
    assert len(LISTED) == 45
