"""Traces, profiles, texts and questions of somebody else's: whatever they are, reading ends with a clear error."""

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from core.engine.texts import from_file as texts
from core.errors import MoestroError
from core.measure.evaluate.questions import from_file as questions
from core.profile import load
from core.profile.file import write as write_profile
from core.profile.profile import KEY, VERSION
from core.profile.trace import FileTrace, open_trace
from core.profile.trace.file import FRAME, MAGIC, MARK

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX files")
READERS: dict[str, Callable[[Path], object]] = {
    "a.trace": open_trace,
    "a.npz": open_trace,
    "a.csv": open_trace,
    "a.json": open_trace,
    "a.jsonl": open_trace,
    "b.trace": FileTrace,
    "p.safetensors": load,
    "t.txt": texts,
    "t.jsonl": texts,
    "q.jsonl": questions,
}


@posix
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("how", ["pipe", "zero", "loop", "deep", "zip"])
@pytest.mark.timeout(120)
def test_odd_files_are_refused(tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / name
    if how == "pipe":
        os.mkfifo(path)
    elif how in ("zero", "loop"):
        path.symlink_to("/dev/zero" if how == "zero" else path)
    elif how == "deep":
        path.write_bytes((MAGIC if name == "b.trace" else b"") + b"[" * 100_000)
        if name == "t.txt":
            pytest.skip("this is a text")
    else:
        path.write_bytes(b"PK\x03\x04" + b"\xff" * 5000)
    with pytest.raises(MoestroError) as caught:
        READERS[name](path)
    assert path.name in str(caught.value) or "list" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "[[0, 0, [1e999]]]",
        "[[1, 2, [3]], [0, 0, [1" + "0" * 400 + "]]]",
        '{"trace": 5}',
        '{"trace": {"a": 1}}',
        "7",
        '[{"token": 0, "layer": 0, "experts": {"a": 1}}]',
        '[[0, 0, ["x"]]]',
        "[[null, null, [1]]]",
        "[[0, 0, [NaN]]]",
    ],
)
def test_lists_that_are_no_traces(tmp_path: Path, body: str) -> None:
    (tmp_path / "a.json").write_text(body)
    with pytest.raises(MoestroError):
        open_trace(tmp_path / "a.json")


def test_a_csv_with_an_endless_field(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('0,0,"' + "1 " * 200_000)
    with pytest.raises(MoestroError, match=r"a\.csv"):
        open_trace(tmp_path / "a.csv")


def bomb() -> bytes:
    """An `.npz` of kilobytes whose one array says that it has terabytes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as packed:
        array = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            array, {"descr": "<i2", "fortran_order": False, "shape": (1 << 20, 1 << 10, 8)}
        )
        packed.writestr("experts.npy", array.getvalue() + bytes(1 << 16))
    raw = bytearray(data.getvalue())
    at = raw.index(b"PK\x01\x02")
    raw[at + 24 : at + 28] = struct.pack("<I", 0xFFFF_FF00)
    return bytes(raw)


def test_arrays_that_are_too_large_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.profile.trace.sound.UNPACKED_BYTES", 1 << 20)
    (tmp_path / "a.npz").write_bytes(bomb())
    with pytest.raises(MoestroError, match="bytes, and those of a trace"):
        open_trace(tmp_path / "a.npz")
    head = {"version": 1, "layers": 2, "experts": 4, "top_k": 1, "model": "", "model_hash": ""}
    frame = bomb()
    start = MAGIC + json.dumps(head).encode() + b"\n"
    (tmp_path / "a.trace").write_bytes(start + FRAME.pack(MARK, 1, 1, len(frame)) + frame)
    with pytest.raises(MoestroError, match="bytes, and those of a trace"):
        list(FileTrace(tmp_path / "a.trace").chunks())


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers", -1), ("experts", 10**400), ("top_k", 0), ("layers", "x"), ("predictor", 7), ("version", [])],
)
def test_a_head_with_sizes_that_no_model_has(tmp_path: Path, name: str, value: object) -> None:
    head = {"version": 1, "layers": 2, "experts": 4, "top_k": 1, "model": "", "model_hash": "", name: value}
    (tmp_path / "a.trace").write_bytes(MAGIC + json.dumps(head).encode() + b"\n")
    with pytest.raises(MoestroError, match="head of a trace"):
        open_trace(tmp_path / "a.trace")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", "x"),
        ("tokens", None),
        ("model", 7),
        ("settings", []),
        ("hidden", -4),
        ("experts", 2**80),
        ("top_k", True),
    ],
)
def test_a_profile_with_a_good_checksum_and_odd_values(tmp_path: Path, name: str, value: object) -> None:
    head = {
        "model": "m",
        "model_hash": "h",
        "layers": 2,
        "experts": 4,
        "top_k": 1,
        "hidden": 8,
        "tokens": 5,
        "source": "s",
        "created": "2026-01-01T00:00:00",
        "times": None,
        "settings": {},
    }
    write_profile(tmp_path / "p.safetensors", KEY, head, {}, VERSION)
    assert load(tmp_path / "p.safetensors").layers == 2
    write_profile(tmp_path / "p.safetensors", KEY, {**head, name: value}, {}, VERSION)
    with pytest.raises(MoestroError, match="is damaged"):
        load(tmp_path / "p.safetensors")
