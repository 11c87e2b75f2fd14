"""A head that predicts further tokens is imported with the model, as one MoE layer more."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from core.errors import ModelError
from core.hf.head import MIMO, PARTS, UNKNOWN, MtpHead, attach, head_of
from core.hf.skeleton import load_skeleton
from core.importing import forecast_import, import_model
from core.importing.left_out import AHEAD, COPIES, FURTHER
from core.memory.pack import PackReader, check
from core.memory.pack.manifest import Manifest
from core.memory.pack.verify import verify
from tests.checkpoints import random_model
from tests.mtp_checkpoint import LAYERS, head_of_checkpoint, tensors_of, with_head, write
from tests.selection import layered

ARCHS = layered(
    ["glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text"], quick=lambda arch: arch in ("glm4_moe", "qwen3_next")
)
AT = f"model.layers.{LAYERS}"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_head_is_imported(arch: str, tmp_path: Path) -> None:
    source = with_head(arch, tmp_path / "model")
    stored = tensors_of(source)
    found = forecast_import(str(source))
    assert found is not None
    names = {one: name for name, one in head_of_checkpoint(stored).items()}
    own = {name: stored[name] for one, name in names.items() if ".experts." not in one}
    twice = [names[one] for one in ("embed_tokens.weight", "shared_head.head.weight") if one in names]
    assert bool(twice) == (not arch.startswith("qwen"))
    assert found.left_out == (((COPIES, sum(own.pop(name).nbytes for name in twice)),) if twice else ())

    pack = import_model(str(source), tmp_path / "pack")
    manifest = check(pack)
    dense = not arch.startswith("qwen")
    assert (manifest.layers, manifest.heads) == (LAYERS + 1 - dense, 1), "the first layer may have no experts"
    experts = manifest.experts * manifest.padded_bytes
    assert found.head_bytes == sum(tensor.nbytes for tensor in own.values()) + experts
    assert any(line.startswith(f"With it: {AHEAD}, ") for line in found.lines())
    kept = tensors_of(pack)
    assert all(torch.equal(kept[name], tensor) for name, tensor in own.items())
    assert verify(pack).problems == ()
    codec = manifest.codecs(torch.float32, torch.device("cpu"))[0]
    blob, slot = (torch.empty(size, dtype=torch.uint8) for size in (manifest.padded_bytes, codec.slot_bytes))
    with PackReader(pack) as reader:
        reader.read_into(manifest.total - 1, blob)
    codec.place(blob, slot)
    last = stored[names[f"mlp.experts.{manifest.experts - 1}.down_proj.weight"]]
    assert torch.equal(codec.dequantize(codec.views(slot), "down_proj"), last)


def test_one_without_experts(tmp_path: Path) -> None:
    """MiMo's: of several heads the first is imported, beside no further MoE layer, and the others are named."""
    source = with_head("mimo_v2_flash", tmp_path / "model")
    stored = tensors_of(source)
    own = {name: one for name, one in stored.items() if name.startswith(MIMO)}
    others = sum(one.nbytes for name, one in stored.items() if name.startswith("model.mtp.layers.1."))
    found = forecast_import(str(source))
    assert found is not None and others
    assert (found.left_out, found.head_bytes) == (((FURTHER, others),), sum(one.nbytes for one in own.values()))
    pack, without = (import_model(str(source), tmp_path / f"pack {head}", head=head) for head in (True, False))
    assert [(check(one).layers, check(one).heads) for one in (pack, without)] == [(LAYERS - 1, 0)] * 2
    kept = tensors_of(pack)
    assert all(torch.equal(kept[name], tensor) for name, tensor in own.items())
    assert not any("mtp" in name for name in tensors_of(without))
    assert verify(pack).problems == ()
    states = [head_of(load_skeleton(path, head=True)).layer.state_dict() for path in (source, pack)]
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())
    assert torch.equal(states[0]["shared_head.norm.weight"], own[f"{MIMO}final_layernorm.weight"])


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


def test_one_of_a_model_with_images(tmp_path: Path) -> None:
    """Qwen3.5's: the text model's names are within others, its experts lie together, and the head's one by one."""
    text = with_head("qwen3_5_moe_text", tmp_path / "text")
    tensors, stated = tensors_of(text), json.loads((text / "config.json").read_text())
    found = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    for layer in range(LAYERS):
        at = f"model.language_model.layers.{layer}.mlp.experts."
        parts = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            torch.stack([found.pop(f"{at}{n}.{part}.weight") for n in range(stated["num_experts"])]) for part in parts
        )
        found |= {f"{at}gate_up_proj": torch.cat((gate, up), 1), f"{at}down_proj": down}
    found["model.visual.patch.weight"] = torch.zeros(16, 4)
    whole = shutil.copytree(text, tmp_path / "whole")
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": stated}))
    write(whole, found)
    packs = [check(import_model(str(path), tmp_path / f"{path.name} pack")) for path in (text, whole)]
    assert [pack.heads for pack in packs] == [1, 1] and packs[0].sums == packs[1].sums
    one, *others = (load_skeleton(path, head=True) for path in (text, whole, tmp_path / "whole pack"))
    for other in others:
        layer, model = (part.state_dict() for part in (head_of(other).layer, other))
        assert all(torch.equal(layer[name], tensor) for name, tensor in head_of(one).layer.state_dict().items())
        assert all(torch.equal(model[name], tensor) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("part", ["fc", "norm", "pre_fc_norm_hidden"])
def test_what_is_not_whole_is_left_out_by_its_own_name(part: str, tmp_path: Path) -> None:
    source = with_head("qwen3_next", tmp_path / "model")
    tensors = tensors_of(source)
    del tensors[f"mtp.{part}.weight"]
    found = forecast_import(str(write(source, tensors)))
    assert found is not None and not found.head_bytes
    assert found.left_out[0].what == (AHEAD if part == "fc" else f"{AHEAD}: {UNKNOWN}: {part} is not among its weights")


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


def test_models_that_keep_other_things_have_none() -> None:
    """Such as windows."""
    model = random_model("gpt_oss")
    before = len(model.model.layers)
    with pytest.raises(ModelError, match=UNKNOWN):
        attach(model)
    assert len(model.model.layers) == before
