"""Manifests whose digest is right and whose content is not: refused at opening, by name, with the pack as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelError
from core.memory.pack import Manifest, check, verify
from core.memory.pack.manifest import _digest
from tests.pack.packs import EXPERTS, LAYERS, write_pack

Body = dict[str, Any]
Change = Callable[[Body], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs")
    write_pack(folder / "whole")
    write_pack(folder / "split", top=16)
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
    def change(body: Any) -> None:
        for name in path[:-1]:
            body = body[name]
        body[path[-1]] = value

    return change


def drop(*path: str | int) -> Change:
    def change(body: Any) -> None:
        for name in path[:-1]:
            body = body[name]
        del body[path[-1]]

    return change


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
    ("a file above", put({"bytes": 1, "sha256": "", "head": ""}, "files", "../secret"), "names the file '../secret'"),
    ("a name with NUL", put({"bytes": 1, "sha256": "", "head": ""}, "files", "a\0b"), "names the file 'a.*b'"),
    ("itself", put({"bytes": 1, "sha256": "", "head": ""}, "files", "moestro.json"), "names the file 'moestro.json'"),
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


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [("whole", *c[1:]) for c in CASES] + [("split", *c[1:]) for c in SPLIT],
    ids=[c[0] for c in CASES + SPLIT],
)
def test_what_contradicts_itself_is_refused(made: Path, tmp_path: Path, kind: str, change: Change, words: str) -> None:
    pack = Path(shutil.copytree(made / kind, tmp_path / "pack"))
    text = seal(pack, change)
    with pytest.raises(ModelError, match=rf"(?s)moestro\.json (?=is damaged).*{words}.*Import the model again"):
        check(pack)
    assert not verify(pack).manifest
    assert (pack / "moestro.json").read_text() == text


def test_a_manifest_that_is_nested_without_end(made: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(made / "whole", tmp_path / "pack"))
    (pack / "moestro.json").write_text('{"source": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelError, match=r"moestro\.json is damaged: its JSON is nested deeper"):
        check(pack)


@pytest.mark.parametrize("kind", ["whole", "split"])
def test_a_sound_manifest_is_what_was_written(made: Path, kind: str) -> None:
    manifest = Manifest.load(made / kind)
    assert manifest.dump() == (made / kind / "moestro.json").read_text()
    assert bool(manifest.segments) == (kind == "split")
