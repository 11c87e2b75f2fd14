"""Every way a pack can be spoilt: its files, or a manifest whose digest is right and whose content is not."""

import json
import os
import shutil
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelError
from core.memory.pack import Manifest, PackReader, aligned, check, verify
from core.memory.pack.manifest import _digest
from tests.pack.packs import EXPERTS, LAYERS, write_mixed, write_pack


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packs of the same sizes and of different weights."""
    folder = tmp_path_factory.mktemp("packs")
    write_pack(folder / "one")
    write_pack(folder / "two", seed=1)
    return folder


@pytest.fixture
def one(made: Path, tmp_path: Path) -> Path:
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
    (lambda p, _: edit(p, pack=4, moestro="9.9"), r"newer Moestro \(9.9\). Update"),
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
def test_opening_refuses(one: Path, made: Path, spoil: Callable[[Path, Path], object], words: str) -> None:
    spoil(one, made / "two")
    for opened in (check, PackReader):
        with pytest.raises(ModelError, match=words):
            opened(one)
    found = verify(one)
    assert len(found.problems) >= 1
    with pytest.raises(ModelError, match=words):
        raise ModelError(found.problems[0])


def test_a_file_nobody_may_read(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def refuse(path: Path, *args: object, **kwargs: object) -> object:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"config\.json cannot be read: Permission denied"):
        check(one)


def test_a_good_pack_is_good(one: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = verify(one, lambda *args: seen.append(args))
    assert found.problems == () and found.manifest is not None
    assert found.bytes == found.manifest.bytes == seen[-1][1] == seen[-1][2]
    done = [at for _, at, _ in seen]
    assert done == sorted(done) and len(done) > LAYERS * EXPERTS


def test_everything_that_is_wrong_is_named(one: Path) -> None:
    padded = check(one).padded_bytes
    flip(one / "experts-00000.bin", padded + 5)
    flip(one / "experts-00000.bin", padded * 4 + 5)
    flip(one / "experts-00002.bin", 0)
    flip(one / "model.safetensors", (one / "model.safetensors").stat().st_size - 1)
    os.truncate(one / "experts-00001.bin", padded)
    found = verify(one)
    assert [
        p[len(str(one)) + 1 :].partition(". Delete")[0].replace(f"{padded * EXPERTS:,}", "N") for p in found.problems
    ] == [
        "experts-00000.bin is damaged: expert 1 of MoE layer 0 is not what was written",
        "experts-00000.bin is damaged: expert 4 of MoE layer 0 is not what was written",
        f"experts-00001.bin is damaged: it has {padded:,} bytes instead of N",
        "experts-00002.bin is damaged: expert 0 of MoE layer 2 is not what was written",
        "model.safetensors is damaged: it is not what was written",
    ]
    assert all(p.endswith(", and import the model again.") for p in found.problems)


def test_experts_of_another_pack(one: Path, made: Path) -> None:
    """Of the same size: only reading tells."""
    shutil.copy(made / "two" / "experts-00001.bin", one)
    with PackReader(one) as reader, pytest.raises(ModelError, match="expert 0 of MoE layer 1"):
        reader.read_into(EXPERTS, aligned(reader.padded_bytes))
    assert len(verify(one).problems) == EXPERTS


Body = dict[str, Any]
Change = Callable[[Body], object]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs")
    write_pack(folder / "whole")
    write_pack(folder / "split", top=16)
    write_mixed(folder / "mixed")
    return folder


def seal(pack: Path, change: Change) -> str:
    """Change a manifest and give it the digest of what it says then."""
    file = pack / "moestro.json"
    body = json.loads(file.read_text())
    body.pop("digest")
    change(body)
    text = json.dumps(body | {"digest": _digest(body)})
    file.write_text(text)
    return text


def put(value: Any, *path: str | int) -> Change:
    return lambda body: reduce(getitem, path[:-1], body).__setitem__(path[-1], value)  # type: ignore[arg-type]


def drop(*path: str | int) -> Change:
    return lambda body: reduce(getitem, path[:-1], body).__delitem__(path[-1])  # type: ignore[arg-type]


KEYS = (
    "pack model_hash format numbers layers experts top_k parts is_transposed has_gate is_concatenated blob "
    "segments padded_bytes files crc32 source exact moestro created"
).split()
FIELD = ("blob", "fields", "down_proj")
CASES: list[tuple[str, Change, str]] = [
    *((f"without {key}", drop(key), "is damaged" if key == "pack" else f"its {key} is missing") for key in KEYS),
    *(
        (
            f"{key} of another kind",
            put({"x": [1]} if key not in ("numbers", "parts", "blob", "files", "source", "exact") else 3, key),
            "is damaged" if key == "pack" else f"its {key}",
        )
        for key in KEYS
    ),
    ("something more", put(1, "more"), "its more is unknown"),
    ("no layers", put(0, "layers"), "layers is 0"),
    ("negative layers", put(-3, "layers"), "layers is -3"),
    ("layers as truth", put(True, "layers"), "layers is True"),
    ("2 ** 60 experts", put(1 << 60, "experts"), "experts is 1152921504606846976"),
    ("more layers", put(LAYERS + 1, "layers"), "its crc32 are not those of 4 x 5"),
    ("fewer layers", lambda b: (put(2, "layers")(b), b["crc32"].pop()), "experts-00002.bin has .* not a layer"),
    ("fewer experts", lambda b: (put(4, "experts")(b), [s.pop() for s in b["crc32"]]), "not a layer of its experts"),
    ("more experts a token than there are", put(EXPERTS + 1, "top_k"), "top_k is 6"),
    ("no experts a token", put(0, "top_k"), "top_k is 0"),
    ("another format", put("int5", "format"), "format is 'int5'"),
    ("another number type", put("FLOAT32", "numbers", "zero"), "numbers.zero is 'FLOAT32', not a number type"),
    ("a number type of Python's", put("__name__", "numbers", "weight"), "numbers.weight is '__name__'"),
    ("a part without a shape", drop("parts", "down_proj", "shape"), "parts.down_proj.shape is missing"),
    ("a part of no size", put([0, 48], "parts", "down_proj", "shape"), "parts.down_proj.shape is 0"),
    ("a part of three dimensions", put([1, 2, 3], "parts", "down_proj", "shape"), "not a shape"),
    ("a part of negative size", put([-1, 48], "parts", "down_proj", "shape"), "shape is -1"),
    ("no down", lambda b: b["parts"].pop("down_proj"), "that ends an expert"),
    ("a field before the blob", put(-64, *FIELD, "offset"), "offset is -64"),
    ("a field past the blob", put(1 << 30, *FIELD, "offset"), "down_proj lies at byte 1,073,741,824 of"),
    ("fields in each other", put(0, *FIELD, "offset"), "down_proj lies at byte 0"),
    (
        "a field that is not aligned",
        lambda b: put(b["blob"]["fields"]["down_proj"]["offset"] - 4, *FIELD, "offset")(b),
        "down_proj lies at byte",
    ),
    ("a field as text", put("0", *FIELD, "offset"), "offset is '0'"),
    ("a blob of no size", put(0, "blob", "bytes"), "blob.bytes is 0"),
    ("a blob of negative size", put(-1, "blob", "bytes"), "blob.bytes is -1"),
    ("a smaller blob", put(64, "blob", "bytes"), "lies at byte"),
    ("other pages", put(4096, "padded_bytes"), "padded_bytes is 4,096"),
    ("negative pages", put(-4096, "padded_bytes"), "padded_bytes is -4096"),
    ("a file less", drop("files", "experts-00001.bin"), "does not name experts-00001.bin"),
    ("no dense weights", drop("files", "model.safetensors"), "does not name model.safetensors"),
    ("no config", drop("files", "config.json"), "does not name config.json"),
    *(
        (
            f"a file {name!r}",
            put({"bytes": 1, "sha256": "", "head": ""}, "files", name),
            "which cannot be one of its own",
        )
        for name in ("moestro.json", "../x", "/x", "..", ".", "", "a\0b", "a/b", "a\\b", "C:x")
    ),
    ("a file of negative size", put(-1, "files", "config.json", "bytes"), "config.json.bytes is -1"),
    ("a file of a text's size", put("9", "files", "config.json", "bytes"), "config.json.bytes is '9'"),
    ("a file with more to say", put(1, "files", "config.json", "x"), "config.json.x is unknown"),
    ("a sum as text", put("1", "crc32", 0, 0), "crc32 is '1'"),
    ("a sum of 40 bits", put(1 << 40, "crc32", 0, 0), "crc32 is 1099511627776"),
    ("sums that are no list", put(7, "crc32", 0), "crc32 has 7 for a layer"),
    ("one sum less", lambda b: b["crc32"][1].pop(), "crc32 are not those of 3 x 5"),
    ("a source that is a list", put([], "source"), "source is \\[\\], not an object"),
    ("a source without a label", drop("source", "label"), "source.label is missing"),
    ("a source of numbers", put(1, "source", "label"), "source.label is 1, not a text"),
    ("NaN", put(float("nan"), "layers"), "NaN where a number belongs"),
]
SPLIT: list[tuple[str, Change, str]] = [
    ("one segment", lambda b: b["segments"].pop(), "segments do not make up"),
    ("another cut", put([0, 32], "segments", 0, "neurons"), "segments do not make up"),
    ("a cut outside", put([0, 480], "segments", 0, "neurons"), "segments do not make up"),
    ("a cut of three", put([0, 16, 48], "segments", 0, "neurons"), "not a start and an end"),
    ("a segment elsewhere", put(64, "segments", 1, "offset"), "segments do not make up"),
    ("a segment that is a number", put(1, "segments", 0), "its segments is 1, not an object"),
    ("a segment without bytes", drop("segments", 0, "bytes"), "segments.bytes is missing"),
    ("the other way round", lambda b: b["segments"].reverse(), "segments do not make up"),
]


MIXED: list[tuple[str, Change, str]] = [
    ("a kind less", lambda b: b["kinds"].pop(), "layer_kinds do not say which of 1 kinds"),
    ("a kind that no layer has", put([0, 0, 0], "layer_kinds"), "layer_kinds do not say"),
    ("kinds in another order", put([1, 0, 1], "layer_kinds"), "layer_kinds do not say"),
    ("a kind of a layer less", lambda b: b["layer_kinds"].pop(), "layer_kinds do not say"),
    ("a kind as text", put("0", "layer_kinds", 0), "layer_kinds is '0'"),
    ("a negative kind", put(-1, "layer_kinds", 0), "layer_kinds is -1"),
    ("kinds that are texts", put("int8", "kinds", 1), "its kinds is 'int8', not an object"),
    ("a kind with more to say", put(1, "kinds", 1, "x"), "kinds.x is unknown"),
    ("an unknown format of a matrix", put("int8/int5", "kinds", 1, "format"), "format is 'int8/int5'"),
    ("formats of three matrices", put("int8/int8/int8", "kinds", 1, "format"), "format is 'int8/int8/int8'"),
    ("plain numbers beside codes", put("int8/checkpoint", "kinds", 1, "format"), "format is 'int8/checkpoint'"),
    ("other pages of a kind", put(4096, "kinds", 0, "padded_bytes"), "padded_bytes is 4,096"),
    ("a kind of the other's pages", lambda b: b["layer_kinds"].__setitem__(2, 1), "is not a layer of its experts"),
    ("one format for all as well", put("int8", "format"), "format is unknown"),
]


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [(kind, *c[1:]) for kind, cases in (("whole", CASES), ("split", SPLIT), ("mixed", MIXED)) for c in cases],
    ids=[c[0] for c in CASES + SPLIT + MIXED],
)
def test_what_contradicts_itself_is_refused(
    sealed: Path, tmp_path: Path, kind: str, change: Change, words: str
) -> None:
    pack = Path(shutil.copytree(sealed / kind, tmp_path / "pack"))
    text = seal(pack, change)
    with pytest.raises(ModelError, match=rf"(?s)moestro\.json (?=is damaged).*{words}.*Import the model again"):
        check(pack)
    assert not verify(pack).manifest
    assert (pack / "moestro.json").read_text() == text


def test_a_manifest_that_is_nested_without_end(sealed: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(sealed / "whole", tmp_path / "pack"))
    (pack / "moestro.json").write_text('{"source": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelError, match=r"moestro\.json is damaged: its JSON is nested deeper"):
        check(pack)


@pytest.mark.parametrize("kind", ["whole", "split", "mixed"])
def test_a_sound_manifest_is_what_was_written(sealed: Path, kind: str) -> None:
    manifest = Manifest.load(sealed / kind)
    assert manifest.dump() == (sealed / kind / "moestro.json").read_text()
    assert bool(manifest.kinds[0].segments) == (kind == "split")
