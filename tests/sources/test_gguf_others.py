"""GGUF models of latent attention, of states and of sliding windows give back the model that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from core.hf import CheckpointReader, meta_skeleton
from core.importing import import_model
from core.importing.sources import open_source
from core.memory.pack import Manifest
from tests.architectures.trial import writers
from tests.gguf_files import experts_in, make_gguf
from tests.gguf_others import OTHERS
from tests.selection import layered
from tests.sources.test_imported import ours, theirs

UNSAID = {
    "granitemoehybrid": {"max_position_embeddings"},
    "nemotron_h": {"max_position_embeddings", "intermediate_size"},
}
"""Fields that a file does not say, or says otherwise."""


def logits(directory: Path) -> torch.Tensor:
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(3))
    config = AutoConfig.from_pretrained(directory)
    model = writers(config)[0].from_pretrained(directory, local_files_only=True)
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("arch", layered(OTHERS, quick=lambda arch: False))
def test_the_model_is_the_one_it_was_made_from(arch: str, tmp_path: Path) -> None:
    checkpoint, file = make_gguf(arch, tmp_path)
    shell = tmp_path / "shell"
    shell.mkdir()
    stored = load_file(checkpoint / "model.safetensors")
    with open_source(file) as source:
        files = source.write_shell(shell)
        read = {name: source.tensors.read(name) for name in source.tensors.tensors}
        assert set(read) == set(stored)
        for name, tensor in read.items():
            assert_same(name, tensor, stored[name])
            assert (tensor.dtype, tuple(tensor.shape)) == source.tensors.tensors[name]
        assert_every_weight_is_asked_for(CheckpointReader(meta_skeleton(files), source.tensors), checkpoint)
    save_file(read, shell / "model.safetensors", metadata={"format": "pt"})
    got, wanted = logits(shell), logits(checkpoint)
    assert (got - wanted).abs().max() <= bound(read) * wanted.abs().max()


def assert_same(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """A_log is stored as -exp of it, which rounds twice; all others come back bit for bit."""
    if name.endswith("A_log"):
        assert torch.allclose(got, wanted, rtol=0, atol=1e-6), name
    else:
        assert torch.equal(got, wanted), name


def bound(weights: dict[str, Any]) -> float:
    """The largest difference of logits, as a share of the largest."""
    return 1e-5 if any(name.endswith("A_log") for name in weights) else 0.0


def assert_every_weight_is_asked_for(reader: CheckpointReader, checkpoint: Path) -> None:
    with CheckpointReader(meta_skeleton(checkpoint), checkpoint) as wanted:
        for layer, site in enumerate(wanted.sites):
            for expert in (0, site.num_experts - 1):
                got, parts = reader.read(layer, expert), wanted.read(layer, expert)
                assert set(got) == set(parts) and all(torch.equal(got[part], parts[part]) for part in parts)
        assert reader.dense_names() == wanted.dense_names()


@pytest.mark.parametrize("arch", layered(OTHERS, quick=lambda arch: False))
def test_the_config_says_what_the_model_was_made_with(arch: str, tmp_path: Path) -> None:
    checkpoint, file = make_gguf(arch, tmp_path)
    wanted = AutoConfig.from_pretrained(checkpoint).to_dict()
    shell = tmp_path / "shell"
    shell.mkdir()
    with open_source(file) as source:
        source.write_shell(shell)
    found = AutoConfig.from_pretrained(shell).to_dict()
    differing = {name: (found.get(name), value) for name, value in wanted.items() if found.get(name) != value}
    del differing["_name_or_path"]
    assert set(differing) <= UNSAID.get(arch, set()), differing


@pytest.mark.long(0.3)
@pytest.mark.parametrize("arch", ["nemotron_h", "glm_moe_dsa", "kimi_linear"])
def test_imported_and_loaded_it_has_the_logits_of_its_dequantised_weights(arch: str, tmp_path: Path) -> None:
    _, file = make_gguf(arch, tmp_path, experts_in("Q8_0"))
    pack = import_model(str(file), tmp_path / "pack")
    assert Manifest.load(pack).format == "int8-g32"
    assert torch.equal(ours(pack), theirs(file, tmp_path / "reference"))
