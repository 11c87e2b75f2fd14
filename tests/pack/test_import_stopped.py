"""Imports that are cancelled, killed, refused, or fail midway: they go on where they stopped, nothing wrong is left."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelError, SettingError
from core.hf.checkpoint import CheckpointReader
from core.importing import import_model, job
from core.memory.pack import PackWriter, verify
from core.memory.store import Cancelled
from tests.conftest import Checkpoint
from tests.pack.packs import same


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe as int8, imported in one go."""
    return import_model(str(checkpoint("qwen3_moe")), tmp_path_factory.mktemp("packs") / "pack", format="int8")


def stop_after(share: float) -> tuple[threading.Event, Any]:
    cancel = threading.Event()

    def progress(text: str, at: float, done: int, total: int) -> None:
        assert 0 <= at <= 1 and 0 <= done <= total
        if at >= share:
            cancel.set()

    return cancel, progress


@pytest.mark.parametrize("share", [0.3, 0.6, 0.85, 1.0])
def test_a_cancelled_import_goes_on(
    share: float, reference: Path, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = str(checkpoint("qwen3_moe")), tmp_path / "pack"
    cancel, progress = stop_after(share)
    with pytest.raises(Cancelled):
        import_model(source, out, format="int8", progress=progress, cancel=cancel)
    kept = {f.name for f in (tmp_path / "pack.partial").glob("experts-*")}
    assert not out.exists() and len(kept) == {0.3: 0, 0.6: 1, 0.85: 2, 1.0: 3}[share]
    encoded: list[int] = []
    real = job.ImportPlan.encode

    def encode(self: job.ImportPlan, layer: int, expert: int) -> Any:
        encoded.append(layer)
        return real(self, layer, expert)

    monkeypatch.setattr(job.ImportPlan, "encode", encode)
    import_model(source, out, format="int8")
    assert same(out, reference)
    assert set(encoded).isdisjoint(int(name[8:13]) for name in kept)  # what was finished was not done again


def test_what_was_cancelled_at_once_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        import_model(str(checkpoint("qwen3_moe")), tmp_path / "new" / "pack", cancel=cancel)
    assert list(tmp_path.iterdir()) == []


def test_another_format_starts_over(checkpoint: Checkpoint, reference: Path, tmp_path: Path) -> None:
    cancel, progress = stop_after(0.7)
    with pytest.raises(Cancelled):
        import_model(str(checkpoint("qwen3_moe")), tmp_path / "pack", progress=progress, cancel=cancel)
    assert same(import_model(str(checkpoint("qwen3_moe")), tmp_path / "pack", format="int8"), reference)


def test_refused_before_anything_is_written(checkpoint: Checkpoint, reference: Path, tmp_path: Path) -> None:
    source = str(checkpoint("qwen3_moe"))
    (tmp_path / "there").mkdir()
    for asked, out, options, words in (
        (source, "there", {}, "exists already"),
        (source, "new", {"format": "int5"}, "no expert format 'int5'"),
        (str(tmp_path / "none"), "new", {}, "no model at"),
        (str(reference), "new", {}, "an expert pack already"),
        (source, "new", {"blocks": 7}, "cannot be cut into 7 equal blocks"),
        (source, "new", {"format": "int4-g128"}, "divide"),
        ("nobody/nothing", "new", {}, "only when you add --download"),
    ):
        with pytest.raises((ModelError, SettingError), match=words):
            import_model(asked, tmp_path / out, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def _cut_short(source: Path) -> None:
    file = sorted(source.glob("*.safetensors"))[-1]
    os.truncate(file, file.stat().st_size - 50)


def _only_pickles(source: Path) -> None:
    for file in source.glob("*.safetensors*"):
        file.unlink()
    (source / "pytorch_model.bin").write_bytes(b"x")


def _remote_code(source: Path) -> None:
    (source / "config.json").write_text(json.dumps({"model_type": "new", "auto_map": {"AutoConfig": "x.Y"}}))
    (source / "x.py").write_text("raise SystemExit('ran')")


def _is_in_the_way(source: Path) -> None:
    (source / "config.json").unlink()
    (source / "config.json").mkdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_cut_short, "is damaged"),
        (_only_pickles, "never read here"),
        (_remote_code, "never runs such code"),
        (_is_in_the_way, "not a file but a folder|cannot be read"),
    ],
)
def test_what_cannot_be_read_leaves_nothing(
    spoil: Callable[[Path], None], words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model"))
    spoil(source)
    with pytest.raises(ModelError, match=words):
        import_model(str(source), tmp_path / "pack")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_source_that_fails_while_it_is_read(
    checkpoint: Checkpoint, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reads = CheckpointReader.read_coded, []

    def fail(self: CheckpointReader, layer: int, expert: int) -> Any:
        reads.append(expert)
        if (layer, expert) == (1, 3):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, layer, expert)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointReader, "read_coded", fail)
        with pytest.raises(ModelError, match=r"qwen3_moe cannot be read: Input/output error"):
            import_model(str(checkpoint("qwen3_moe")), tmp_path / "pack", format="int8")
    assert {p.name for p in (tmp_path / "pack.partial").glob("experts*")} == {"experts-00000.bin"}
    assert same(import_model(str(checkpoint("qwen3_moe")), tmp_path / "pack", format="int8"), reference)


def test_room_is_looked_for_first(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(ModelError, match=r"needs .* MB more disk space, but only 1 MB are free .* MB are missing"):
        import_model(str(checkpoint("qwen3_moe")), tmp_path / "pack")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_a_disk_that_fills_up(
    checkpoint: Checkpoint, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PackWriter.write_layer

    def full(self: PackWriter, layer: int, *args: Any) -> None:
        if layer == 1:
            (self.directory / "experts-00001.bin").symlink_to("/dev/full")
        real(self, layer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PackWriter, "write_layer", full)
        with pytest.raises(ModelError, match=r"no room left .*No space left.*run the same import again"):
            import_model(str(checkpoint("qwen3_moe")), tmp_path / "pack", format="int8")
    assert not (tmp_path / "pack").exists() and not (tmp_path / "pack.partial" / "experts-00001.bin").is_symlink()
    assert same(import_model(str(checkpoint("qwen3_moe")), tmp_path / "pack", format="int8"), reference)


def test_a_place_that_cannot_be_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="cannot be written"):
        import_model(str(checkpoint("qwen3_moe")), tmp_path / "file" / "pack")


def test_two_imports_at_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    tried: list[float] = []

    def second(text: str, share: float, done: int, total: int) -> None:
        if tried and share - tried[-1] < 0.2:
            return
        tried.append(share)
        with pytest.raises(ModelError, match=r"Another import .* is writing"):
            import_model(str(checkpoint("qwen3_moe")), tmp_path / "pack")

    import_model(str(checkpoint("qwen3_moe")), tmp_path / "pack", progress=second)
    assert len(tried) >= 4
    assert [p.name for p in tmp_path.iterdir()] == ["pack"] and verify(tmp_path / "pack").problems == ()


@pytest.mark.parametrize(
    "changes", [{"model_type": "no_such_model"}, {"hidden_act": "?"}, {"num_hidden_layers": "two"}]
)
def test_an_error_names_the_users_path_and_no_other(
    checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "mine"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError) as caught:
        import_model(str(model), tmp_path / "pack")
    assert "moestro-" not in str(caught.value)


def test_a_short_lived_folder_is_named_as_what_it_was_made_from(tmp_path: Path) -> None:
    """Of a directory its files are the user's own; what was written from a GGUF file stands for that."""
    folder, file = "/short/moestro-x1", tmp_path / "model.gguf"
    file.touch()
    said = f"{folder}/config.json names no model_type. See {folder}."
    assert job.for_people(said, folder, tmp_path) == f"{tmp_path}/config.json names no model_type. See {tmp_path}."
    assert job.for_people(said, folder, file) == f"{file} names no model_type. See {file}."
    assert job.for_people(said, "", file) == said


ROOT = Path(__file__).parents[2]


@pytest.mark.long(0.3)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children that are killed are forked")
def test_killed_at_ten_random_points(checkpoint: Checkpoint, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.pack.killed", checkpoint("olmoe"), tmp_path, "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ran = [json.loads(line) for line in run.stdout.splitlines()]
    killed = [one for one in ran if one["code"] == -9]
    assert len({one["out"] for one in killed}) == 10
    for one in killed:  # what got its name before the end came is whole; all else is not there
        assert not one["exists"] or verify(Path(one["out"])).problems == ()
    for out in {one["out"] for one in ran}:
        assert same(Path(out), tmp_path / "reference"), out
        assert not Path(f"{out}.partial").exists()
    assert len(ran) > 15  # many were killed twice, then finished
