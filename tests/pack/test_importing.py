"""Import: what a pack holds is what the checkpoint holds; stopped, resumed or refused, nothing wrong is left."""

from __future__ import annotations

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
import torch

from core.errors import ModelError, SettingError
from core.hf import CheckpointReader, find_experts, install, load_skeleton
from core.importing import import_model, job, write
from core.memory.codec import FORMATS
from core.memory.pack import PackReader, PackWriter, aligned, verify
from core.memory.store import Cancelled
from tests.checkpoints import ARCHITECTURES
from tests.conftest import Checkpoint
from tests.pack.large import make_large
from tests.pack.packs import same

CPU = torch.device("cpu")
MEMORY = r"""
import re, sys
from pathlib import Path
import psutil
from core.importing import import_model
before = psutil.Process().memory_info().rss
import_model(sys.argv[1], Path(sys.argv[2]))
most = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())  # getrusage's would be the parent's
print(int(most[1]) * 1024 - before)
"""


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe as int8, imported in one go."""
    return import_model(str(checkpoint("qwen3_moe")), tmp_path_factory.mktemp("packs") / "pack", format="int8")


def check_experts(pack: Path, source: Path, dtype: torch.dtype) -> None:
    """Every expert in the pack is what encoding the checkpoint's gives."""
    with PackReader(pack) as reader, CheckpointReader(load_skeleton(pack), str(source)) as checkpoint:
        manifest, buffer = reader.manifest, aligned(reader.padded_bytes)
        codec = manifest.codec(dtype, CPU)
        for eid in range(manifest.total):
            reader.read_into(eid, buffer)
            expected = codec.encode(checkpoint.read(*divmod(eid, manifest.experts)))
            assert torch.equal(buffer[: reader.blob_bytes], expected), eid


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint(arch)
    pack = import_model(str(source), tmp_path / "pack")
    manifest = PackReader(pack).manifest
    assert (manifest.format, set(manifest.exact.values())) == ("checkpoint", {"as stored"})
    check_experts(pack, source, torch.float32)
    plain, packed = load_skeleton(source), load_skeleton(pack)  # the dense weights are all there, and the same
    theirs = dict(plain.named_parameters())
    assert all(torch.equal(p, theirs[n]) for n, p in packed.named_parameters())
    assert len(find_experts(packed)) == manifest.layers
    assert verify(pack).problems == ()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("split", [0.0, 0.25])
def test_every_format(name: str, split: float, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("granitemoe")
    if split and FORMATS[name].group >= 64 or FORMATS[name].group > 64:
        with pytest.raises((ModelError, SettingError), match=r"cannot be cut|does not divide"):
            import_model(str(source), tmp_path / "pack", format=name, split=split)
        assert list(tmp_path.iterdir()) == []
        return
    pack = import_model(str(source), tmp_path / "pack", format=name, split=split)
    manifest = PackReader(pack).manifest
    assert manifest.format == name and len(manifest.segments) == (2 if split else 0)
    how = {"checkpoint": "as stored"}.get(
        name, "cast from float32" if FORMATS[name].is_plain else "quantised from float32"
    )
    assert set(manifest.exact.values()) == {how}
    check_experts(pack, source, torch.float32)


def test_a_transposed_model_with_biases_is_cut_and_joined(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("checkpoint", "int4-g32"):
        pack = import_model(str(checkpoint("gpt_oss")), tmp_path / name, format=name, split=0.5)
        check_experts(pack, checkpoint("gpt_oss"), torch.float32)


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
        (source, "new", {"split": 1.5}, "no share between"),
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


def test_how_numbers_came_about_is_summed_up() -> None:
    exact, not_exact = {"up": "exact codes"}, {"up": "requantised from Q6_K"}
    assert write.exactness([exact, exact]) == exact
    assert write.exactness([exact, exact, not_exact]) == {
        "up": "exact codes (2 layers), requantised from Q6_K (1 layer)"
    }


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    source = make_large(tmp_path / "model", layers=4)
    size = sum(f.stat().st_size for f in source.iterdir())
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, source, tmp_path / "pack"], capture_output=True, text=True, check=True
    )
    peak, dense = int(run.stdout.split()[-1]), (tmp_path / "pack" / "model.safetensors").stat().st_size
    assert size > 400e6 and dense < 10e6
    assert peak < dense + 200e6, f"{peak / 1e6:.0f} MB"


def test_the_forward_pass_of_a_pack_is_that_of_the_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Dense weights from the pack, experts out of its blobs: the logits are transformers' own."""
    from transformers import AutoModelForCausalLM

    source = checkpoint("qwen3_moe")
    pack = import_model(str(source), tmp_path / "pack")
    model, ids = load_skeleton(pack), torch.arange(12)[None]
    with PackReader(pack) as reader, torch.no_grad():
        codec, buffer = reader.manifest.codec(torch.float32, CPU), aligned(reader.padded_bytes)

        def experts(site: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(hidden)
            for eid in chosen.unique().tolist():
                reader.read_into(site.index * site.num_experts + eid, buffer)
                slot = torch.empty(codec.slot_bytes, dtype=torch.uint8)
                codec.place(buffer[: reader.blob_bytes], slot)
                parts = codec.views(slot)
                token, k = (chosen == eid).nonzero(as_tuple=True)
                gate, up = codec.linear(parts, "gate_up_proj", hidden[token]).chunk(2, -1)
                y = codec.linear(parts, "down_proj", torch.nn.functional.silu(gate) * up)
                out.index_add_(0, token, y * weights[token, k, None])
            return out

        with install(model, find_experts(model), experts):
            ours = model(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(source)(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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
