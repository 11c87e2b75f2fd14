"""The head of a GGUF model that predicts further tokens is the one of the checkpoint that the file was made from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from core.hf.head import PARTS
from core.importing import forecast_import, import_model
from core.importing.left_out import AHEAD, COPIES, FURTHER
from core.importing.sources.gguf import open_gguf
from core.memory.pack import check
from core.system.native.compile import supported
from tests.gguf_writer.models import ARCHITECTURES
from tests.gguf_writer.write import Choice, all_f32, experts_in, write_gguf
from tests.loaded import loaded
from tests.mtp_checkpoint import LAYERS, tensors_of, with_head, write
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

ARCHS = layered(["glm4_moe", "deepseek_v3"], quick=lambda arch: arch == "glm4_moe")
AT, STORED = f"model.layers.{LAYERS}.", f"blk.{LAYERS}."
OWN = {f"{part}.weight": f"nextn.{part.replace('.', '_')}.weight" for part in PARTS}
TWICE = {"embed_tokens.weight": "nextn.embed_tokens.weight", "shared_head.head.weight": "nextn.shared_head_head.weight"}


def made(arch: str, folder: Path, choice: Choice = all_f32, leave: str = "", heads: int = 1) -> tuple[Path, Path]:
    """A checkpoint with a head, and the same as GGUF, without the tensors of this name; of several heads the others
    have other weights."""
    own = dict(ARCHITECTURES[arch])
    ggml = own.pop("ggml")
    source = with_head(arch, folder / "model", **own)
    tensors, config = tensors_of(source), json.loads((source / "config.json").read_text())
    further = {STORED + name: tensors.pop(AT + part) for part, name in (OWN | TWICE).items()}

    def also(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        whole = stored | further
        for at in range(1, heads):
            others = {name: one + at for name, one in (stored | further).items() if name.startswith(STORED)}
            whole |= {name.replace(STORED, f"blk.{LAYERS + at}."): one for name, one in others.items()}
        return {name: one for name, one in whole.items() if not leave or leave not in name}

    config = own | config | {"num_hidden_layers": LAYERS + 1}
    more = {f"{ggml}.nextn_predict_layers": heads, f"{ggml}.block_count": LAYERS + heads}
    return source, write_gguf(folder, ggml, config, tensors, choice, more, also=also)


def guessed(pack: Path) -> torch.Tensor:
    """[V] logits of a pack's head after random states."""
    how: dict[str, Any] = dict(arithmetic="fast", context=64)
    with loaded(save_tokenizer(pack), {"budget": "100%", "drafts": "mtp"}, **how) as engine:
        head = engine.parts.drafter.head
        assert head is not None and engine.loaded.head is not None
        width = engine.loaded.head.config.hidden_size
        states = torch.randn(6, width, generator=torch.Generator().manual_seed(0))
        found = head._computed(head.passes, engine.loaded.head.normed(states), [*range(1, 7)], 0).logits
        return torch.as_tensor(found).clone()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_head_is_imported(arch: str, tmp_path: Path) -> None:
    source, file = made(arch, tmp_path)
    found = forecast_import(str(file))
    assert found is not None and found.head_bytes
    assert [one.what for one in found.left_out] == [COPIES]
    packs = [import_model(str(path), tmp_path / path.suffix.strip(".") / "pack") for path in (source, file)]
    one, other = map(check, packs)
    assert (one.heads, one.layers) == (other.heads, other.layers) == (1, other.layers)
    assert one.sums == other.sums, "experts, those of the head among them"
    stored, kept = map(tensors_of, packs)
    names = [name for name in stored if name.startswith(AT)]
    assert names and all(torch.equal(kept[name], stored[name]) for name in names)
    if supported():
        wanted = guessed(packs[0])
        assert torch.equal(guessed(packs[1]), wanted) and wanted.std() > 0


def test_of_several_the_first_is_imported(tmp_path: Path) -> None:
    """The others are named."""
    packs = list[Path]()
    for heads in (1, 3):
        (folder := tmp_path / str(heads)).mkdir()
        _, file = made("glm4_moe", folder, heads=heads)
        found = forecast_import(str(file))
        assert found is not None and found.head_bytes
        assert {one.what for one in found.left_out} == ({COPIES} if heads == 1 else {COPIES, FURTHER})
        packs.append(import_model(str(file), folder / "pack"))
    one, other = map(check, packs)
    assert (one.heads, one.layers, one.sums) == (other.heads, other.layers, other.sums)
    stored, kept = map(tensors_of, packs)
    assert stored.keys() == kept.keys() and all(torch.equal(kept[name], stored[name]) for name in stored)


def test_one_in_codes(tmp_path: Path) -> None:
    _, file = made("glm4_moe", tmp_path, experts_in("Q8_0"))
    manifest = check(import_model(str(file), tmp_path / "pack"))
    assert (manifest.heads, manifest.format) == (1, "int8-g32")
    assert "exact codes" in set(manifest.exact.values())


def test_it_can_be_left_out(tmp_path: Path) -> None:
    _, file = made("glm4_moe", tmp_path)
    pack = import_model(str(file), tmp_path / "pack", head=False)
    assert check(pack).heads == 0
    assert not any(name.startswith(AT) for name in tensors_of(pack))


@pytest.mark.parametrize("lost", ["nextn.hnorm", "nextn.shared_head_norm", f"{STORED}ffn_up_exps", f"{STORED}attn_q."])
def test_one_that_is_not_whole_is_left_out(lost: str, tmp_path: Path) -> None:
    _, file = made("glm4_moe", tmp_path, leave=lost)
    found = forecast_import(str(file))
    assert found is not None and not found.head_bytes
    assert found.left_out[0].what.startswith(AHEAD)
    pack = import_model(str(file), tmp_path / "pack")
    assert check(pack).heads == 0


def test_what_is_not_known_of_it_is_not_ignored(tmp_path: Path) -> None:
    """The head is left out, and the model is imported."""
    _, file = made("glm4_moe", tmp_path)
    with open_gguf(file) as source:
        assert f"{AT}eh_proj.weight" in source.tensors.tensors
    strange = tmp_path / "strange"
    strange.mkdir()
    own = dict(ARCHITECTURES["glm4_moe"])
    ggml, tensors = own.pop("ggml"), tensors_of(tmp_path / "model")
    config = own | json.loads((tmp_path / "model" / "config.json").read_text()) | {"num_hidden_layers": LAYERS + 1}
    further = {STORED + name: tensors.pop(AT + part) for part, name in (OWN | TWICE).items()}
    further[f"{STORED}attn_sinks.weight"] = torch.ones(4)
    file = write_gguf(
        strange, ggml, config, tensors, all_f32, {f"{ggml}.nextn_predict_layers": 1}, also=lambda has: has | further
    )
    with open_gguf(file) as source:
        assert not any(name.startswith(AT) for name in source.tensors.tensors)


@pytest.mark.parametrize("lost", ["experts.1.up_proj", "input_layernorm", "mlp.experts"])
def test_a_checkpoint_s_head_without_its_weights_is_left_out(lost: str, tmp_path: Path) -> None:
    """The model is imported, and loads, as without one."""
    source = with_head("glm4_moe", tmp_path / "model")
    tensors = {name: one for name, one in tensors_of(source).items() if not (name.startswith(AT) and lost in name)}
    write(source, tensors)
    found = forecast_import(str(source))
    assert found is not None and not found.head_bytes
    assert "some of its weights are missing" in found.left_out[0].what
    assert check(import_model(str(source), tmp_path / "pack")).heads == 0
    with loaded(source, {"budget": "50%", "drafts": "mtp"}, arithmetic="fast", context=64) as engine:
        assert engine.loaded.head is None
