"""Packs that are damaged, or of another model than their config says: found before anything is computed with them."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from core.capacity.fit import estimate
from core.errors import ModelError
from core.importing import import_model
from core.memory.pack.manifest import NAME, layer_file
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.engine.test_packs import CHAT, load, make_model
from tests.pack.test_verify import Change, seal
from tests.selection import layered


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_model(str(make_model(tmp_path_factory.mktemp("model"))), tmp_path_factory.mktemp("packs") / "whole")


def damage(pack: Path, copy: Path, name: str, at: int) -> Path:
    shutil.copytree(pack, copy)
    raw = bytearray((copy / name).read_bytes())
    raw[at] ^= 1
    (copy / name).write_bytes(raw)
    return copy


@pytest.mark.parametrize(
    "name",
    layered(
        ["config.json", NAME, "model.safetensors", layer_file(1), "tokenizer.json"],
        quick=lambda name: name in (NAME, layer_file(1)),  # the others: tests/pack/test_verify.py
    ),
)
def test_a_flipped_bit_is_found_before_it_is_computed_with(whole: Path, tmp_path: Path, name: str) -> None:
    size = (whole / name).stat().st_size
    copy = damage(whole, tmp_path / "copy", name, size - 3 if name != layer_file(1) else 5000)
    before = set(threading.enumerate())
    with pytest.raises(ModelError, match="damaged"):
        load(copy, "all")
    for thread in set(threading.enumerate()) - before:  # one of transformers' may be ending just now
        while thread.ident is None:  # it is listed before it runs
            time.sleep(0.001)
        thread.join(20)
        assert not thread.is_alive(), "somebody is left waiting for work"


def test_a_damaged_expert_breaks_one_answer_off_and_nothing_else(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    engine = load(copy, "25%")
    resident = engine.expert_cache
    for layer in range(engine.shape.layers):  # damage whatever has not been read yet
        file = copy / layer_file(layer)
        raw = bytearray(file.read_bytes())
        size = len(raw) // engine.shape.experts
        for expert in range(engine.shape.experts):
            if not resident.is_resident(layer * engine.shape.experts + expert):
                raw[expert * size + 7] ^= 4
        file.write_bytes(raw)
    with pytest.raises(ModelError, match="damaged"):
        list(engine.generate(CHAT, Sampling(max_new_tokens=4)))
    assert not engine.busy
    resident.check_integrity()
    engine.unload()


def test_a_pack_and_a_config_that_disagree(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    with pytest.raises(ModelError, match="damaged"):
        estimate(LoadSpec.checked(str(copy)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.update(is_transposed=True), "order of a matrix"),
        (lambda b: b.update(has_gate=False), "gate"),
        (lambda b: b.update(top_k=2), "experts a token uses"),
        (lambda b: b.update(is_concatenated=False), "order of gate and up"),
        (lambda b: b["parts"]["down_proj"].update(shape=[64, 32]), "parts of an expert"),
    ],
)
def test_a_manifest_of_another_model_is_refused(whole: Path, tmp_path: Path, change: Change, words: str) -> None:
    pack = Path(shutil.copytree(whole, tmp_path / "pack"))
    seal(pack, change)
    with pytest.raises(ModelError, match=f"differ in the ({words}).*Import the model again"):
        estimate(LoadSpec.checked(str(pack), Settings({}), context=256))


def test_a_link_to_itself_in_a_pack_is_named(whole: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(whole, tmp_path / "pack"))
    (pack / layer_file(1)).unlink()
    try:
        (pack / layer_file(1)).symlink_to(layer_file(1))
    except OSError:
        pytest.skip("this system lets nobody make links")
    with pytest.raises(ModelError, match=r"experts-00001\.bin cannot be read"):
        estimate(LoadSpec.checked(str(pack), Settings({}), context=256))
