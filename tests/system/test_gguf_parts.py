"""Split GGUF models by their names: a name that claims many parts costs no more than the files that are there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from app.services.candidates import look
from core.errors import ModelError
from core.importing.sources.gguf.files import find_files
from core.system.gguf_parts import missing, part_of, parts_in
from tests.app.test_library import gguf


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every path that is looked up while a test runs."""
    asked: list[str] = []
    stat = os.stat

    def counting(path: Any, *more: Any, **how: Any) -> os.stat_result:
        asked.append(str(path))
        return stat(path, *more, **how)

    monkeypatch.setattr(os, "stat", counting)
    return asked


@pytest.mark.parametrize("name", ["x-00001-of-99999.gguf", "x-00001-of-4294967296.gguf"])
def test_parts_that_do_not_exist_cost_nothing(tmp_path: Path, stats: list[str], name: str) -> None:
    file = gguf(tmp_path / name)
    entry = look(file, "folder")
    assert entry is not None and entry.bytes == file.stat().st_size
    if "99999" in name:
        assert "99998 of its 99999 files are missing" in entry.problem
        with pytest.raises(ModelError, match=r"99998 of the 99999 parts .*x-00002-of-99999.gguf.*\.\.\. Download"):
            find_files(file)
    assert len(stats) < 100, "files that are not there were looked for"


def test_many_split_models_in_a_folder_are_listed_from_one_reading(tmp_path: Path, stats: list[str]) -> None:
    data = gguf(tmp_path / "whole.gguf").read_bytes()
    for model in range(20):
        for number in (1, 2):
            (tmp_path / f"m{model}-0000{number}-of-00002.gguf").write_bytes(data)
    found = [entry for file in sorted(tmp_path.iterdir()) if (entry := look(file, "folder")) is not None]
    assert len(found) == 21 and not any(entry.problem for entry in found)
    assert {entry.bytes for entry in found} == {len(data), 2 * len(data)}


def test_parts_are_those_of_their_own_model(tmp_path: Path) -> None:
    for name in ("a-00001-of-00003.gguf", "a-00003-of-00003.gguf", "a-00002-of-00004.gguf", "b-00002-of-00003.gguf"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "a-00002-of-00003.gguf").mkdir()
    (tmp_path / "a-00009-of-00003.gguf").write_bytes(b"")
    part = part_of("a-00001-of-00003.gguf")
    assert part == ("a", 1, 3) and parts_in(tmp_path)["a", 3] == {1, 3}
    assert missing(part, parts_in(tmp_path)["a", 3], 5) == ["a-00002-of-00003.gguf"]
    assert part_of("a.gguf") is None and part_of("a-1-of-3.gguf") is None
