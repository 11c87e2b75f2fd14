"""Where the experts of a pack are kept while they are not on the device: host memory, partly host memory, or disk.

Decided from sizes alone, before anything is read; `open_store` carries it out.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from core.cache.host_rows import HostRows
from core.memory.codec.layers import LayerCodecs
from core.memory.disk import DiskStore, HostCache
from core.memory.pack import PackReader
from core.memory.pages import aligned
from core.memory.store import ExpertStore, HostStore
from core.policy.eviction.lru import LRU

READERS = 2  # threads that read from disk: two saturate it
ROWS_MIN = 8  # fewest rows of a host cache: more than threads copy at a time
SPARE = 0.85  # share of the free host memory that "auto" takes at most


@dataclass(frozen=True, slots=True)
class Tier:
    """`all`: every expert in host memory. `cache`: `rows` of them there, the rest on disk. `disk`: all on disk."""

    kind: Literal["all", "cache", "disk"]
    rows: int  # rows of host memory, each for any expert, or for `all` its own; for `disk`, the readers' own
    row_bytes: int
    into_slots: bool  # the disk reads directly into slots, which are whole pages
    everything: int = 0  # bytes of all rows, where they have the size of their own expert

    @property
    def bytes(self) -> int:
        """Host memory that the tier takes."""
        return self.everything or self.rows * self.row_bytes

    @property
    def readers(self) -> int:
        """Threads that serve copies."""
        return 1 if self.kind == "all" else READERS


def choose_tier(
    requested: str,
    device: torch.device,
    experts: int,
    row_bytes: int,
    verbatim: bool,
    host_free: int,
    everything: int = 0,
) -> Tier:
    """The host tier of a pack, as LoadSpec.host requests it. `row_bytes` = the largest expert in whole pages;
    `everything` = all of them, 0 = all are as large; `verbatim` = slots hold exactly the bytes of the pack."""
    everything = everything or experts * row_bytes
    cuda = device.type == "cuda"
    if requested == "auto":
        requested = "none" if not cuda else "all" if everything <= SPARE * host_free else str(int(SPARE * host_free))
    if requested == "all" or (requested != "none" and int(requested) >= everything):
        return Tier("all", experts, row_bytes, False, everything)
    rows = 0 if requested == "none" else int(requested) // row_bytes
    if rows or cuda:  # copies to a GPU need pinned rows, even short-lived ones
        return Tier("cache", max(ROWS_MIN, rows), row_bytes, False)
    return Tier("disk", 0 if verbatim else READERS + 1, row_bytes, verbatim)  # a waiting thread may read, too


def open_store(
    tier: Tier,
    reader: PackReader,
    codecs: LayerCodecs,
    layers: int,
    pin: bool,
    progress: Callable[[float], None],
    cancel: threading.Event | None,
) -> ExpertStore:
    """The store of a tier, for the first so many MoE layers of a pack; with `all`, reads all experts now. Owns `reader`
    from here on, and closes it on failure."""
    try:
        if tier.kind == "disk":
            return DiskStore(reader, codecs, tier.rows)
        if tier.kind == "cache":
            rows = HostRows(layers, reader.manifest.experts, tier.rows, LRU)
            return HostCache(reader, codecs, tier.rows, pin, rows)
        store, buffer = HostStore(codecs, tier.rows, pin), aligned(reader.row_bytes)

        def blobs(eid: int) -> torch.Tensor:
            reader.read_into(eid, buffer)
            return buffer

        store.fill_raw((blobs(eid) for eid in range(tier.rows)), progress, cancel)
        reader.close()
        return store
    except BaseException:
        reader.close()
        raise
