"""GGUF files on disk: split, damaged, incomplete, ambiguous; and how little of them is in memory at a time."""

import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from core.errors import ModelError
from core.importing.sources import open_source
from core.importing.sources.gguf import files as gguf_files
from core.importing.sources.gguf import open_gguf
from core.importing.sources.gguf.facts import shortest
from core.system.gguf import number_types
from tests.gguf_writer.write import experts_in, make_gguf

NAME = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_gguf("qwen3_moe", tmp_path, experts_in("Q8_0"))[1]


def changed(file: Path, at: int, data: bytes) -> Path:
    raw = bytearray(file.read_bytes())
    raw[at : at + len(data)] = data
    file.write_bytes(raw)
    return file


def test_a_split_model_is_one_model_whichever_part_is_named(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _, one = make_gguf("qwen3_moe", whole, experts_in("Q8_0"))
    make_gguf("qwen3_moe", parts, experts_in("Q8_0"), parts=3)
    paths = [parts / "model-00001-of-00003.gguf", parts / "model-00003-of-00003.gguf", parts]
    with open_gguf(one) as single:
        for path in paths:
            with open_source(path) as source:
                assert source.config == single.config
                assert list(source.tensors.tensors) and set(source.tensors.tensors) == set(single.tensors.tensors)
                for name in (NAME, "lm_head.weight", "model.layers.1.self_attn.k_proj.weight"):
                    assert torch.equal(source.tensors.read(name), single.tensors.read(name))
    paths[1].unlink()
    with pytest.raises(ModelError, match=r"1 of the 3 parts .*model-00003-of-00003.gguf. Download them"):
        open_gguf(paths[0])


def test_parts_that_lost_their_names_and_parts_of_another_model(tmp_path: Path) -> None:
    make_gguf("qwen3_moe", tmp_path, parts=2)
    first, second = sorted(tmp_path.glob("*.gguf"))
    lone = first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="one of 2 parts"):
        open_gguf(lone)
    lone.rename(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match="not parts of the same model"):
        open_gguf(first)


def test_a_directory_with_a_choice_asks_for_it(file: Path) -> None:
    (file.parent / "mmproj-model-f16.gguf").write_bytes(b"")
    with open_source(file.parent) as source:
        assert source.kind == "gguf"
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"holds 2 GGUF models \(model.gguf, other.gguf\). Give the file"):
        open_source(file.parent)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match=r"holds no .gguf file"):
        open_gguf(tmp_path)


@pytest.mark.parametrize(
    ("at", "data", "text"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "version 1; Moestro reads versions 2 and 3"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "damaged.*Download it again"),
        (16, struct.pack("<Q", 1 << 60), "damaged.*Download it again"),
        (24, struct.pack("<Q", 1 << 50), "damaged: its header is cut short. Download it again"),
    ],
)
def test_damaged_headers(file: Path, at: int, data: bytes, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        open_gguf(changed(file, at, data))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.999])
def test_files_cut_short(file: Path, share: float) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ModelError, match=r"is damaged: .*Download it again"):
        open_gguf(file)


@pytest.mark.parametrize(("type", "text"), [(250, "in number type 250"), (26, "of the type I32")])
def test_a_number_type_that_the_package_does_not_know(file: Path, type: int, text: str) -> None:
    name = b"blk.0.attn_q.weight"  # F32, as wide as I32
    at = file.read_bytes().index(name) + len(name) + 4 + 2 * 8
    with pytest.raises(ModelError, match=text + r".*Update it \(pip install -U gguf\)"):
        open_gguf(changed(file, at, struct.pack("<I", type)))


def test_a_file_that_shrinks_while_it_is_read(file: Path) -> None:
    with open_gguf(file) as source:
        with file.open("r+b") as handle:
            handle.truncate(source.header.tensors["blk.2.ffn_up_exps.weight"].offset + 1)
        with pytest.raises(ModelError, match="became shorter while it was read"):
            source.tensors.read(NAME)


def test_the_package_is_asked_for_by_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number_types.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match="needs the package `gguf`"):
        open_gguf(file)


def test_one_expert_at_a_time_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    read = gguf_files.OpenFiles.read

    def counted(self: gguf_files.OpenFiles, number: int, offset: int, count: int) -> torch.Tensor:
        counts.append(count)
        return read(self, number, offset, count)

    monkeypatch.setattr(gguf_files.OpenFiles, "read", counted)
    with open_gguf(file) as source:
        assert counts == []  # opening reads headers only
        source.tensors.coded(NAME)
        source.tensors.read(NAME)
        assert counts == [64 * 64 // 32 * 34] * 2
        monkeypatch.setattr("core.importing.sources.gguf.tensors.CHUNK", 1 << 12)
        counts.clear()
        whole = source.tensors.read("model.embed_tokens.weight")
        assert len(counts) == 16 and max(counts) == 1 << 12
        monkeypatch.undo()
        assert torch.equal(source.tensors.read("model.embed_tokens.weight"), whole)


def test_many_threads_read_at_once_and_closing_twice_is_fine(file: Path) -> None:
    with open_gguf(file) as source, ThreadPoolExecutor(4) as pool:
        names = [
            f"model.layers.{layer}.mlp.experts.{e}.{p}_proj.weight"
            for layer in range(3)
            for e in range(8)
            for p in ("gate", "up", "down")
        ]
        for name, got in zip(names, pool.map(source.tensors.read, names), strict=True):
            assert torch.equal(got, source.tensors.read(name))
        source.close()
        source.close()
    file.unlink()


def test_identity(file: Path, tmp_path: Path) -> None:
    with open_gguf(file) as source:
        first = source.hash()
        assert first == source.hash() and len(first) == 64
    changed(file, file.stat().st_size - 8, b"\x01\x02")
    with open_gguf(file) as source:
        assert source.hash() != first


@pytest.mark.parametrize("value", [1e-6, 1e-5, 0.22, 0.0078125, 1e6, 150000.0, 12.0, 0.1, 2.5])
def test_numbers_are_as_they_were_before_32_bits(value: float) -> None:
    assert shortest(struct.unpack("<f", struct.pack("<f", value))[0]) == value
