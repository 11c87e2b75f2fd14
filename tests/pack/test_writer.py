"""A pack is whole or not there, a stopped one ends as the same bytes; what else lies in its folder is no part of it."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import ModelError
from core.memory.pack import PackReader, check, sync, writer
from core.memory.pack.lock import Lock
from core.memory.pack.writer import PackWriter
from tests.pack.packs import IDENTITY, contents, write_pack


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return dict(contents(write_pack(tmp_path_factory.mktemp("packs") / "pack")))


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_stopped_import_goes_on(tmp_path: Path, reference: dict[str, bytes], stop_after: int) -> None:
    out = write_pack(tmp_path / "pack", stop_after=stop_after)
    assert not out.exists() and not (tmp_path / "pack.lock").exists()
    with pytest.raises(ModelError, match=r"not finished\. Run the same import again"):
        check(out)
    written = {f: f.stat().st_mtime_ns for f in (tmp_path / "pack.partial").glob("experts-*")}
    assert len(written) == stop_after
    (tmp_path / "pack.partial" / "experts-00002.bin").write_bytes(b"half")
    assert dict(contents(write_pack(out))) == reference
    assert {f.name: f.stat().st_mtime_ns for f in out.glob("experts-*")}.items() >= {
        f.name: at for f, at in written.items()
    }.items()  # finished files were kept
    assert [p.name for p in tmp_path.iterdir()] == ["pack"]


def test_another_import_starts_over(tmp_path: Path, reference: dict[str, bytes]) -> None:
    write_pack(tmp_path / "pack", seed=1, stop_after=2)
    assert dict(contents(write_pack(tmp_path / "pack"))) == reference


@pytest.mark.parametrize(
    "tail",
    [
        b'{"file": "experts-000',
        b"\xff\xfe\n",
        b"[]\n",
        b"{}\n",
        b'{"file": "experts-00002.bin", "entry": [9, "", ""], "sums": [], "notes": {}}\n',
    ],
)
def test_a_torn_journal_is_read_as_far_as_it_goes(tmp_path: Path, reference: dict[str, bytes], tail: bytes) -> None:
    write_pack(tmp_path / "pack", stop_after=1)
    with (tmp_path / "pack.partial" / writer.JOURNAL).open("ab") as journal:
        journal.write(tail)
    write_pack(tmp_path / "pack", stop_after=2)
    assert dict(contents(write_pack(tmp_path / "pack"))) == reference


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"file": 3, "entry": [9, "", ""], "sums": [], "notes": {}}',
        b'{"file": "../outside", "entry": [4, "", ""], "sums": [], "notes": {}}',
        b'{"file": "experts-00000.bin", "entry": 7, "sums": [], "notes": {}}',
        b'{"file": "experts-00000.bin", "entry": [9, "", ""], "sums": [-1], "notes": {}}',
        b'{"file": "experts-00000.bin", "entry": [9, "", ""], "sums": [], "notes": {"a": 1}}',
    ],
)
def test_a_damaged_journal_starts_the_import_over(tmp_path: Path, reference: dict[str, bytes], line: bytes) -> None:
    write_pack(tmp_path / "pack", stop_after=1)
    (tmp_path / "outside").write_bytes(b"mine")
    with (tmp_path / "pack.partial" / writer.JOURNAL).open("ab") as journal:
        journal.write(line + b"\n")
    with PackWriter(
        tmp_path / "pack", json.loads((tmp_path / "pack.partial" / writer.JOURNAL).read_bytes().split(b"\n")[0])
    ) as pack:
        assert pack.finished == {}
    assert dict(contents(write_pack(tmp_path / "pack"))) == reference
    assert (tmp_path / "outside").read_bytes() == b"mine"


def test_a_finished_file_that_changed_size_is_written_again(tmp_path: Path, reference: dict[str, bytes]) -> None:
    write_pack(tmp_path / "pack", stop_after=2)
    os.truncate(tmp_path / "pack.partial" / "experts-00001.bin", 7)
    assert dict(contents(write_pack(tmp_path / "pack"))) == reference


def test_stopped_just_before_the_end(
    tmp_path: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(OSError, match="no"):
            write_pack(tmp_path / "pack")
    left = tmp_path / "pack.partial"
    assert (left / "moestro.json").exists() and not (left / writer.JOURNAL).exists()
    assert dict(contents(write_pack(tmp_path / "pack"))) == reference


def test_what_was_complete_for_another_model_is_no_use(tmp_path: Path, reference: dict[str, bytes]) -> None:
    write_pack(tmp_path / "pack", seed=1).rename(tmp_path / "pack.partial")
    assert dict(contents(write_pack(tmp_path / "pack"))) == reference


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        write_pack(tmp_path / "pack")
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "letter.txt").write_text("dear")
    with pytest.raises(ModelError, match="not what an import left"):
        write_pack(tmp_path / "mine")
    assert (tmp_path / "mine.partial" / "letter.txt").read_text() == "dear"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.partial", "pack"]


def test_two_at_once(tmp_path: Path, reference: dict[str, bytes]) -> None:
    with (
        PackWriter(tmp_path / "pack", IDENTITY),
        pytest.raises(ModelError, match=rf"process {os.getpid()}\) is writing"),
    ):
        PackWriter(tmp_path / "pack", IDENTITY)
    (tmp_path / "pack.lock").write_text("999999\n")  # left behind by a process that was killed
    assert dict(contents(write_pack(tmp_path / "pack"))) == reference
    assert not (tmp_path / "pack.lock").exists()


@pytest.mark.skipif(os.name != "posix", reason="limits on file sizes are POSIX")
def test_a_full_disk_leaves_what_can_be_taken_up(tmp_path: Path, reference: dict[str, bytes]) -> None:
    import resource

    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as full:
            write_pack(tmp_path / "pack")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert full.value.errno == errno.EFBIG
    left = sorted(p.name for p in (tmp_path / "pack.partial").iterdir())
    assert left == ["config.json", "journal.jsonl", "model.safetensors"] and not (tmp_path / "pack").exists()
    assert dict(contents(write_pack(tmp_path / "pack"))) == reference


def test_what_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "new" / "folders" / "pack", IDENTITY) as pack:
        (pack.directory / "config.json").write_text("{}")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_is_not_as_stated_is_refused(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "pack", IDENTITY) as pack, pytest.raises(ModelError, match=r"'a' has the shape \(3,\)"):
        pack.write_dense({"a": (torch.float32, (2,))}, lambda name: torch.zeros(3), int)


def test_the_manifest_says_it_all(tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "pack", top=16)
    stated = json.loads((pack / "moestro.json").read_text())
    assert [s["neurons"] for s in stated["segments"]] == [[0, 16], [16, 48]]
    assert stated["segments"][1]["fields"]["gate_up_proj"] == {"dtype": "float32", "shape": [64, 64], "offset": 0}
    assert set(stated["files"]) == {p.name for p in pack.iterdir()} - {"moestro.json"}
    with PackReader(pack) as reader:
        assert reader.manifest.dump() == (pack / "moestro.json").read_text()
        assert reader.manifest.bytes == sum(p.stat().st_size for p in pack.iterdir() if p.name != "moestro.json")


def test_names_are_synced_where_the_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    sync.sync_dir(tmp_path / "not there")  # nothing to do, so nothing to fail


posix = pytest.mark.skipif(os.name == "nt", reason="needs symbolic links")


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


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
