"""The speed to expect before a model is loaded: ranges of hit rate and tokens per second, and their basis.

A token takes its compute time and the copies of its misses: at worst one after the other, at best overlapped. Both are
estimated from short measurements on this machine; the hit rate is from a recorded trace or between two bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from core.cache.core import CacheCore
from core.cache.pool import numbered_pools
from core.capacity.sizes import Sizes
from core.memory.codec import Codec
from core.policy.allocation.slots import shares
from core.policy.eviction.lru import LRU

Trace = npt.NDArray[np.int16]
"""Routing of decoded tokens: expert ids [tokens, layers, k]."""

BLOCK_MS = (0.15, 0.6)  # a transformer block's time besides its weights: least and most seen on CPUs
COLD = 64 << 20  # bytes of slots cycled through when timing an expert: more than processor caches hold
LONGEST_S = 0.05  # of one timing
REPORTED = np.array(((0.0, 0.0), (0.05, 0.366), (0.15, 0.74), (0.30, 0.89), (0.50, 0.96), (1.0, 1.0)))
# share of slots -> hit rate of LRU as others report it for Qwen3-30B-A3B: routing about as local as it gets


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds measured on this machine."""

    expert_ms: float  # one expert's products for one token
    memory_gbps: float  # reading dense weights in a product


@dataclass(frozen=True, slots=True)
class Forecast:
    """Ranges, and their basis in the user's words."""

    hit: tuple[float, float]
    tok_s: tuple[float, float]
    basis: str


def forecast(
    sizes: Sizes, slots: int, scope: str, speeds: Speeds, copy_gbps: float, copies: str, trace: Trace | None = None
) -> Forecast:
    """`copy_gbps` = speed of the link that serves misses; `copies` names it for the user ("from disk at 1.2 GB/s")."""
    total, layers = sizes.shape.total, sizes.shape.layers
    if slots >= total:
        hit, basis = (1.0, 1.0), "everything is resident"
    elif trace is not None and len(trace) and trace.shape[1] == layers:
        rate = lru_hit_rate(trace, slots, sizes.shape.experts, scope)
        hit, basis = (rate, rate), f"hit rate: LRU on {len(trace)} recorded tokens of this model"
    else:
        share = slots / total
        reported = float(np.interp(share, REPORTED[:, 0], REPORTED[:, 1]))
        hit = (share, max(share, reported))
        basis = (
            "hit rate: between uniform routing and what is reported for Qwen3-30B-A3B, because nothing is recorded yet"
        )
    wanted = layers * sizes.shape.top_k
    copy_ms = [wanted * (1 - h) * sizes.blob / copy_gbps / 1e6 for h in hit]
    weights_ms = wanted * speeds.expert_ms + sizes.dense / speeds.memory_gbps / 1e6
    least, most = (weights_ms + layers * block for block in BLOCK_MS)
    return Forecast(hit, (1e3 / (most + copy_ms[0]), 1e3 / max(least, copy_ms[1])), f"{basis}; copies {copies}")


def lru_hit_rate(trace: Trace, slots: int, experts: int, scope: str) -> float:
    """Hit rate of LRU with `slots` in all on a trace; its first quarter is warm-up and not counted."""
    tokens, layers, _ = trace.shape
    pools = numbered_pools(layers * experts, shares(slots, layers) if scope == "layer" else [slots])
    core = CacheCore(layers, experts, LRU, pools)
    eids = trace.astype(np.int64) + np.arange(layers)[:, None] * experts
    counted_from, hits = tokens // 4, 0
    for at, requests in enumerate(eids.reshape(tokens, -1).tolist()):
        for eid in requests:  # one at a time: nothing is leased, for nothing is computed
            if core.is_resident(eid):
                hits += at >= counted_from
            elif core.admit(eid) is None:
                continue  # its layer has no slots
            core.use(eid)
    counted = eids[counted_from:].size
    return hits / counted if counted else 0.0


_measured: dict[tuple[object, ...], Speeds] = {}


def measure_speeds(codec: Codec, format: str, hidden: int) -> Speeds:
    """This device's speeds for one expert format and size; takes a fraction of a second, once per process."""
    key = format, hidden, codec.slot_bytes, codec.dtype, codec.device
    if key not in _measured:
        _measured[key] = _measure(codec, hidden)
    return _measured[key]


@torch.inference_mode()
def _measure(codec: Codec, hidden: int) -> Speeds:
    device, dtype = codec.device, codec.dtype
    count = min(256, max(2, COLD // codec.slot_bytes))
    slots = [codec.views(torch.zeros(codec.slot_bytes, dtype=torch.uint8, device=device)) for _ in range(count)]
    inputs = {part: torch.zeros(1, codec.out_in(part)[1], dtype=dtype, device=device) for part in slots[0].weights}

    def expert(i: int) -> None:
        for part, x in inputs.items():
            codec.linear(slots[i % count], part, x)

    matrices = min(32, max(2, COLD // (4 * hidden * hidden * dtype.itemsize)))
    dense = torch.zeros(matrices, hidden, 4 * hidden, dtype=dtype, device=device)
    x = torch.zeros(1, hidden, dtype=dtype, device=device)
    dense_s = _seconds(lambda i: torch.mm(x, dense[i % matrices]), device)
    return Speeds(_seconds(expert, device) * 1e3, dense[0].numel() * dtype.itemsize / dense_s / 1e9)


def _seconds(work: Callable[[int], object], device: torch.device) -> float:
    """Mean seconds of one call of `work`, repeated for LONGEST_S."""
    work(0)
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < LONGEST_S or done < 2:
        done += 1
        work(done)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / done
