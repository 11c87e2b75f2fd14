"""Deletion in the library: it takes a pack's own files, and nothing else."""

import json
import os
from pathlib import Path

import pytest

from app import cli
from app.services.candidates import DAMAGED, PACK, UNFINISHED, Entry, look
from app.services.deletion import delete, describe, inspect, stays
from app.services.host import Host
from app.services.library import scan
from app.ui.tabs.library_views import question
from core.errors import MoestroError
from core.memory.pack import check
from core.memory.pack.manifest import _digest
from tests.app.conftest import WAIT_S
from tests.app.test_library import MOE, cached, checkpoint
from tests.fake_models import fake_pack
from tests.pack.packs import write_pack

pytestmark = pytest.mark.usefixtures("hub")

posix = pytest.mark.skipif(os.name == "nt", reason="needs symbolic links")


def entry_of(path: Path) -> Entry:
    entry = look(path, "packs")
    assert entry is not None
    return entry


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_pack_is_deleted_with_all_its_bytes_and_leaves_the_list(library: Host) -> None:
    [tiny] = library.library.entries()
    (Path(tiny.path) / "buddies.safetensors").write_bytes(b"x")
    assert inspect(tiny).bytes == tiny.bytes + 1
    assert library.delete_model(tiny.path).startswith("Deleted Tiny: ")
    assert not Path(tiny.path).exists()
    assert library.library.entries() == []
    assert list(library.library.packs.iterdir()) == []
    with pytest.raises(MoestroError, match="not there any more"):
        library.delete_model(tiny.path)


def test_what_is_loaded_is_not_deleted(library: Host) -> None:
    [tiny] = library.library.entries()
    assert library.loader.load(library.loader.plan(tiny.path)).join(WAIT_S)
    assert library.models.format == "int4-g64", "a pack's format is its own"
    with pytest.raises(MoestroError, match="in use"):
        library.delete_model(tiny.path)
    assert Path(tiny.path, "moestro.json").exists()
    [tiny] = library.library.refresh()
    assert tiny.used > 0
    library.models.unload()
    library.delete_model(tiny.path)


def test_what_is_not_the_packs_stays_and_is_listed(library: Host) -> None:
    [tiny] = library.library.entries()
    folder = Path(tiny.path)
    (folder / "photos").mkdir()
    (folder / "thesis.txt").write_text("mine")
    (folder / "tokenizer notes.txt").write_text("mine, though its name is like one that is copied")
    what = inspect(tiny)
    assert what.own[:2] == ("config.json", "experts-00000.bin") and "moestro.json" in what.own
    asked = question(tiny, what)
    assert "photos/, thesis.txt, tokenizer notes.txt" in asked and "moestro.json" in asked
    assert "experts-00000.bin to experts-00003.bin (4 files)" in describe(what) and "thesis.txt" in stays(what)
    said = library.delete_model(tiny.path)
    assert f"Left in the folder: photos/, thesis.txt, tokenizer notes.txt ({folder})" in said
    assert names(folder) == {"photos", "thesis.txt", "tokenizer notes.txt"}
    assert library.library.entries() == []


@pytest.mark.parametrize("how", ["{}", "", "damaged", "newer", "digest"])
def test_a_pack_whose_manifest_is_damaged_is_not_deleted(library: Host, how: str) -> None:
    [tiny] = library.library.entries()
    folder = Path(tiny.path)
    (folder / "thesis.txt").write_text("mine")
    stated = (folder / "moestro.json").read_text()
    spoilt = {"damaged": stated[:-20], "newer": '{"pack": 99}', "digest": stated.replace("fake", "thesis.txt")}
    (folder / "moestro.json").write_text(spoilt.get(how, how))
    before = names(folder)
    for seen in (tiny, entry_of(folder)):  # as listed before the damage, and after
        with pytest.raises(MoestroError) as refused:
            delete(seen)
        assert f"elete {folder}" not in str(refused.value)
    damaged = entry_of(folder)
    assert damaged.kind == DAMAGED and not damaged.can_delete and not damaged.can_open and not damaged.can_import
    assert "pdate Moestro" in damaged.problem or f"look through {folder}" in damaged.problem
    with pytest.raises(MoestroError):
        inspect(damaged)
    assert names(folder) == before


def test_a_pack_with_a_damaged_file_can_be_deleted(library: Host) -> None:
    [tiny] = library.library.entries()
    folder = Path(tiny.path)
    (folder / "experts-00001.bin").write_bytes(b"x")
    (folder / "thesis.txt").write_text("mine")
    damaged = entry_of(folder)
    assert damaged.kind == PACK and "Delete this pack" in damaged.problem
    delete(damaged)
    assert names(folder) == {"thesis.txt"}


def test_a_manifest_cannot_claim_the_users_files(library: Host, tmp_path: Path) -> None:
    [tiny] = library.library.entries()
    folder = Path(tiny.path)
    (folder / "thesis.txt").write_text("mine")
    body = json.loads((folder / "moestro.json").read_text())
    del body["digest"]
    body["files"]["thesis.txt"] = claim = {"bytes": 4, "sha256": "", "head": ""}
    (folder / "moestro.json").write_text(json.dumps(body | {"digest": _digest(body)}))
    delete(entry_of(folder))
    assert names(folder) == {"thesis.txt"}
    (tmp_path / "outside").write_text("mine")
    for at, name in enumerate(("../outside", str(tmp_path / "outside"), "..\\outside", "a\0b", "..")):
        pack = fake_pack(library.library.packs / f"claims{at}")
        body["files"] = json.loads((pack / "moestro.json").read_text())["files"] | {name: claim}
        (pack / "moestro.json").write_text(json.dumps(body | {"digest": _digest(body)}))
        before = names(pack)
        with pytest.raises(MoestroError, match="cannot be one of its own"):
            delete(entry_of(pack))
        assert names(pack) == before
    assert (tmp_path / "outside").read_text() == "mine"


@posix
def test_links_are_deleted_and_not_what_they_lead_to(library: Host, tmp_path: Path) -> None:
    [tiny] = library.library.entries()
    folder, disk = Path(tiny.path), tmp_path / "disk"
    disk.mkdir()
    (folder / "experts-00000.bin").rename(disk / "layer")
    (folder / "experts-00000.bin").symlink_to(disk / "layer")
    (folder / "experts-00001.bin").unlink()
    (folder / "experts-00001.bin").mkdir()
    (folder / "experts-00001.bin" / "thesis.txt").write_text("mine")
    (folder / "linked").symlink_to(disk)
    link = folder.with_name("link")
    link.symlink_to(fake_pack(disk / "pack"))
    with pytest.raises(MoestroError, match="is a link"):
        delete(entry_of(link))
    delete(entry_of(folder))
    assert names(disk) == {"layer", "pack"} and len(names(disk / "pack")) == 7
    assert names(folder) == {"linked", "experts-00001.bin"} and (folder / "experts-00001.bin" / "thesis.txt").exists()


def test_an_unfinished_import_loses_its_own_files_alone(library: Host) -> None:
    """And a finished pack without its name all."""
    pack = write_pack(library.library.packs / "Named")
    pack.rename(pack.with_name("Named.partial"))
    named = next(e for e in library.library.refresh() if e.name == "Named")
    assert named.kind == UNFINISHED
    library.delete_model(named.path)
    assert names(library.library.packs) == {"Tiny"}
    out = write_pack(library.library.packs / "Stopped", stop_after=1)
    left = out.with_name("Stopped.partial")
    (left / "tokenizer.json").write_text("{}")
    (left / "journal.jsonl.new").write_text("{")
    (left / "thesis.txt").write_text("mine")
    stopped = next(e for e in library.library.refresh() if e.name == "Stopped")
    assert stopped.kind == UNFINISHED
    assert "Left in the folder: thesis.txt" in library.delete_model(stopped.path)
    assert names(left) == {"thesis.txt"}


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_torn_deletion_can_be_repeated(library: Host, monkeypatch: pytest.MonkeyPatch, unfinished: bool) -> None:
    pack = write_pack(library.library.packs / "Torn", stop_after=2 if unfinished else 3)
    pack = pack.with_name("Torn.partial") if unfinished else pack
    (pack / "thesis.txt").write_text("mine")
    files = len(names(pack))
    unlink = Path.unlink

    def torn(path: Path, missing_ok: bool = False) -> None:
        if path.parent == pack and path.name.startswith("experts"):
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", torn)
        with pytest.raises(MoestroError, match="not deleted completely"):
            delete(entry_of(pack))
    assert 1 < len(names(pack)) < files
    with pytest.raises(MoestroError):
        check(pack)
    left = entry_of(pack)
    assert left.can_delete and not left.can_open
    delete(left)
    assert names(pack) == {"thesis.txt"}


def test_checkpoints_are_not_deleted_nor_what_is_in_the_cache(tmp_path: Path, hub: Path) -> None:
    folder, snapshot = checkpoint(tmp_path / "mine" / "model", MOE), cached(hub, "org/Sparse", MOE)
    for entry in scan(tmp_path / "packs", [str(tmp_path / "mine")], {}):
        with pytest.raises(MoestroError, match="Only packs"):
            delete(entry)
    assert (folder / "config.json").exists() and (snapshot / "config.json").exists()


def test_the_terminal_tells(library: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(library.store.folder))
    (library.library.packs / "Tiny" / "thesis.txt").write_text("mine")
    assert cli.main(["models", "--delete", "Tiny"]) == 2
    said = capsys.readouterr().out
    assert "7 files" in said and "moestro.json" in said and "stays" in said and "thesis.txt" in said
    assert cli.main(["models", "--delete", "Tiny", "--yes"]) == 0
    assert "Left in the folder: thesis.txt" in capsys.readouterr().out
    assert names(library.library.packs / "Tiny") == {"thesis.txt"}
