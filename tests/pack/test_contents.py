"""A pack's own files are the importer's; whatever else lies in its folder is never read as a part of it, nor lost."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelError
from core.memory.pack import Manifest, check
from core.memory.pack.lock import Lock
from core.memory.pack.manifest import _digest
from core.memory.pack.writer import PackWriter
from tests.pack.packs import IDENTITY, write_pack

posix = pytest.mark.skipif(os.name == "nt", reason="needs symbolic links")


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def restate(pack: Path, files: dict[str, Any]) -> None:
    """Write a manifest that names other files, with a digest that is right."""
    body = json.loads((pack / "moestro.json").read_text())
    del body["digest"]
    body["files"] |= files
    (pack / "moestro.json").write_text(json.dumps(body | {"digest": _digest(body)}))


def test_an_import_that_starts_over_loses_nobodys_file(tmp_path: Path) -> None:
    write_pack(tmp_path / "pack", seed=1, stop_after=2)
    left = tmp_path / "pack.partial"
    (left / "thesis.txt").write_text("mine")
    (left / "photos").mkdir()
    (left / "photos" / "one.png").write_text("mine")
    before = names(left)
    for seed in (0, 1):  # another import, and the same one
        with pytest.raises(ModelError, match=r"photos/, thesis\.txt.*Move"):
            write_pack(tmp_path / "pack", seed=seed)
    assert names(left) == before and (left / "photos" / "one.png").exists()


def test_an_import_that_began_nothing_leaves_what_came_meanwhile(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "pack", IDENTITY) as pack:
        (pack.directory / "config.json").write_text("{}")
        (pack.directory / "thesis.txt").write_text("mine")
    assert names(tmp_path / "pack.partial") == {"thesis.txt"}


def test_what_came_during_the_import_is_no_part_of_the_pack(tmp_path: Path) -> None:
    write_pack(tmp_path / "pack", stop_after=1)
    with PackWriter(tmp_path / "pack", _identity(tmp_path / "pack.partial")) as pack:
        (pack.directory / "thesis.txt").write_text("mine")
        (pack.directory / "photos").mkdir()
        (pack.directory / "tokenizer.json").write_text("{}")
        assert set(pack.entries()) == {"model.safetensors", "experts-00000.bin", "tokenizer.json"}


def test_a_journal_of_another_program_is_not_overwritten(tmp_path: Path) -> None:
    diary = tmp_path / "diary.partial"
    diary.mkdir()
    (diary / "journal.jsonl").write_text('{"date": "today"}\n')
    (diary / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"in the way.*Move"):
        write_pack(tmp_path / "diary")
    assert (diary / "journal.jsonl").read_text() == '{"date": "today"}\n' and names(diary) >= {"config.json"}


@posix
@pytest.mark.parametrize("name", ["journal.jsonl.new", "experts-00002.bin", "config.json", "moestro.json.new"])
def test_an_import_writes_through_no_link(tmp_path: Path, name: str) -> None:
    write_pack(tmp_path / "pack", stop_after=2)
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "pack.partial" / name).unlink(missing_ok=True)
    (tmp_path / "pack.partial" / name).symlink_to(tmp_path / "thesis.txt")
    check(write_pack(tmp_path / "pack"))
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_lock_never_takes_the_place_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "poetry.lock").write_text("# made by a package manager\n")
    with pytest.raises(ModelError, match=r"poetry\.lock is in the way"):
        write_pack(tmp_path / "poetry")
    with pytest.raises(ModelError, match=r"poetry\.lock is in the way"):
        Lock(tmp_path / "poetry.lock", "")
    assert (tmp_path / "poetry.lock").read_text() == "# made by a package manager\n"


@pytest.mark.parametrize("name", ["../x", "/x", "..", ".", "", "a\0b", "a/b", "a\\b", "C:x"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    restate(write_pack(tmp_path / "pack"), {name: {"bytes": 1, "sha256": "", "head": ""}})
    with pytest.raises(ModelError, match="cannot be one of its own"):
        Manifest.load(tmp_path / "pack")


@pytest.mark.parametrize("how", ["manifest", "file", "lost"])
def test_no_message_says_to_delete_the_whole_folder(tmp_path: Path, how: str) -> None:
    pack = write_pack(tmp_path / "pack")
    if how == "manifest":
        (pack / "moestro.json").write_text("{}")
    elif how == "file":
        (pack / "experts-00000.bin").write_bytes(b"short")
    else:
        (pack / "experts-00000.bin").unlink()
    with pytest.raises(ModelError, match="mport the model again") as refused:
        check(pack)
    assert f"elete {pack}" not in str(refused.value)


def _identity(partial: Path) -> Any:
    return json.loads((partial / "journal.jsonl").read_text().splitlines()[0])
