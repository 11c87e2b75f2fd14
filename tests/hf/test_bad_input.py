"""Every way a model directory can be wrong is refused before the load, in words, with nothing kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from core.capacity.plan import plan
from core.errors import ModelError
from core.hf import CheckpointReader, check_model, load_skeleton, meta_skeleton
from core.settings.loading import LoadSpec
from tests.conftest import Checkpoint


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint of one's own to spoil."""
    return Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def _no_directory(path: Path) -> None:
    shutil.rmtree(path)


def _a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def _no_config(path: Path) -> None:
    (path / "config.json").unlink()


def _bad_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def _no_type(path: Path) -> None:
    (path / "config.json").write_text("{}")


def _only_pickles(path: Path) -> None:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"x")


def _no_weights(path: Path) -> None:
    for file in path.glob("*.safetensors*"):
        file.unlink()


def _truncated(path: Path) -> None:
    file = shards(path)[1]
    file.write_bytes(file.read_bytes()[:-100])


def _cut_in_header(path: Path) -> None:
    file = shards(path)[0]
    file.write_bytes(file.read_bytes()[:40])


def _empty_file(path: Path) -> None:
    shards(path)[0].write_bytes(b"")


def _garbage(path: Path) -> None:
    file = shards(path)[0]
    file.write_bytes(b"\xff" * file.stat().st_size)


def _missing_shard(path: Path) -> None:
    shards(path)[2].unlink()


def _bad_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("[]")


CASES: list[tuple[Callable[[Path], None], str]] = [
    (_no_directory, "no model at"),
    (_a_file, "is a file"),
    (_no_config, "no config.json"),
    (_bad_config, "config.json is damaged: line 1 is not JSON"),
    (_no_type, "names no model_type"),
    (_only_pickles, "never read here"),
    (_no_weights, "has no weights"),
    (_truncated, "00002-of-.*is damaged.*its header says"),
    (_cut_in_header, "00001-of-.*header is cut short"),
    (_empty_file, "is damaged"),
    (_garbage, "is damaged"),
    (_missing_shard, "1 of .* weight files are missing.*00003-of"),
    (_bad_index, "index.json is damaged: it has no weight_map"),
    (lambda p: edit(p, quantization_config={"quant_method": "gptq"}), "quantized .gptq.*launch.py import"),
    (lambda p: edit(p, model_type="brandnew", auto_map={"AutoConfig": "x.Y"}), "'brandnew'.*auto_map.*never runs"),
    (lambda p: edit(p, model_type="brandnew"), "does not know the model type 'brandnew'"),
    (lambda p: edit(p, model_type="vit"), "not a text-generating model"),
    (lambda p: edit(p, hidden_size="wide"), "cannot be used"),
    (lambda p: edit(p, head_dim=-16), "head_dim is -16, not a whole"),
]


@pytest.mark.parametrize(("spoil", "words"), CASES, ids=[w for _, w in CASES])
def test_refused(model: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(model)
    with pytest.raises(ModelError, match=words):
        load_skeleton(model)
    with pytest.raises(ModelError, match=words):
        meta_skeleton(model)


def test_remote_code_beside_a_known_architecture_is_ignored(model: Path) -> None:
    edit(model, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (model / "evil.py").write_text("raise SystemExit('ran')")
    assert type(load_skeleton(model)).__name__ == "Qwen3MoeForCausalLM"


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="'llama' is not a Mixture-of-Experts model"):
        load_skeleton(tmp_path)


def _without(path: Path, fragment: str) -> None:
    """Remove tensors whose name holds `fragment` from the files, but not the files."""
    for file in shards(path):
        tensors = load_file(file)
        kept = {n: t for n, t in tensors.items() if fragment not in n} or {"unused": torch.zeros(1)}
        save_file(kept, file, metadata={"format": "pt"})


def test_missing_dense_weights_are_refused(model: Path) -> None:
    _without(model, "layers.1.self_attn.q_proj")
    with pytest.raises(ModelError, match=r"lacks 1 weights.*q_proj"):
        load_skeleton(model)


def test_missing_experts_are_refused(model: Path) -> None:
    _without(model, "layers.1.mlp.experts.3.up_proj")
    with pytest.raises(ModelError, match=r"lacks weights of .*layers\.1\.mlp\.experts\.gate_up_proj"):
        CheckpointReader(load_skeleton(model), str(model))


Tensors = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn
GATE = "model.layers.1.mlp.experts.3.gate_proj"


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    for shard in shards(path):
        save_file(change(load_file(shard)), shard, metadata={"format": "pt"})


def _eight_bits(tensors: Tensors) -> Tensors:
    """As ModelOpt stores a checkpoint: 8-bit floats, and a scale of each matrix."""
    coded = {n: t.to(E4M3) if n.endswith("_proj.weight") else t for n, t in tensors.items()}
    return coded | {f"{n}_scale": torch.tensor(2.0) for n in coded if n.endswith("_proj.weight")}


def _codes_beside(ending: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {f"{GATE}{ending}": torch.ones(1) for n in tensors if n == f"{GATE}.weight"}


def _renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n.replace(old, new): t for n, t in tensors.items()}


CODED: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (_eight_bits, r"_proj\.weight' as float8_e4m3fn, codes for which its settings name no quantization"),
    (lambda t: {n: v.view(torch.int32) if GATE in n else v for n, v in t.items()}, "gate_proj.weight' as int32, codes"),
    (
        lambda t: {n: v.view(torch.int32) if n == "model.norm.weight" else v for n, v in t.items()},
        "model.norm.weight' as int32, codes",
    ),
    *(
        (_codes_beside(ending), f"holds '{GATE}{ending}', so '{GATE}.weight' is stored as codes".replace(".", r"\."))
        for ending in (".weight_scale", ".weight_scale_inv", ".weight.absmax", ".scales", ".biases", ".qzeros")
    ),
    (_renamed("experts.0.", "experts.-1."), "not numbered one by one from 0 on"),
    (_renamed("experts.7.", "experts.8."), "not numbered one by one from 0 on"),
]


@pytest.mark.parametrize(("change", "words"), CODED, ids=[words for _, words in CODED])
def test_weights_that_are_not_what_they_seem_are_refused(
    model: Path, change: Callable[[Tensors], Tensors], words: str
) -> None:
    rewrite(model, change)
    (model / "model.safetensors.index.json").unlink()
    save_file({n: t for file in shards(model) for n, t in load_file(file).items()}, model / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        CheckpointReader(meta_skeleton(model), str(model))


def test_scales_of_the_kv_cache_and_of_inputs_change_no_weight(model: Path) -> None:
    own = ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.k_proj.input_scale")
    rewrite(model, lambda t: t | {name: torch.ones(1) for name in own if "model.norm.weight" in t})
    (model / "model.safetensors.index.json").unlink()
    save_file({n: t for file in shards(model) for n, t in load_file(file).items()}, model / "model.safetensors")
    with CheckpointReader(meta_skeleton(model), str(model)) as reader:
        assert not {*reader.dense_names()} & {*own}


def test_a_quantization_beside_config_json_is_named(model: Path) -> None:
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (model / "hf_quant_config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError, match=r"is quantized \(modelopt FP8\)"):
        check_model(model)
    with pytest.raises(ModelError, match=r"quantized with modelopt \(FP8\), which is not read.*Use such a version"):
        plan(LoadSpec.checked(str(model)))
    stated["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (model / "hf_quant_config.json").write_text(json.dumps(stated))
    plan(LoadSpec.checked(str(model)))


def test_wrong_shapes_are_refused(model: Path) -> None:
    edit(model, vocab_size=300)
    with pytest.raises(ModelError, match="could not be loaded"):
        load_skeleton(model)


def test_hash_tells_models_apart(model: Path, checkpoint: Checkpoint) -> None:
    def identity() -> str:
        with CheckpointReader(meta_skeleton(model), check_model(model)) as reader:
            return reader.content_hash()

    first = identity()
    assert first == identity()
    file = shards(model)[0]
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert identity() != first


def test_closing_releases_the_files(model: Path) -> None:
    reader = CheckpointReader(meta_skeleton(model), str(model))
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed file"):
        reader.read(0, 0)
    shutil.rmtree(model)
