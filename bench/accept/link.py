"""Checks of `launch.py accept` without a model: the machine, copies to the GPU, kernels that read host memory."""

import functools
import itertools
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import psutil
import torch

from bench.accept.drawn import FORMAT, Subject
from core.memory.arena import Arena
from core.memory.codec import Codec, PartSpec, make_codec
from core.memory.codec.kernels import launched_by, make_kernels, notice
from core.memory.codec.layers import LayerCodecs
from core.memory.codec.measure import random_expert
from core.memory.host_memory import HostMemory
from core.memory.store import HostStore
from core.memory.ticket import Ticket
from core.memory.transfer import TransferEngine
from core.types import Segment

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "triton", "triton-windows")
PYTHON_S = 3e-4  # of pure Python, as a predictor that looks ahead runs


class Wrong(Exception):
    """A check found what must not be."""


def milliseconds(call: Callable[[], object], rounds: int = 50, warm: int = 5) -> float:
    """Device time of a call, the mean over rounds that are queued one behind another."""
    for _ in range(warm):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(rounds):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / rounds


def codec_of(subject: Subject) -> Codec:
    """Of an expert of the large model."""
    hidden, width = subject.sizes.hidden, subject.sizes.width
    specs = {
        "gate_up_proj": PartSpec((2 * width, hidden), torch.bfloat16),
        "down_proj": PartSpec((hidden, width), torch.bfloat16),
    }
    return make_codec(FORMAT, specs=specs, dtype=torch.bfloat16, device=subject.device)


def machine(subject: Subject) -> dict[str, Any]:
    """Hardware and versions; what products keep of the device's memory."""
    free, total = torch.cuda.mem_get_info(subject.device)
    major, minor = torch.cuda.get_device_capability(subject.device)
    x = torch.randn(64, 64, device=subject.device, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated(subject.device)
    y = x @ x
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated(subject.device) - before - y.nbytes
    return {
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": platform.processor() or platform.machine(),
            "cores": psutil.cpu_count(logical=False),
            "memory_bytes": psutil.virtual_memory().total,
            "gpu": torch.cuda.get_device_name(subject.device),
            "capability": f"{major}.{minor}",
            "gpu_free_bytes": free,
            "gpu_total_bytes": total,
            "model": subject.sizes.name,
        },
        "versions": {"python": platform.python_version(), "cuda": str(torch.version.cuda), **_versions()},
        "products_keep_mb": kept / 1e6,
        "kernels": notice(subject.device) or f"launched by {launched_by(subject.device)}",
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def copies(subject: Subject, experts: int = 64) -> dict[str, Any]:
    """The link: one large copy, experts one behind another, and through the engine's copy thread."""
    codec, size = codec_of(subject), (1 if subject.small else 256) << 20
    codecs = LayerCodecs.alike(codec, 1, experts)
    store = HostStore(codecs, experts, True)
    try:
        blob = codec.encode(random_expert(subject.sizes.hidden, subject.sizes.width))
        store.fill_raw((blob for _ in range(experts)), lambda share: None, None)
        arena = Arena(codecs, subject.device)
        arena.expect(experts)
        slots = [arena.allocate() for _ in range(experts)]
        source, target = HostMemory(1, size, True), torch.empty(size, dtype=torch.uint8, device=subject.device)
        whole_ms = milliseconds(lambda: target.copy_(source.rows[0], non_blocking=True), 5, 2)
        each_ms = milliseconds(lambda: [store.fetch(eid, [slot.raw]) for eid, slot in enumerate(slots)], 5, 2)
        source.close()
        found: dict[str, Any] = {
            "copy_gbps": size / whole_ms / 1e6,
            "experts_gbps": experts * codec.blob_bytes / each_ms / 1e6,
            "expert_mb": codec.blob_bytes / 1e6,
            "not_pinned_bytes": store.unpinned_bytes,
        }
        link = TransferEngine(subject.device, store.fetch, is_pinned=store.is_pinned)
        try:
            return found | _through_the_thread(link, slots, codec.blob_bytes)
        finally:
            link.close()
            torch.cuda.synchronize()
    finally:
        store.close()


def _through_the_thread(link: TransferEngine, slots: list[Any], size: int) -> dict[str, Any]:
    """One expert at a time, all at once, and while the computing thread runs Python."""

    def ticket(eid: int) -> Ticket:
        return link.submit(Ticket(Segment(eid, range(1)), [slots[eid]], size, True, "decode"))

    issued, there, prompt = list[float](), list[float](), 0
    for eid in range(len(slots)):
        begin = time.perf_counter()
        link.wait(ticket(eid))
        issued.append(time.perf_counter() - begin)
        torch.cuda.current_stream().synchronize()
        there.append(time.perf_counter() - begin)
    alone_ms = [one.begin.elapsed_time(one.event) for one in link.take_finished()]
    for eid in range(len(slots)):
        begin = time.perf_counter()
        one = ticket(eid)
        while time.perf_counter() - begin < PYTHON_S:
            pass
        prompt += 0 < one.started_s < begin + PYTHON_S
        link.wait(one)
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for one in [ticket(eid) for eid in range(len(slots))]:
        link.wait(one)
    torch.cuda.synchronize()
    return {
        "demand_issued_us": 1e6 * statistics.median(issued),
        "demand_there_us": 1e6 * statistics.median(there),
        "demand_copy_alone_us": 1e3 * statistics.median(alone_ms),
        "started_within_300us_of_python": prompt / len(slots),
        "demands_at_once_gbps": len(slots) * size / (time.perf_counter() - begin) / 1e9,
    }


def zerocopy(subject: Subject, rows: int = 128) -> dict[str, Any]:
    """The kernels, given addresses of pinned host memory in place of slots: the same bits, and as fast as copies?"""
    codec = codec_of(subject)
    kernels = make_kernels(codec)
    if kernels is None:
        return {"left_out": notice(subject.device) or "the kernels do not run here"}
    blob = codec.encode(random_expert(subject.sizes.hidden, subject.sizes.width))
    memory = HostMemory(rows, codec.blob_bytes, True)
    try:
        if memory.unpinned_bytes:
            return {"left_out": f"the system lets only {memory.pinned} of {rows} experts be pinned"}
        arena = Arena(LayerCodecs.alike(codec, 1, rows), subject.device)
        arena.expect(rows)
        near = [arena.allocate().raw for _ in range(rows)]
        for row, slot in zip(memory.rows, near, strict=True):
            row.copy_(blob)
            slot.copy_(row)
        x = torch.randn(1, subject.sizes.hidden, device=subject.device).to(torch.bfloat16)
        a = torch.randn(8, subject.sizes.width, device=subject.device).to(torch.bfloat16)
        addresses = {"host": memory.device_addresses(), "slots": [row.data_ptr() for row in near]}
        tables = {where: torch.tensor(some, device=subject.device) for where, some in addresses.items()}
        ids = torch.arange(rows, device=subject.device).view(-1, 8)
        for part, state in (("gate_up_proj", x), ("down_proj", a)):
            want = kernels.multiply(part, near[:8], state)
            if not torch.equal(want, kernels.multiply_by_ids(part, tables["host"], ids[0], state)):
                raise Wrong(f"{part}: not the same bits out of host memory as out of slots")
        found: dict[str, Any] = {}
        for count in (1, 2, 4, 8):
            for where, table in tables.items():
                turns = itertools.cycle(ids.view(-1, count))
                ms = milliseconds(functools.partial(_experts, kernels, table, turns, x, a[:count]))
                found[f"{count}_of_{where}_us"] = 1e3 * ms
                found[f"{count}_of_{where}_gbps"] = count * codec.blob_bytes / ms / 1e6
        return found
    finally:
        torch.cuda.synchronize()
        memory.close()


def _experts(kernels: Any, table: torch.Tensor, turns: Any, x: torch.Tensor, a: torch.Tensor) -> None:
    ids = next(turns)
    kernels.multiply_by_ids("gate_up_proj", table, ids, x)
    kernels.multiply_by_ids("down_proj", table, ids, a)
