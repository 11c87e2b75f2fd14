"""Measuring processes: taking turns, cold files, and a memory limit that is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import cold
from bench.limits import Files, MemoryGroup, files
from bench.processes import ended_well, measure
from core.errors import MoestroError

ECHO = "tests.bench.echo"
MB = 1 << 20


def test_a_process_answers_and_says_what_it_took() -> None:
    found = measure(ECHO, {"kind": "holds", "bytes": 64 * MB}, [])
    assert (found["kind"], found["held"]) == ("holds", 64 * MB)
    assert found["peak_high"] - found["idle_bytes"] >= 63 * MB
    assert ended_well(found, "It") is found


def test_a_process_that_fails_says_why() -> None:
    found = measure(ECHO, {"kind": "fails"}, [])
    assert found["failed"] == "ValueError: no such luck"
    with pytest.raises(MoestroError, match="It did not work: ValueError: no such luck"):
        ended_well(found, "It")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_dropped_files_are_not_cached(tmp_path: Path) -> None:
    inner = tmp_path / "model" / "inner"
    inner.mkdir(parents=True)
    for file in (inner / "a", tmp_path / "model" / "b", tmp_path / "c"):
        file.write_bytes(os.urandom(MB))
    (tmp_path / "model" / "empty").touch()
    paths = [tmp_path / "model", tmp_path / "c"]
    if cold.drop(paths):
        pytest.skip("this file system lives in memory")
    with (tmp_path / "c").open("rb", buffering=0) as handle:
        assert cold.cached(handle.fileno()) == 0
        handle.read()
        assert cold.cached(handle.fileno()) == MB
        assert cold.drop(paths) == cold.cached(handle.fileno()) == 0


def test_without_advice_nothing_is_dropped_or_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert cold.drop([tmp_path]) is None


def test_groups_of_version_1_are_made_inside_the_own_one(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("5:cpu,memory:/a/b\n0::/\n", encoding="utf-8")
    found = files(tmp_path, tmp_path / "own")
    assert (found.parent, found.limit) == (tmp_path / "memory" / "a" / "b", "memory.limit_in_bytes")


def test_groups_of_version_2_are_made_beside_the_own_one(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/user/session\n", encoding="utf-8")
    (tmp_path / "user").mkdir()
    with pytest.raises(MoestroError, match="does not pass the memory controller on"):
        files(tmp_path, tmp_path / "own")
    (tmp_path / "user" / "cgroup.subtree_control").write_text("cpu memory\n", encoding="utf-8")
    found = files(tmp_path, tmp_path / "own")
    assert (found.parent, found.limit) == (tmp_path / "user", "memory.max")
    with pytest.raises(MoestroError, match="no control groups"):
        files(tmp_path, tmp_path / "none")


def test_a_group_without_limits_is_refused_and_removed(tmp_path: Path) -> None:
    where = Files(tmp_path, "limit", "swap", "used", "peak")
    with pytest.raises(MoestroError, match="cannot be made here"), MemoryGroup("x", where):
        pass
    assert not list(tmp_path.iterdir())


def test_a_limit_holds_and_is_lifted_with_its_group() -> None:
    try:
        with MemoryGroup("test") as group:
            path = group.path
    except MoestroError as error:
        pytest.skip(str(error))
    assert not path.exists()
    enough = measure(ECHO, {"kind": "holds", "bytes": 16 * MB}, [], limit=64 * MB)
    assert enough["held"] == 16 * MB
    assert 16 * MB <= enough["charged_bytes"] <= enough["limit_bytes"]
    much = measure(ECHO, {"kind": "holds", "bytes": 128 * MB}, [], limit=64 * MB)
    assert "more memory than the limit" in much["failed"]
    assert not list(path.parent.glob(f"moestro-{os.getpid()}-*"))
