"""Sources: a plain checkpoint, conversions that run on codes, and what is said before an import."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from core.hf.checkpoint import CheckpointReader
from core.hf.coded import Merger, Planes, spread
from core.hf.skeleton import load_skeleton, meta_skeleton
from core.importing import forecast_import, import_model
from core.importing.sources import open_source
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.formats import Numbers
from core.memory.pack import Manifest, PackReader, aligned
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.conftest import Checkpoint
from tests.gguf_writer.write import make_gguf
from tests.selection import layered
from tests.sources.cases import CASES

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
    files = (
        "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
        "merges.txt chat_template.jinja generation_config.json"
    ).split()
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


OUT, IN, GROUP = 6, 64, 32


def coded(format: str = "int4-g32", zero: bool = True, seed: int = 0) -> QuantizedTensor:
    random = torch.Generator().manual_seed(seed)
    scale = torch.rand(OUT, IN // GROUP, generator=random)
    return QuantizedTensor(
        format, torch.randint(0, 16, (OUT, IN), dtype=torch.uint8, generator=random), scale, scale + 1 if zero else None
    )


def weight(c: QuantizedTensor) -> torch.Tensor:
    shift = torch.zeros(1) if c.zero is None else spread(c.zero, c.codes.shape)
    return (c.codes.float() - 8) * spread(c.scale, c.codes.shape) + shift


def check(parts: dict[str, QuantizedTensor], convert: object, works: bool = True) -> None:
    merged = Merger().merge(parts, convert, "part")  # type: ignore[arg-type]
    assert (merged is not None) == works
    if merged is not None:
        assert torch.equal(weight(merged), convert({n: weight(c) for n, c in parts.items()}))  # type: ignore[operator]


def test_gate_over_up() -> None:
    for zero in (True, False):
        check({"gate": coded(zero=zero), "up": coded(zero=zero, seed=1)}, lambda t: torch.cat([t["gate"], t["up"]]))


def test_gate_beside_up_transposed_and_interleaved() -> None:
    def convert(planes: Planes) -> torch.Tensor:
        return torch.stack([planes["gate"], planes["up"]], 1).flatten(0, 1).t().contiguous()

    check({"gate": coded(), "up": coded(seed=1)}, convert)


def test_a_whole_number_of_groups_may_be_cut_off() -> None:
    check({"w": coded()}, lambda t: t["w"].chunk(2, 1)[0])


def test_cutting_across_groups_is_left_to_weights() -> None:
    check({"w": coded()}, lambda t: t["w"].view(OUT, 2, -1).transpose(1, 2).reshape(OUT, -1), works=False)
    check({"w": coded()}, lambda t: t["w"][:, :16], works=False)
    row = coded("int8", zero=False)._replace(scale=torch.rand(OUT, 1))
    check({"w": row}, lambda t: t["w"].repeat(1, 2), works=False)


def test_a_scale_of_fewer_dimensions_is_left_to_weights() -> None:
    flat = coded()._replace(scale=torch.rand(OUT), zero=None)
    check({"w": flat}, lambda t: t["w"].transpose(0, 1), works=False)


def test_parts_in_different_formats_are_left_to_weights() -> None:
    check({"a": coded(), "b": coded("int4-g32-sym", zero=False)}, lambda t: torch.cat([t["a"], t["b"]]), works=False)


def test_what_was_learnt_of_one_shape_is_not_used_for_another() -> None:
    merger = Merger()

    def convert(planes: Planes) -> torch.Tensor:
        return planes["w"].chunk(2, 1)[0]

    assert merger.merge({"w": coded()}, convert, "part") is not None
    odd = coded()._replace(scale=torch.rand(OUT, 1), zero=None, format="int4-g64-sym")
    assert merger.merge({"w": odd}, convert, "part") is None


WIDE: dict[str, Any] = dict(hidden_size=256, moe_intermediate_size=256, intermediate_size=256)
LARGE_DOWN = "Q6_K"  # as in a Q4_K_M


def q4_k_m(name: str) -> str:
    return "F32" if "_exps.weight" not in name else LARGE_DOWN if "down" in name else "Q4_K"


def in_pack(pack: Path, part: str) -> torch.Tensor:
    """A part of the first expert, fp32, as a pack has it."""
    manifest = Manifest.load(pack)
    codec = manifest.codecs(torch.float32, torch.device("cpu"))[0]
    with PackReader(pack) as reader:
        blob = aligned(reader.padded_bytes)
        reader.read_into(0, blob)
    slot = aligned(codec.slot_bytes)
    codec.place(blob, slot)
    return codec.dequantize(codec.views(slot), part)


def in_source(path: Path, part: str, shell: Path) -> torch.Tensor:
    shell.mkdir()
    with open_source(path) as source:
        reader = CheckpointReader(meta_skeleton(source.write_shell(shell)), source.tensors)
        return reader.read(0, 0)[part].float()


@pytest.mark.long(0.1)
def test_of_a_mix_each_matrix_is_said_to_keep_its_codes(tmp_path: Path) -> None:
    _, file = make_gguf("qwen3_moe", tmp_path, q4_k_m, **WIDE)
    found = forecast_import(str(file))
    assert found is not None and found.format == "q4_k+q6_k"
    assert [(one.stored, one.how, one.error) for one in found.conversions] == [
        ("Q4_K", "exact codes", 0.0),
        ("Q6_K", "exact codes", 0.0),
    ]
    assert [one.share for one in found.conversions] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    pack = import_model(str(file), tmp_path / "pack")
    for part in ("gate_up_proj", "down_proj"):
        assert torch.equal(in_source(file, part, tmp_path / part), in_pack(pack, part))
    assert found.lines()[0].startswith("The pack takes ") and " the source has " in found.lines()[0]


@pytest.mark.parametrize("name", layered(["fp8-block", "gptq-sym", "mxfp4"], quick=lambda name: name == "fp8-block"))
def test_a_quantized_checkpoint_is_said_to_grow_as_it_does(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    path = case.write(tmp_path / "source").path
    found = forecast_import(str(path))
    assert found.source_bytes == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    [one] = found.conversions
    assert (one.stored, one.share, one.error) == (case.label, 1.0, 0.0)
    pack = import_model(str(path), tmp_path / "pack")
    experts = sum(file.stat().st_size for file in pack.glob("experts-*.bin"))
    assert found.bytes - found.dense_bytes == experts
    assert 0 <= (pack / "model.safetensors").stat().st_size - found.dense_bytes < 16_000  # its header
    assert ("times as much" in found.lines()[0]) is (name != "mxfp4")
    assert "nothing is lost" in found.lines()[1]


def test_a_chosen_format_is_foretold(checkpoint: Checkpoint) -> None:
    said = {name: forecast_import(str(checkpoint("qwen3_moe")), name) for name in ("auto", "int8", "int2")}
    kept, eight, two = (one.conversions[0] for one in said.values() if one is not None)
    assert (kept.stored, kept.how, kept.error) == ("float32", "as stored", 0.0)
    assert (eight.how, two.how) == ("quantised", "quantised")
    assert 0 < eight.error < 0.02 < 0.2 < two.error


def test_what_is_not_on_this_machine_is_not_foretold() -> None:
    assert forecast_import("some/model") is None
