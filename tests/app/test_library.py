"""The library: what is found where, what is said of broken entries, and what a deletion may take away."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.services.candidates import PACK, UNFINISHED, Entry, look
from app.services.host import Host
from app.services.library import scan
from core.errors import ModelError
from core.system.gguf import read_metadata
from tests.app.conftest import WAIT_S
from tests.fake_models import fake_pack

pytestmark = pytest.mark.usefixtures("hub")

MOE = {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "dtype": "bfloat16"}


def checkpoint(folder: Path, config: dict[str, Any], weights: int = 1000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"x" * weights)
    return folder


def cached(hub: Path, repo: str, config: dict[str, Any]) -> Path:
    """A repository as the Hugging Face cache keeps it: blobs, and a snapshot of links to them."""
    root, commit = hub / f"models--{repo.replace('/', '--')}", "a" * 40
    snapshot = root / "snapshots" / commit
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for name, data in (("config.json", json.dumps(config).encode()), ("model.safetensors", b"x" * 500)):
        (root / "blobs" / name).write_bytes(data)
        try:
            (snapshot / name).symlink_to(root / "blobs" / name)
        except OSError:  # Windows without the right to: the cache then holds the file itself
            (root / "blobs" / name).rename(snapshot / name)
    return snapshot


def gguf(file: Path, *, experts: int = 8, kind: int = 15, version: int = 3) -> Path:
    """The header of a GGUF file, with a tokenizer's long arrays in the middle."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    entries = [
        text("general.architecture") + struct.pack("<I", 8) + text("qwen3moe"),
        text("tokenizer.tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("ü") + text(""),
        text("tokenizer.scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<2f", 1, 2),
        text("qwen3moe.block_count") + struct.pack("<II", 4, 48),
        text("qwen3moe.expert_count") + struct.pack("<II", 4, experts),
        text("qwen3moe.expert_used_count") + struct.pack("<II", 4, 2),
        text("qwen3moe.big_endian") + struct.pack("<I?", 7, False),
        text("general.file_type") + struct.pack("<II", 4, kind),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, len(entries)) + b"".join(entries))
    return file


def by_name(entries: list[Entry]) -> dict[str, Entry]:
    assert len({e.name for e in entries}) == len(entries), [e.name for e in entries]
    return {e.name: e for e in entries}


def test_packs_the_cache_and_folders_are_found_each_once(tmp_path: Path, hub: Path) -> None:
    packs, mine = tmp_path / "packs", tmp_path / "mine"
    pack = fake_pack(packs / "Tiny-int4")
    cached(hub, "org/Sparse", MOE)
    cached(hub, "org/Dense", {"num_hidden_layers": 32})
    checkpoint(mine / "deep" / "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32})
    checkpoint(mine / "a" / "b" / "too-deep", MOE)
    checkpoint(mine / ".hidden", MOE)
    gguf(mine / "publisher" / "qwen3-Q4_K_M.gguf")
    gguf(mine / "dense.gguf", experts=0)
    fake_pack(mine / "Elsewhere", format="int8")
    found = by_name(scan(packs, [str(mine), str(mine), str(packs)], {str(pack): 5.0}))
    assert next(iter(found)) == "Tiny-int4", "what was used last comes first"
    assert {n: (e.where, e.kind) for n, e in found.items()} == {
        "Tiny-int4": ("packs", PACK),
        "org/Sparse": ("cache", "safetensors"),
        "Elsewhere": ("folder", PACK),
        "Mixtral": ("folder", "safetensors"),
        "qwen3-Q4_K_M.gguf": ("folder", "GGUF"),
    }
    assert not any(e.problem for e in found.values())
    tiny, sparse, file = found["Tiny-int4"], found["org/Sparse"], found["qwen3-Q4_K_M.gguf"]
    assert (tiny.format, tiny.layers, tiny.experts, tiny.top_k, tiny.used) == ("int4-g64", 4, 16, 2, 5.0)
    assert tiny.bytes == sum(f.stat().st_size for f in pack.iterdir())
    assert (sparse.format, sparse.layers, sparse.experts, sparse.top_k, sparse.bytes) == ("bfloat16", 16, 64, 8, 500)
    assert (file.format, file.layers, file.experts, file.top_k) == ("Q4_K_M", 48, 8, 2)
    assert [e.can_open for e in (tiny, sparse, file)] == [True, True, False]
    assert [e.can_import for e in (tiny, sparse, file)] == [False, True, True]


@pytest.mark.parametrize(
    ("config", "kind", "format"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, "GPTQ", "4 bit, g128"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}, "AWQ", "4 bit, g64"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "compressed-tensors",
            "pack-quantized",
        ),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes", "4 bit"),
        ({"quantization_config": {"quant_method": "fp8"}}, "FP8", "fp8"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4", "mxfp4"),
        ({"torch_dtype": "float16", "dtype": None}, "safetensors", "float16"),
    ],
)
def test_how_a_checkpoint_is_quantised_is_told(tmp_path: Path, config: dict[str, Any], kind: str, format: str) -> None:
    entry = look(checkpoint(tmp_path / "model", MOE | config), "folder")
    assert (entry.kind, entry.format) == (kind, format)


def test_layers_are_those_with_experts(tmp_path: Path) -> None:
    for config, layers in (
        ({"first_k_dense_replace": 1}, 15),
        ({"mlp_only_layers": [0, 1]}, 14),
        ({"decoder_sparse_step": 2}, 8),
        ({}, 16),
    ):
        entry = look(checkpoint(tmp_path / "model", MOE | config), "folder")
        assert entry.layers == layers
    nested = look(checkpoint(tmp_path / "nested", {"text_config": MOE, "vision_config": {}}), "folder")
    assert (nested.experts, nested.layers) == (64, 16)


def test_what_cannot_be_read_is_a_row_with_its_reason(tmp_path: Path, hub: Path) -> None:
    packs, mine = tmp_path / "packs", tmp_path / "mine"
    (fake_pack(packs / "flipped") / "moestro.json").write_text("{}")
    (fake_pack(packs / "short") / "experts-00000.bin").write_bytes(b"x")
    checkpoint(mine / "torn", MOE)
    (mine / "torn" / "config.json").write_text('{"num_experts": 6')
    part = checkpoint(mine / "half", MOE)
    (part / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}})
    )
    (checkpoint(mine / "bare", MOE) / "model.safetensors").unlink()
    gguf(mine / "cut.gguf").write_bytes(gguf(mine / "cut.gguf").read_bytes()[:-30])
    (mine / "no.gguf").write_bytes(b"GIF89a")
    gguf(mine / "set-00001-of-00003.gguf")
    gguf(mine / "set-00003-of-00003.gguf")
    stopped = packs / "Stopped.partial"
    stopped.mkdir()
    (stopped / "journal.jsonl").write_text(json.dumps({"pack": 1, "model_hash": "", "moestro": ""}) + "\n")
    (hub / "models--org--broken" / "snapshots").mkdir(parents=True)
    (hub / "models--org--broken" / "refs").write_text("this should be a folder")
    found = by_name(scan(packs, [str(mine), str(tmp_path / "gone")], {}))
    said = {name: entry.problem for name, entry in found.items()}
    for name, words in {
        "flipped": "damaged",
        "short": "experts-00000.bin is damaged",
        "torn": "config.json is damaged",
        "half": "1 of 2 weight files are missing, model-00002",
        "bare": "no safetensors",
        "cut.gguf": "header is cut short",
        "no.gguf": "not a GGUF file",
        "set-00001-of-00003.gguf": "1 of its 3 files",
        "Stopped": "continues where it",
        str(tmp_path / "gone"): "no such folder",
        "Hugging Face cache": "refs",
    }.items():
        assert words in said.pop(name), name
    assert said == {}
    assert found["Stopped"].kind == UNFINISHED
    assert not any(entry.can_open or entry.can_import for entry in found.values())


@pytest.mark.parametrize("version", [1, 77])
def test_gguf_of_an_unknown_version_is_refused(tmp_path: Path, version: int) -> None:
    with pytest.raises(ModelError, match=f"version {version}"):
        read_metadata(gguf(tmp_path / "x.gguf", version=version))


def test_folders_are_remembered(library: Host, tmp_path: Path) -> None:
    checkpoint(tmp_path / "mine" / "model", MOE)
    library.library.set_folders([f' "{tmp_path / "mine"}" ', "", str(tmp_path / "mine")])
    assert library.library.folders == [str(tmp_path / "mine")]
    assert {e.name for e in library.library.entries()} == {"Tiny", "model"}


def test_the_terminal_lists_and_deletes_while_a_dashboard_is_open(
    library: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(library.store.folder))
    checkpoint(tmp_path / "kept" / "Kept", MOE)
    checkpoint(tmp_path / "once" / "Once", MOE)
    library.library.set_folders([str(tmp_path / "kept")])
    assert library.loader.load(library.loader.plan(str(tmp_path / "kept" / "Kept"))).join(WAIT_S)
    assert cli.main(["models", "--json", "--folder", str(tmp_path / "once")]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == ["Kept", "Once", "Tiny"]
    assert [bool(one["used"]) for one in listed] == [True, False, False]
    assert cli.main(["models"]) == 0
    text = capsys.readouterr().out
    assert "Tiny" in text and "int4-g64" in text and "16 x 64, top-8" in text
    assert cli.main(["models", "--delete", "Tiny"]) == 2
    assert "--yes" in capsys.readouterr().out
    assert cli.main(["models", "--delete", "Kept", "--yes"]) == 2
    assert "Only packs" in capsys.readouterr().err
    assert cli.main(["models", "--delete", "Nobody", "--yes"]) == 2
    assert cli.main(["models", "--delete", "Tiny", "--yes"]) == 0
    assert not (library.library.packs / "Tiny").exists()


def test_an_empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "nothing"))
    assert cli.main(["models"]) == 0
    assert "launch.py import" in capsys.readouterr().out
    assert not (tmp_path / "nothing").exists()
