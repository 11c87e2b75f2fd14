"""A head that predicts further tokens is imported with the model, as one MoE layer more."""

import json
from pathlib import Path

import pytest
import torch

from core.errors import ModelError
from core.hf.head import PARTS, UNKNOWN, MtpHead, attach
from core.importing import forecast_import, import_model
from core.importing.left_out import AHEAD, COPIES
from core.memory.pack import PackReader, check
from core.memory.pack.manifest import Manifest
from core.memory.pack.verify import verify
from tests.checkpoints import random_model
from tests.mtp_checkpoint import LAYERS, tensors_of, with_head, write
from tests.selection import layered

ARCHS = layered(["glm4_moe", "deepseek_v3"], quick=lambda arch: arch == "glm4_moe")
AT = f"model.layers.{LAYERS}"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_head_is_imported(arch: str, tmp_path: Path) -> None:
    source = with_head(arch, tmp_path / "model")
    stored = tensors_of(source)
    found = forecast_import(str(source))
    assert found is not None
    own = {n: t for n, t in stored.items() if n.startswith(f"{AT}.") and ".experts." not in n}
    copies = sum(own.pop(f"{AT}.{name}.weight").nbytes for name in ("embed_tokens", "shared_head.head"))
    assert found.left_out == ((COPIES, copies),)

    pack = import_model(str(source), tmp_path / "pack")
    manifest = check(pack)
    assert (manifest.layers, manifest.heads) == (LAYERS, 1), "the first of its layers has no experts"
    experts = manifest.experts * manifest.padded_bytes
    assert found.head_bytes == sum(tensor.nbytes for tensor in own.values()) + experts
    assert any(line.startswith(f"With it: {AHEAD}, ") for line in found.lines())
    kept = tensors_of(pack)
    assert all(torch.equal(kept[name], tensor) for name, tensor in own.items())
    assert verify(pack).problems == ()
    codec = manifest.codec(torch.float32, torch.device("cpu"))
    blob, slot = (torch.empty(size, dtype=torch.uint8) for size in (manifest.padded_bytes, codec.slot_bytes))
    with PackReader(pack) as reader:
        reader.read_into(manifest.total - 1, blob)
    codec.place(blob, slot)
    last = stored[f"{AT}.mlp.experts.{manifest.experts - 1}.down_proj.weight"]
    assert torch.equal(codec.dequantize(codec.views(slot), "down_proj"), last)


def test_it_can_be_left_out(tmp_path: Path) -> None:
    source = with_head("glm4_moe", tmp_path / "model")
    with_it, without = (import_model(str(source), tmp_path / str(head), head=head) for head in (True, False))
    manifest = check(without)
    assert (manifest.layers, manifest.heads) == (check(with_it).layers - 1, 0)
    assert not any(name.startswith(f"{AT}.") for name in tensors_of(without))
    stated = json.loads((without / "moestro.json").read_text())
    assert "heads" not in stated and stated["pack"] == 1, "an older version reads it"
    assert json.loads((with_it / "moestro.json").read_text())["pack"] == 2
    assert Manifest.load(with_it).identity != manifest.identity, "neither continues the other's import"


@pytest.mark.parametrize("part", PARTS)
def test_what_is_not_whole_is_left_out_in_words(part: str, tmp_path: Path) -> None:
    source = with_head("glm4_moe", tmp_path / "model")
    tensors = tensors_of(source)
    del tensors[f"{AT}.{part}.weight"]
    found = forecast_import(str(write(source, tensors)))
    assert found is not None
    assert not found.head_bytes
    if part == "eh_proj":  # by which a head is known
        assert found.left_out[0].what == AHEAD
    else:
        assert found.left_out[0].what == f"{AHEAD}: {UNKNOWN}: {part} is not among its weights"
    assert found.lines()[-1].startswith(f"Left out: {AHEAD}")


def test_a_layer_that_does_not_run_alone_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def states(*_: object) -> torch.Tensor:
        raise TypeError("it needs more")

    monkeypatch.setattr(MtpHead, "states", states)
    source = with_head("glm4_moe", tmp_path / "model")
    found = forecast_import(str(source))
    assert found is not None and not found.head_bytes
    assert found.left_out[0].what == f"{AHEAD}: {UNKNOWN}: the layer does not run alone (it needs more)"
    assert check(import_model(str(source), tmp_path / "pack")).heads == 0


@pytest.mark.parametrize("arch", ["qwen3_next", "gpt_oss"])
def test_models_that_keep_other_things_have_none(arch: str) -> None:
    """States, and windows."""
    model = random_model(arch)
    before = len(model.model.layers)
    with pytest.raises(ModelError, match=UNKNOWN):
        attach(model)
    assert len(model.model.layers) == before
