"""A plain checkpoint as a source: every architecture's experts and dense weights, its tokenizer and its identity."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from core.hf import CheckpointReader, load_skeleton, meta_skeleton
from core.importing.sources import open_source
from core.memory.codec.formats import Numbers
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.conftest import Checkpoint
from tests.selection import layered

FAMILIES = [*ARCHITECTURES, "minimax_m2", "ernie4_5_moe", "dots1", "lfm2_moe", "qwen3_next"]


QUICK = ("granitemoe", "gpt_oss", "ernie4_5_moe")  # tests/pack/test_importing.py imports four others


@pytest.mark.parametrize("arch", layered(FAMILIES, quick=lambda arch: arch in QUICK))
def test_experts_and_dense_weights_are_transformers_own(arch: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    full = AutoModelForCausalLM.from_pretrained(checkpoint(arch), dtype="auto").eval()
    with open_source(checkpoint(arch)) as source:
        assert (source.kind, source.label, source.exact_format) == ("safetensors", "safetensors float32", "checkpoint")
        assert source.numbers == Numbers(torch.float32, torch.float32, torch.float32)
        reader = CheckpointReader(meta_skeleton(source.write_shell(tmp_path)), source.tensors)
        for site in reader.sites:
            stacked = full.get_submodule(site.name)
            for expert in range(site.num_experts):
                parts = reader.read_coded(site.index, expert)
                assert list(parts) == list(site.parts)
                for part, tensor in parts.items():
                    assert isinstance(tensor, torch.Tensor)
                    assert torch.equal(tensor, stacked.get_parameter(part)[expert]), (site.name, part, expert)
        kept = {n: source.tensors.read(n) for n in reader.dense_names()}
    assert not any(".experts." in n and "shared" not in n for n in kept)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = load_skeleton(tmp_path).state_dict(), full.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_tied_weights_are_kept_once(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path / "tied", max_shard_size="1GB", tie_word_embeddings=True)
    stored = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in stored
    head = stored["model.embed_tokens.weight"].clone()
    for value, kept in (
        (head, ["model.embed_tokens.weight"]),
        (head + 1, ["lm_head.weight", "model.embed_tokens.weight"]),
    ):  # not tied, whatever is said
        save_file(stored | {"lm_head.weight": value}, path / "model.safetensors", metadata={"format": "pt"})
        with open_source(path) as source:
            names = CheckpointReader(meta_skeleton(path), source.tensors).dense_names()
        assert [n for n in names if "embed" in n or "head" in n] == kept


def test_tensors_that_the_model_does_not_need_are_left_out(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path / "model", max_shard_size="1GB")
    stored = load_file(path / "model.safetensors")
    next_token = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in stored.items() if "layers.2." in n}
    next_token["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(stored | next_token, path / "model.safetensors", metadata={"format": "pt"})
    with open_source(path) as source:
        names = CheckpointReader(meta_skeleton(path), source.tensors).dense_names()
    assert any("layers.2." in n for n in names)
    assert not any("layers.3." in n for n in names)


def test_the_shell_has_what_transformers_needs_and_no_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": None, "torch_dtype": "bfloat16"}))
    files = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "generation_config.json",
    ]
    for name in [*files, "modeling_evil.py", "tokenizer_evil.py", "pytorch_model.bin", "README.md"]:
        (path / name).write_text("{}")
    shell = tmp_path / "shell"
    shell.mkdir()
    with open_source(path) as source:
        source.write_shell(shell)
        assert source.dense_dtype == torch.bfloat16
    assert sorted(f.name for f in shell.iterdir()) == sorted(["config.json", *files])
    assert AutoConfig.from_pretrained(shell).dtype == torch.bfloat16


def test_the_hash_tells_checkpoints_apart(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint("mixtral"), tmp_path / "model"))

    def identity() -> str:
        with open_source(path) as source:
            return source.hash()

    first = identity()
    assert first == identity()
    file = sorted(path.glob("*.safetensors"))[0]
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert identity() != first


def test_closing_a_source_releases_its_files(checkpoint: Checkpoint) -> None:
    source = open_source(checkpoint("qwen3_moe"))
    source.close()
    source.close()
    with pytest.raises(ValueError, match="closed file"):
        source.tensors.read("model.norm.weight")
