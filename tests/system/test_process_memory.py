"""Memory: figures under control groups of both versions, what an engine leaves alone, and what is given back."""

import gc
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from core.capacity import free_memory
from core.system import memory_limits, process_memory
from core.system.memory_limits import HostMemory, host_memory

ARENAS = """
import ctypes, threading
import core  # bounds them
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
together = threading.Barrier(8)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


class Knot:
    """Holds on to itself."""

    def __init__(self) -> None:
        self.own = self


def test_freed_memory_is_given_back_at_most_twice_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trimmed = [1000.0], list[float]()
    monkeypatch.setattr(process_memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process_memory, "trim", lambda: trimmed.append(now[0]))
    monkeypatch.setattr(process_memory, "_trimmed_s", 0.0)
    for _ in range(100):
        process_memory.trim_now_and_then()
        now[0] += 1.0
    assert trimmed == [1000.0, 1031.0, 1062.0, 1093.0]


@pytest.mark.long(0.1)
def test_what_exists_with_an_engine_is_not_looked_at_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "gc", gc)  # the real one
    gc.unfreeze()
    lost, held = weakref.ref(Knot()), Knot()
    process_memory.freeze_gc()
    assert lost() is None and gc.get_freeze_count() > 0
    seen = weakref.ref(held)
    del held
    gc.collect()
    assert seen() is not None  # frozen
    process_memory.unfreeze_gc()
    assert seen() is None and gc.get_freeze_count() == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives threads arenas of their own")
def test_threads_share_two_arenas() -> None:
    def arenas(**environment: str) -> int:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | environment
        ran = subprocess.run([sys.executable, "-c", ARENAS], env=clean, capture_output=True, text=True, check=True)
        return ran.stdout.count("<heap nr=")

    assert arenas() <= 2
    assert arenas(MALLOC_ARENA_MAX="16") > 2  # the user's own setting is kept


GB = 10**9


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GB, 40 of them free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=40 * GB, total=64 * GB))


def proc(root: Path, own: str, mounts: str) -> None:
    folder = root / "proc/self"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(own)
    (folder / "mountinfo").write_text(mounts)


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


def v2(root: Path, path: str = "/") -> Path:
    proc(root, f"0::{path}\n", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
    top = root / "sys/fs/cgroup"
    top.mkdir(parents=True)
    return top


def v1(root: Path, path: str, mounted_from: str = "/") -> Path:
    proc(
        root,
        f"12:cpu,cpuacct:/elsewhere\n7:memory:{path}\n1:name=systemd:/x\n",
        f"33 30 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"34 30 0:30 {mounted_from} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    )
    top = root / "sys/fs/cgroup/memory"
    top.mkdir(parents=True)
    return top


def test_without_control_groups_the_machine_is_what_counts(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == HostMemory(40 * GB, 64 * GB)


def test_a_group_of_version_2_with_its_file_cache(tmp_path: Path) -> None:
    top = v2(tmp_path, "/user.slice/app")
    group(
        top / "user.slice/app",
        max=8 * GB,
        high="max",
        current=5 * GB,
        stat=f"anon {2 * GB}\ninactive_file {2 * GB}\nactive_file {GB}\nfile_dirty {GB // 2}\nslab_reclaimable 0",
    )
    assert host_memory(tmp_path) == HostMemory(int(5.5 * GB), 8 * GB)


@pytest.mark.parametrize("limit", ["max", "", "nonsense"])
def test_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    group(v2(tmp_path, "/a") / "a", max=limit, current=5 * GB)
    assert host_memory(tmp_path) == HostMemory(40 * GB, 64 * GB)


def test_a_limit_beyond_the_machine_changes_nothing(tmp_path: Path) -> None:
    group(v2(tmp_path, "/a") / "a", max=500 * GB, current=5 * GB)
    assert host_memory(tmp_path) == HostMemory(40 * GB, 64 * GB)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    top = v2(tmp_path, "/a/b/c")
    group(top / "a/b/c", max="max", current=GB)
    group(top / "a/b", max=20 * GB, current=3 * GB)  # 17 GB are left under it ...
    group(top / "a", max=24 * GB, current=23 * GB)  # ... and 1 GB under the one around it: others took them
    assert host_memory(tmp_path) == HostMemory(1 * GB, 20 * GB)


def test_a_group_is_throttled_from_high_on(tmp_path: Path) -> None:
    group(v2(tmp_path, "/a") / "a", max=8 * GB, high=6 * GB, current=GB)
    assert host_memory(tmp_path) == HostMemory(5 * GB, 6 * GB)


def test_a_full_group_has_nothing_left_rather_than_less(tmp_path: Path) -> None:
    group(v2(tmp_path, "/a") / "a", max=GB, current=GB + 4096)
    assert host_memory(tmp_path).available == 0


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    group(v2(tmp_path, "/"), max=4 * GB, current=GB)
    assert host_memory(tmp_path) == HostMemory(3 * GB, 4 * GB)


def test_a_path_outside_of_what_is_mounted_is_that_of_the_top(tmp_path: Path) -> None:
    group(v2(tmp_path, "/../../outside"), max=4 * GB, current=GB)
    assert host_memory(tmp_path) == HostMemory(3 * GB, 4 * GB)


def test_version_1_counts_the_groups_inside_it(tmp_path: Path) -> None:
    top = v1(tmp_path, "/job/step")
    group(top, limit_in_bytes=9223372036854771712, usage_in_bytes=30 * GB)  # as "none" is written
    group(
        top / "job",
        limit_in_bytes=10 * GB,
        usage_in_bytes=6 * GB,
        stat=f"inactive_file 7\ntotal_inactive_file {2 * GB}\ntotal_active_file {GB}\ntotal_dirty {GB}",
    )
    group(top / "job/step", limit_in_bytes=9223372036854771712, usage_in_bytes=6 * GB)
    assert host_memory(tmp_path) == HostMemory(6 * GB, 10 * GB)


def test_version_1_in_a_container(tmp_path: Path) -> None:
    """Its mount begins at its own group, which the path of the process names from the machine's top on."""
    top = v1(tmp_path, "/docker/abc", "/docker/abc")
    group(top, limit_in_bytes=3 * GB, usage_in_bytes=GB)
    assert host_memory(tmp_path) == HostMemory(2 * GB, 3 * GB)


def test_files_that_cannot_be_read_are_no_limits(tmp_path: Path) -> None:
    proc(tmp_path, "0::/a\n\n", "garbage\n30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    assert host_memory(tmp_path) == HostMemory(40 * GB, 64 * GB)


def test_a_budget_is_checked_against_what_the_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(v2(tmp_path, "/a") / "a", max=8 * GB, current=GB)
    monkeypatch.setattr(memory_limits.host_memory, "__defaults__", (tmp_path,))
    assert free_memory.free_bytes(torch.device("cpu")) == (7 * GB, 8 * GB)
    assert free_memory.host_free(torch.device("cpu")) == 7 * GB
