"""Whatever lies in a folder, the library lists the rest, ends soon, and says in one line what is wrong."""

import json
import os
import sqlite3
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from app import cli
from app.services.candidates import look
from app.services.library import MOST_INSIDE, peek, scan
from core.errors import ModelError
from core.memory.pack.manifest import _digest
from core.system.gguf import MOST_TEXTS, read_metadata
from tests.app.test_library import MOE, checkpoint, gguf
from tests.fake_models import fake_pack
from tests.selection import layered

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX files")
KINDS = ("config.json", "model.safetensors.index.json", "model.gguf", "moestro.json")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "home"))


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)


ODD: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path),
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "huge": sparse,
    "folder": lambda path: path.mkdir(),
    "nowhere": lambda path: path.symlink_to("nowhere"),
    "deep": lambda path: path.write_text("[" * 200_000),
    "deep object": lambda path: path.write_text('{"text_config":' * 200_000),
    "empty": lambda path: path.write_bytes(b""),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "null": lambda path: path.write_text("null"),
    "odd values": lambda path: path.write_text(
        json.dumps(
            {
                "num_experts": 10**400,
                "weight_map": {"a": [1], "b": {"c": 1}, "d": "e\0f", "g": "h" * 9000},
                "digest": 1,
                "quantization_config": {"bits": [[]], "quant_method": "x" * 10**6},
                "pack": [],
                "text_config": {"num_experts": 8},
            }
        )
    ),
}


@posix
@pytest.mark.parametrize("name", layered(KINDS, quick=lambda name: name == next(iter(KINDS))))
@pytest.mark.parametrize("how", ODD)
@pytest.mark.timeout(120)
def test_one_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, how: str) -> None:
    mine = tmp_path / "mine"
    checkpoint(mine / "good", MOE)
    bad = checkpoint(mine / "bad", MOE) if name != "model.gguf" else mine
    (bad / name).unlink(missing_ok=True)
    ODD[how](bad / name)
    tracemalloc.start()
    try:
        assert cli.main(["models", "--folder", str(mine)]) == 0
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("good ") for line in shown)
    if name == "model.gguf" and how == "folder":
        return  # a folder of that name is a folder
    entry = next(e for e in scan(tmp_path / "packs", [str(mine)], {}) if e.name != "good")
    assert entry.problem or how == "odd values"
    assert len(shown) == 3 + bool(entry.problem)
    assert len(max(shown, key=len)) < 700


def test_a_gguf_header_that_never_ends_is_given_up(tmp_path: Path) -> None:
    """Zero-length texts in their millions, texts of gigabytes, sizes that no integer holds."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1000)
    key = struct.pack("<Q", 1) + b"k"
    for at, body in enumerate(
        [
            key + struct.pack("<IIQ", 9, 8, MOST_TEXTS + 1),
            key + struct.pack("<IQ", 8, 2**63),
            key + struct.pack("<IIQ", 9, 10, 2**63),
            key + struct.pack("<IIQ", 9, 9, 2**40),
            key + struct.pack("<I", 99),
            (key + struct.pack("<IIQ", 9, 8, MOST_TEXTS // 2)) + struct.pack("<Q", 2**63),
        ]
    ):
        (tmp_path / f"{at}.gguf").write_bytes(head + body + b"\0" * 4096)
        with pytest.raises(ModelError, match="damaged"):
            read_metadata(tmp_path / f"{at}.gguf")
    long = gguf(tmp_path / "long.gguf")
    data = long.read_bytes()
    assert read_metadata(long)["general.architecture"] == "qwen3moe"
    template = struct.pack("<Q", 3) + b"tpl" + struct.pack("<IQ", 8, 5000) + b"x" * 5000
    entries = struct.unpack_from("<Q", data, 16)[0]
    long.write_bytes(data[:16] + struct.pack("<Q", entries + 1) + template + data[24:])
    found = read_metadata(long)
    assert found["general.architecture"] == "qwen3moe"
    assert "tpl" not in found


@pytest.mark.parametrize("lost", ["numbers", "layers", "parts", "blob", "files", "crc32", "experts"])
def test_a_manifest_with_a_good_digest_that_lacks_keys(tmp_path: Path, lost: str) -> None:
    pack = fake_pack(tmp_path / "packs" / "one")
    body = json.loads((pack / "moestro.json").read_text())
    del body["digest"], body[lost]
    (pack / "moestro.json").write_text(json.dumps({**body, "digest": _digest(body)}))
    fake_pack(tmp_path / "packs" / "two")
    one = next(e for e in scan(tmp_path / "packs", [], {}) if e.name == "one")
    assert one.problem
    assert "\n" not in one.problem


@posix
def test_folders_that_may_not_be_read_and_circles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    checkpoint(mine / "good", MOE)
    (mine / "circle").symlink_to(mine)
    (mine / "self").symlink_to(mine / "self")
    (mine / "shut").mkdir()
    listing = Path.iterdir

    def refuse(folder: Path) -> object:
        if folder.name == "shut":  # the superuser, who runs some tests, may read all
            raise PermissionError(13, "Permission denied", str(folder))
        return listing(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    folders = [
        str(mine),
        str(mine / "self"),
        "~nobody-of-this-name/x",
        "a\0b",
        "x" * 5000,
        str(mine / "good" / "config.json"),
    ]
    found = scan(tmp_path / "packs", folders, {"a\0b": 1.0, "~nobody-of-this-name": 2.0, "x" * 5000: 3.0})
    assert [e.name for e in found if not e.problem] == ["good"]
    assert "Permission denied" in next(e.problem for e in found if e.name == "shut")
    assert len(found) == 2 + len(folders) - 1


@posix
def test_names_that_are_no_text_are_told_and_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    checkpoint(mine / "good", MOE)
    checkpoint(mine / os.fsdecode(b"b\xffd"), MOE)
    checkpoint(mine / "two\nlines", MOE)
    gguf(mine / os.fsdecode(b"\xfe.gguf"))
    assert cli.main(["models", "--folder", str(mine)]) == 0
    assert cli.main(["models", "--json", "--folder", str(mine)]) == 0
    shown = capsys.readouterr().out
    shown.encode()
    assert shown.count("not UTF-8 text. Rename it.") == 4
    assert "\ntwo lines" in shown


def test_a_folder_with_very_many_files_is_listed_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.services.library.MOST_INSIDE", 50)
    assert MOST_INSIDE >= 10_000
    many = tmp_path / "mine" / "many"
    many.mkdir(parents=True)
    for number in range(60):
        (many / f"{number}.gguf").write_bytes(b"no")
    checkpoint(tmp_path / "mine" / "good", MOE)
    found = scan(tmp_path / "packs", [str(tmp_path / "mine")], {})
    assert any(e.name == "good" and not e.problem for e in found)
    assert "more than 50 files" in next(e.problem for e in found if e.name == "many")
    assert len(found) == 52


@posix
@pytest.mark.timeout(120)
def test_a_pipe_in_the_hugging_face_cache(tmp_path: Path) -> None:
    from tests.app.test_library import cached

    cached(tmp_path / "hub", "org/moe", MOE)
    (tmp_path / "hub" / "models--org--moe" / "refs" / "main").unlink()
    os.mkfifo(tmp_path / "hub" / "models--org--moe" / "refs" / "main")
    (entry,) = scan(tmp_path / "packs", [], {})
    assert "a pipe" in entry.problem


@pytest.mark.parametrize("folders", ["[1, null]", "{", "7", '"x"', "[" * 9999])
def test_a_garbled_store_does_not_stop_the_list(tmp_path: Path, folders: str) -> None:
    from app.store import Store

    Store(tmp_path / "home").close()
    with closing(sqlite3.connect(tmp_path / "home" / "moestro.sqlite3")) as db:
        db.execute("INSERT INTO memory VALUES ('folders', ?)", (folders,))
        db.execute(
            "INSERT INTO loads (model, created, spec, settings, shape, manifest) VALUES ('x', 1e300, '', '', '', '')"
        )
        db.commit()
    assert cli.main(["models"]) == 0
    (tmp_path / "home" / "moestro.sqlite3").write_bytes(b"no database" * 999)
    assert peek(tmp_path / "home") == ([], {})
    assert look(tmp_path / "nothing", "folder") is None
