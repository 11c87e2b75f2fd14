"""What a pack will not have is named before the import, with its size."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from core.importing import forecast_import
from core.importing.left_out import AHEAD, OTHER, left_out
from tests.conftest import Checkpoint
from tests.gguf_writer.write import make_gguf


def test_a_layer_with_a_head_is_one_as_a_whole() -> None:
    sizes = {
        "model.layers.4.eh_proj.weight": 5,
        "model.layers.4.mlp.experts.3.up_proj.weight": 100,
        "mtp.fc.weight": 2,
        "model.visual.blocks.0.attn.qkv.weight": 50,
        "vision_tower.patch.weight": 3,
        "audio_tower.conv.weight": 1,
        "model.rotary_emb.inv_freq": 4,
    }
    assert left_out(sizes) == (
        (AHEAD, 107),
        ("the part that reads pictures", 53),
        (OTHER, 4),
        ("the part that hears or speaks", 1),
    )
    assert left_out({}) == ()


def test_a_checkpoint_s_heads_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("qwen3_moe")
    path = tmp_path / "model"
    path.mkdir()
    tensors = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    tensors |= {"mtp.fc_hidden.weight": torch.zeros(64, 32), "model.visual.patch.weight": torch.zeros(16, 4)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text((source / "config.json").read_text())
    for file in source.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    found = forecast_import(str(path))
    assert found is not None
    assert found.left_out == ((AHEAD, 64 * 32 * 4), ("the part that reads pictures", 16 * 4 * 4))
    assert found.lines()[-2].startswith(f"Left out: {AHEAD}, ")


def test_those_of_a_gguf_file_are_named(tmp_path: Path) -> None:
    def also(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"blk.2.nextn.eh_proj.weight": torch.zeros(64, 32)}

    stated = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    _, file = make_gguf("glm4_moe", tmp_path, tokenizer=stated, also=also, num_hidden_layers=2)
    found = forecast_import(str(file))
    assert found is not None
    assert found.left_out == ((AHEAD, 64 * 32 * 4),)
