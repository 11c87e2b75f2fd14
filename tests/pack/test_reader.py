"""What was written is read back: directly, buffered and without preadv, in any order, from many threads."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.errors import ModelError
from core.memory.pack import PackReader, aligned, pack_at, pagefile, verify
from core.memory.pack.manifest import layer_file
from core.memory.pages import page_up
from tests.logged import Logged
from tests.pack.packs import DENSE, EXPERTS, LAYERS, LAYOUT, MIXED, mixed_blobs, random_blobs, write_mixed, write_pack


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("packs") / "pack")


def read_all(reader: PackReader, size: int | None = None) -> torch.Tensor:
    buffer = aligned(size or reader.padded_bytes)
    blobs = []
    for eid in range(LAYERS * EXPERTS):
        reader.read_into(eid, buffer)
        blobs.append(buffer[: reader.blob_bytes].clone())
    return torch.stack(blobs).view(LAYERS, EXPERTS, -1)


@pytest.mark.parametrize("kind", ["direct", "buffered", "seek"])
@pytest.mark.parametrize("top", [0, 16])
def test_blobs_come_back(pack: Path, tmp_path: Path, kind: str, top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if top:
        pack = write_pack(tmp_path / "cut", top=top)
    if kind == "seek":  # as on Windows
        monkeypatch.delattr(os, "preadv")
        monkeypatch.delattr(os, "posix_fadvise")
    with PackReader(pack, direct=kind == "direct") as reader:
        assert torch.equal(read_all(reader), random_blobs())
        assert reader.bytes_read == LAYERS * EXPERTS * reader.padded_bytes
        assert reader.blob_bytes == LAYOUT.bytes <= reader.padded_bytes
        assert kind == "direct" or (not reader.direct and reader.why_buffered)


def test_each_layer_has_blobs_of_its_own_size(tmp_path: Path) -> None:
    with PackReader(write_mixed(tmp_path / "pack")) as reader:
        assert [reader.padded_of(layer * EXPERTS) for layer in range(LAYERS)] == [
            page_up(one.bytes) for one in (LAYOUT, MIXED, LAYOUT)
        ]
        assert (reader.blob_bytes, reader.manifest.format) == (LAYOUT.bytes, "checkpoint+int8+nvfp4")
        buffer, read = aligned(reader.padded_bytes), 0
        for eid, blob in enumerate(blob for blobs in mixed_blobs() for blob in blobs):
            read += reader.read_into(eid, buffer)
            assert torch.equal(buffer[: len(blob)], blob)
        assert read == reader.bytes_read == EXPERTS * (2 * page_up(LAYOUT.bytes) + page_up(MIXED.bytes))
    assert verify(tmp_path / "pack").problems == ()


@pytest.mark.parametrize("direct", [True, False])
def test_any_buffer_will_do(pack: Path, direct: bool) -> None:
    with PackReader(pack, direct) as reader:
        small, odd = torch.zeros(reader.blob_bytes, dtype=torch.uint8), aligned(reader.padded_bytes + 4097)[1:]
        for buffer in (small, odd):
            reader.read_into(7, buffer)
            assert torch.equal(buffer[: reader.blob_bytes], random_blobs().flatten(0, 1)[7])


def test_threads_share_nothing(pack: Path) -> None:
    expected = random_blobs().flatten(0, 1)
    with PackReader(pack) as reader, ThreadPoolExecutor(4) as pool:

        def one(seed: int) -> bool:
            buffer = aligned(reader.padded_bytes)
            for eid in torch.randperm(len(expected), generator=torch.Generator().manual_seed(seed)).tolist():
                reader.read_into(eid, buffer)
                if not torch.equal(buffer[: reader.blob_bytes], expected[eid]):
                    return False
            return True

        assert all(pool.map(one, range(8)))
        assert reader.bytes_read == 8 * len(expected) * reader.padded_bytes


def test_short_and_interrupted_reads_are_taken_up(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert offset % 4096 == 0
        return min(real(fd, [buffers[0][:8192]], offset), 5000)  # a page and a bit at a time

    with PackReader(pack) as reader:
        monkeypatch.setattr(os, "preadv", some)
        assert torch.equal(read_all(reader), random_blobs())


def test_a_file_system_without_direct_reads_is_said(
    pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: Logged
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with PackReader(pack) as reader:
        assert not reader.direct and "Invalid argument" in reader.why_buffered
        assert reader.why_buffered in caplog.text
        assert torch.equal(read_all(reader), random_blobs())


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
def test_a_failing_disk_is_said(pack: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(error, os.strerror(error))

    with PackReader(pack) as reader:
        monkeypatch.setattr(pagefile.PageFile, "_some", fail)
        with pytest.raises(ModelError, match=rf"00000.bin cannot be read: {os.strerror(error)}.*permissions"):
            reader.read_into(0, aligned(reader.padded_bytes))
        assert reader.bytes_read == 0


def test_a_flipped_byte_is_found_at_the_first_read(pack: Path, tmp_path: Path) -> None:
    spoilt = Path(shutil.copytree(pack, tmp_path / "pack"))
    with PackReader(spoilt) as reader:
        at, file = reader.padded_bytes * 3 + 100, spoilt / layer_file(1)
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    with PackReader(spoilt) as reader:
        buffer = aligned(reader.padded_bytes)
        reader.read_into(EXPERTS + 2, buffer)
        for _ in range(2):  # it stays bad
            with pytest.raises(ModelError, match=r"00001.bin is damaged: expert 3 of MoE layer 1.*import the model"):
                reader.read_into(EXPERTS + 3, buffer)


@pytest.mark.parametrize("direct", [True, False])
def test_a_pack_that_is_written_to_while_it_is_open_is_said(pack: Path, tmp_path: Path, direct: bool) -> None:
    """Also of a blob that was read, and found good, before."""
    mine = Path(shutil.copytree(pack, tmp_path / "pack"))
    with PackReader(mine, direct) as reader:
        read_all(reader)
        file, size = mine / layer_file(1), reader.padded_bytes
        before = file.stat()
        with file.open("r+b") as handle:
            handle.seek(size * 3 + 100)
            handle.write(b"\x5a\xa5")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # however coarse the file system's clock is
        buffer = aligned(size)
        for _ in range(2):
            with pytest.raises(ModelError, match=r"00001.bin was changed while its model was loaded.*load it again"):
                reader.read_into(EXPERTS + 3, buffer)
        reader.read_into(EXPERTS + 2, buffer)  # what is still right is read on, and other layers are
        reader.read_into(0, buffer)


def test_a_pack_that_is_replaced_while_it_is_open(pack: Path, tmp_path: Path) -> None:
    """It is read on from the files that it has, where the system lets them be replaced."""
    mine = Path(shutil.copytree(pack, tmp_path / "pack"))
    with PackReader(mine) as reader:
        try:
            mine.rename(tmp_path / "old")
        except OSError:
            pytest.skip("this system does not let open files be replaced")
        write_pack(mine, seed=1)
        assert torch.equal(read_all(reader), random_blobs())


def test_a_file_that_shrinks_while_it_is_open_is_said(pack: Path, tmp_path: Path) -> None:
    spoilt = Path(shutil.copytree(pack, tmp_path / "pack"))
    for direct in (True, False):
        with PackReader(spoilt, direct) as reader:
            os.truncate(spoilt / layer_file(0), reader.padded_bytes + 5000)
            with pytest.raises(ModelError, match="shorter"):
                reader.read_into(1, aligned(reader.padded_bytes))
            os.truncate(spoilt / layer_file(0), EXPERTS * reader.padded_bytes)


def test_there_is_no_expert_beyond_the_last(pack: Path) -> None:
    with PackReader(pack) as reader:
        for eid in (-1, LAYERS * EXPERTS):
            with pytest.raises(IndexError):
                reader.read_into(eid, aligned(reader.padded_bytes))
    reader.close()


def test_dense_weights_are_safetensors(pack: Path) -> None:
    assert pack_at(pack) and not pack_at(pack.parent)
    found = load_file(pack / "model.safetensors")
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in DENSE.items()) and len(found) == 2


def test_buffers_are_aligned() -> None:
    for size in (1, 4096, 10_000):
        buffer = aligned(size)
        assert buffer.data_ptr() % 4096 == 0 and buffer.numel() == size and not buffer.any()
