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
