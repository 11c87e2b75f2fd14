"""Host memory for a GPU: as much of it pinned as the system allows, at its exact size, and all of it given back."""

import itertools
import logging
from pathlib import Path

import pytest
import torch

from core.memory import host_memory
from core.memory.host_memory import STAGING, HostMemory
from core.settings.sampling import Sampling
from tests.cuda.conftest import engine_on
from tests.fake_cuda import FakeCuda
from tests.fake_cuda.memory import PAGE, up
from tests.logged import Logged
from tests.selection import layered

ROW = 5000


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PINNED_SLAB_BYTES", 4 * ROW)


class Copying:
    """A codec that copies bytes."""

    block_bytes = ROW

    @staticmethod
    def place(blob: torch.Tensor, slot: torch.Tensor) -> None:
        slot.copy_(blob, non_blocking=True)


def filled(count: int) -> HostMemory:
    memory = HostMemory(count, ROW, pin=True)
    for at, row in enumerate(memory.rows):
        row.fill_(at)
    return memory


def arrives(memory: HostMemory, at: int) -> bool:
    slot = torch.empty(ROW, dtype=torch.uint8, device="cuda")
    memory.place(at, memory.rows[at], Copying, [slot])  # type: ignore[arg-type]
    return bool((slot == at).all())


def test_pinned_memory_has_the_size_that_was_asked_for(fake_cuda: FakeCuda) -> None:
    memory = filled(23)
    slabs = [4, 4, 4, 4, 4, 3]
    assert fake_cuda.pinned.used == sum(up(rows * ROW, PAGE) for rows in slabs)  # no powers of two, no staging
    assert memory.unpinned_bytes == 0 and memory.bytes == 23 * ROW
    assert all(row.is_pinned() for row in memory.rows)
    assert all(arrives(memory, at) for at in range(23))
    memory.close()
    assert fake_cuda.pinned.used == 0 and memory.bytes == 0


@pytest.mark.parametrize("slabs", range(6))
def test_what_the_system_refuses_passes_through_a_few_pinned_rows(fake_cuda: FakeCuda, slabs: int) -> None:
    """The last slab that was pinned is given up again: others need room, too."""
    staging, slab = up(STAGING * ROW, PAGE), up(4 * ROW, PAGE)
    fake_cuda.pinned.limit = staging + slabs * slab + PAGE
    memory = filled(24)
    pinned = 4 * max(0, slabs - 1)
    assert [row.is_pinned() for row in memory.rows] == [True] * pinned + [False] * (24 - pinned)
    assert memory.unpinned_bytes == (24 - pinned) * ROW
    assert all(arrives(memory, at) for at in (*range(24), *reversed(range(24))))
    torch.empty(PAGE, dtype=torch.uint8, pin_memory=True)  # and the refusal is forgotten
    memory.close()
    torch._C._host_emptyCache()
    assert fake_cuda.pinned.used == 0


def test_a_system_that_pins_nothing_is_served_all_the_same(fake_cuda: FakeCuda) -> None:
    fake_cuda.pinned.limit = PAGE
    memory = filled(9)
    assert memory.unpinned_bytes == memory.bytes and all(arrives(memory, at) for at in range(9))
    memory.close()


def test_memory_that_nobody_closed_is_unpinned_with_its_last_reference(fake_cuda: FakeCuda) -> None:
    memory = filled(9)
    assert fake_cuda.pinned.used
    del memory
    assert not fake_cuda.pinned.used


@pytest.mark.parametrize("host", layered(["all", "300kB"], quick=lambda host: host != "all"))
def test_a_model_loads_where_little_can_be_pinned_and_says_so(
    fake_cuda: FakeCuda, pack: Path, host: str, caplog: Logged
) -> None:
    fake_cuda.pinned.limit = 150 << 10
    with caplog.at_level(logging.WARNING), engine_on(pack, {"budget": "45%"}, host=host) as engine:
        list(engine.generate("hello", Sampling(max_new_tokens=8)))
        memory = engine.memory()
        assert 0 < memory.unpinned < memory.host
        assert fake_cuda.pinned.used <= 150 << 10
    assert any("of host memory be pinned" in record.message for record in caplog.records)
    assert fake_cuda.pinned.used == 0


def test_rows_have_sizes_of_their_own(fake_cuda: FakeCuda) -> None:
    """As of experts whose formats differ by layer."""
    sizes = [ROW, ROW // 2, ROW, *[ROW // 2] * 6]
    memory = HostMemory(len(sizes), ROW, pin=True, sizes=sizes)
    assert [len(row) for row in memory.rows] == sizes and memory.bytes == sum(sizes) and memory.unpinned_bytes == 0
    first = memory.rows[0].data_ptr()
    gaps = [b - a for a, b in itertools.pairwise(memory.device_addresses())]
    assert gaps[:2] == [ROW, ROW // 2] and memory.rows[1].data_ptr() == first + ROW
    memory.close()
    fake_cuda.pinned.limit = up(STAGING * ROW, PAGE) + PAGE
    memory = HostMemory(len(sizes), ROW, pin=True, sizes=sizes)
    assert memory.unpinned_bytes == memory.bytes == sum(sizes)
    memory.close()
