"""Measures and queries this machine for `examination`. What a machine lacks is None, never an estimate."""

import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

MB = 10**6
TRIED = (512, 512)  # of the matrix whose products are timed where no model has been loaded


def cpu() -> dict[str, Any]:
    """Processor, cores, and the vector instructions used by torch's kernels."""
    import psutil
    import torch

    fields = _fields()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "name": _name(fields),
        "cores": psutil.cpu_count(logical=False),
        "threads": os.cpu_count(),
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "flags": [flag for flag in wanted if flag in flags],
    }


def machine() -> str:
    """The processor and how many of it: results name so what they were measured on."""
    return f"{_name(_fields())}, {os.cpu_count()} processors"


def _fields() -> dict[str, str]:
    """What Linux says of the last processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _name(fields: dict[str, str]) -> str:
    return fields.get("model name") or platform.processor() or platform.machine()


def gpus() -> list[dict[str, Any]]:
    """Every GPU usable by torch, with details from NVML; without a usable torch, those that NVML reports. Bytes."""
    import torch

    from core.system.nvidia import nvidia_gpus

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": properties.name,
                "usable": True,
                "total_bytes": total,
                "free_bytes": free,
                "capability": f"{properties.major}.{properties.minor}",
                **nvml(str(getattr(properties, "uuid", "")), index),
            }
        )
    return found or [
        {"name": gpu.name, "usable": False, "total_bytes": gpu.total_bytes, "free_bytes": gpu.free_bytes}
        for gpu in nvidia_gpus()
    ]


def why_no_gpu() -> str:
    """Why torch sees no GPU, and what to do."""
    from core.capacity.device import why_no_gpu

    return why_no_gpu()


def remarks() -> list[str]:
    """What stands in the way of a GPU that torch sees, or slows it down."""
    import torch

    from core.capacity.device import remark, why_not_built_for
    from core.memory.codec.kernels import notice

    device = torch.device("cuda")
    if not_built := why_not_built_for(device):
        return [f"The GPU cannot be used: {not_built}."]
    return [text for text in (notice(device), remark(device, torch.bfloat16)) if text]


def distances(file: Path) -> list[dict[str, Any]]:
    """Of each model and format the distance of the fast arithmetic from the reference, as kept in `file`, and why
    `auto` does not take it ("" = it does)."""
    from core.engine.arithmetic import kept_in, objection

    return [
        {**of, **distance.facts(), "text": str(distance), "objection": objection(distance, of["dtype"])}
        for of, distance in kept_in(file)
    ]


def paces(file: Path) -> list[dict[str, Any]]:
    """Of each format and arithmetic of the demo model the time of a layer, and the bandwidth that its emulated link is
    given for it, as kept in `file`."""
    from core.engine.kept_pace import kept_in

    return kept_in(file)


def products(file: Path) -> list[dict[str, Any]]:
    """Of each kind of product of codes on the CPU the milliseconds of both ways by rows, and the way that is taken: as
    kept in `file` of earlier loads, else timed now for a small expert."""
    import torch

    from core.memory.codec import PartSpec, make_codec
    from core.memory.codec.base import Base
    from core.memory.codec.fast import choice
    from core.memory.codec.fast.products import CanonicalProducts, serves
    from core.memory.codec.matrix import matrix

    timed = choice.kept_in(file)
    if not timed:
        specs = {"down_proj": PartSpec(TRIED, torch.bfloat16)}
        codec = make_codec("int4-g64", specs=specs, dtype=torch.bfloat16, device=torch.device("cpu"))
        assert isinstance(codec, Base)
        if serves(one := matrix(codec, "down_proj")):
            CanonicalProducts(one, torch.bfloat16).choose(torch.get_num_threads())
        timed = choice.known()
    return [
        {
            "kind": kind,
            "rows": rows,
            "ms": {way: 1e3 * seconds[i] for way, seconds in one.seconds.items() if i < len(seconds)},
            "taken": one.fastest(rows),
        }
        for kind, one in sorted(timed.items())
        for i, rows in enumerate(choice.ROWS)
    ]


def attention() -> str | None:
    """What computes a decoded token's attention on the GPU; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    from core.hf.attention_launch import Shape, tried

    made = tried(Shape(32, 4, 128, 128, torch.float16, 128**-0.5), torch.device("cuda"))
    return "torch's" if made is None else "Moestro's"


def kernels() -> str | None:
    """What launches the kernels of a GPU that torch sees; None where something stands in their way."""
    import torch

    from core.memory.codec.kernels import launched_by, notice

    device = torch.device("cuda")
    return None if notice(device) else launched_by(device)


def nvml(uuid: str, index: int) -> dict[str, Any]:
    """PCIe generation and width (current and maximum) and driver of one GPU; empty when NVML does not answer."""
    try:
        import pynvml as nv
    except ImportError:
        return {}
    try:
        nv.nvmlInit()
        handle = nv.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") if uuid else nv.nvmlDeviceGetHandleByIndex(index)
        return {
            "driver": str(nv.nvmlSystemGetDriverVersion()),
            "pcie": {
                "generation": nv.nvmlDeviceGetCurrPcieLinkGeneration(handle),
                "generation_max": nv.nvmlDeviceGetMaxPcieLinkGeneration(handle),
                "width": nv.nvmlDeviceGetCurrPcieLinkWidth(handle),
                "width_max": nv.nvmlDeviceGetMaxPcieLinkWidth(handle),
            },
        }
    except nv.NVMLError:
        return {}


def link(repeats: int = 5, size: int = 128 * MB) -> dict[str, Any]:
    """Best copy bandwidth from host to device in GB/s: pinned memory to the GPU, or RAM to RAM without a GPU."""
    import torch

    gpu = torch.cuda.is_available()
    source = torch.ones(size, dtype=torch.uint8, pin_memory=gpu)
    target = torch.zeros(size, dtype=torch.uint8, device="cuda" if gpu else "cpu")
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source, non_blocking=gpu)
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return {"kind": "pinned host memory to GPU" if gpu else "memory to memory (no GPU)", "gbps": size / best / 1e9}


def disk(folder: Path, size: int = 128 * MB) -> dict[str, Any]:
    """Write and read speed of the data directory's disk in GB/s; the test file is removed."""
    there = next((p for p in (folder, *folder.parents) if p.is_dir()), Path.cwd())
    result: dict[str, Any] = {
        "path": str(there),
        "free_bytes": shutil.disk_usage(there).free,
        "write_gbps": None,
        "read_gbps": None,
        "cached": not hasattr(os, "posix_fadvise"),
    }
    block = os.urandom(MB)
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            start = time.perf_counter()
            for _ in range(size // MB):
                file.write(block)
            os.fsync(file.fileno())
            result["write_gbps"] = size / (time.perf_counter() - start) / 1e9
            if hasattr(os, "posix_fadvise"):  # drop the cached copy, so that the read comes from disk
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            while file.read(8 * MB):
                pass
            result["read_gbps"] = size / (time.perf_counter() - start) / 1e9
    except OSError as error:
        result["problem"] = str(error)
    return result
