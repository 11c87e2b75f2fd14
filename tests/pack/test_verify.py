"""Every way a pack can be spoilt: what is found at opening, what a full verification adds, and in which words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import ModelError
from core.memory.pack import PackReader, aligned, check, verify
from tests.pack.packs import EXPERTS, LAYERS, write_pack


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packs of the same sizes and of different weights."""
    folder = tmp_path_factory.mktemp("packs")
    write_pack(folder / "one")
    write_pack(folder / "two", seed=1)
    return folder


@pytest.fixture
def pack(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "one", tmp_path / "pack"))


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def edit(folder: Path, **changes: object) -> None:
    file = folder / "moestro.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _loop(file: Path) -> None:
    """Something that the system refuses to open."""
    file.unlink()
    try:
        file.symlink_to(file.name)
    except OSError:
        pytest.skip("this system lets nobody make links")


SPOILT: list[tuple[Callable[[Path, Path], object], str]] = [
    (lambda p, _: shutil.rmtree(p), "no pack at"),
    (lambda p, _: (p / "moestro.json").unlink(), "no pack at .*no moestro.json"),
    (lambda p, _: flip(p / "moestro.json", 300), "moestro.json is damaged"),
    (lambda p, _: (p / "moestro.json").write_bytes(b"\xff\xfe"), "moestro.json is damaged"),
    (lambda p, _: (p / "moestro.json").write_text("[]"), "moestro.json is damaged"),
    (lambda p, _: edit(p, experts=6), "moestro.json is damaged"),
    (lambda p, _: edit(p, pack=2, moestro="9.9"), r"newer Moestro \(9.9\). Update"),
    (lambda p, _: os.truncate(p / "moestro.json", 900), "moestro.json is damaged"),
    (lambda p, _: (p / "experts-00001.bin").unlink(), "experts-00001.bin is missing"),
    (lambda p, _: os.truncate(p / "experts-00001.bin", 4096), "experts-00001.bin is damaged: it has 4,096 bytes"),
    (lambda p, _: (p / "config.json").unlink(), "config.json is missing"),
    (lambda p, _: flip(p / "config.json", 5), "config.json is damaged"),
    (lambda p, _: flip(p / "model.safetensors", 20), "model.safetensors is damaged: its header"),
    (lambda p, _: os.truncate(p / "model.safetensors", 100), "model.safetensors is damaged: it has 100 bytes"),
    (lambda p, other: shutil.copy(other / "moestro.json", p), "is damaged"),
    (lambda p, other: shutil.copy(other / "model.safetensors", p), "model.safetensors is damaged: its header"),
    (lambda p, _: _loop(p / "moestro.json"), "moestro.json cannot be read: .*permissions"),
    (lambda p, _: _loop(p / "config.json"), "config.json cannot be read: .*permissions"),
    (lambda p, _: _loop(p / "experts-00002.bin"), "experts-00002.bin cannot be read: .*permissions"),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILT, ids=[f"{n}-{w[:30]}" for n, (_, w) in enumerate(SPOILT)])
def test_opening_refuses(pack: Path, made: Path, spoil: Callable[[Path, Path], object], words: str) -> None:
    spoil(pack, made / "two")
    for opened in (check, PackReader):
        with pytest.raises(ModelError, match=words):
            opened(pack)
    found = verify(pack)
    assert len(found.problems) >= 1
    with pytest.raises(ModelError, match=words):
        raise ModelError(found.problems[0])


def test_a_file_nobody_may_read(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def refuse(path: Path, *args: object, **kwargs: object) -> object:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"config\.json cannot be read: Permission denied"):
        check(pack)


def test_a_good_pack_is_good(pack: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = verify(pack, lambda *args: seen.append(args))
    assert found.problems == () and found.manifest is not None
    assert found.bytes == found.manifest.bytes == seen[-1][1] == seen[-1][2]
    done = [at for _, at, _ in seen]
    assert done == sorted(done) and len(done) > LAYERS * EXPERTS


def test_everything_that_is_wrong_is_named(pack: Path) -> None:
    padded = check(pack).padded_bytes
    flip(pack / "experts-00000.bin", padded + 5)
    flip(pack / "experts-00000.bin", padded * 4 + 5)
    flip(pack / "experts-00002.bin", 0)
    flip(pack / "model.safetensors", (pack / "model.safetensors").stat().st_size - 1)
    os.truncate(pack / "experts-00001.bin", padded)
    found = verify(pack)
    assert [
        p[len(str(pack)) + 1 :].partition(". Delete")[0].replace(f"{padded * EXPERTS:,}", "N") for p in found.problems
    ] == [
        "experts-00000.bin is damaged: expert 1 of MoE layer 0 is not what was written",
        "experts-00000.bin is damaged: expert 4 of MoE layer 0 is not what was written",
        f"experts-00001.bin is damaged: it has {padded:,} bytes instead of N",
        "experts-00002.bin is damaged: expert 0 of MoE layer 2 is not what was written",
        "model.safetensors is damaged: it is not what was written",
    ]
    assert all(p.endswith(", and import the model again.") for p in found.problems)


def test_experts_of_another_pack(pack: Path, made: Path) -> None:
    """Of the same size: only reading tells."""
    shutil.copy(made / "two" / "experts-00001.bin", pack)
    with PackReader(pack) as reader, pytest.raises(ModelError, match="expert 0 of MoE layer 1"):
        reader.read_into(EXPERTS, aligned(reader.padded_bytes))
    assert len(verify(pack).problems) == EXPERTS
