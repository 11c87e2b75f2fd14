"""The manifest of every export and bench result: what its figures were measured on."""

import platform
from functools import cache
from importlib.metadata import version

import torch

from core.capacity.plan import Plan
from core.engine.arithmetic import VERSION, Arithmetic
from core.memory.link import Pace
from core.settings.config import Settings

TIERS = {"all": "host memory", "cache": "host memory, else disk", "disk": "disk"}
PACKAGES = ("torch", "transformers", "numpy", "safetensors")


def versions() -> dict[str, str]:
    """Python, the packages whose version can change a figure, and our own arithmetic of products, which can as well."""
    return {"python": platform.python_version(), **_packages(), "arithmetic": str(VERSION)}


@cache
def _packages() -> dict[str, str]:
    """Their versions. Read from disk once: results in a document are held against them one by one."""
    return {name: version(name) for name in PACKAGES}


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's architecture with torch's thread count and instruction set."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def link(pace: Pace, measured_gbps: float) -> dict[str, object]:
    """The link's bandwidth in GB/s and whether it was measured or is emulated."""
    if pace:
        return {"link": "emulated", "link_gbps": pace.gbps, "link_latency_us": pace.latency_us}
    return {"link": "measured", "link_gbps": round(measured_gbps, 3)}


def describe(
    plan: Plan,
    model_hash: str,
    settings: Settings,
    pace: Pace,
    measured_gbps: float,
    decode_threads: int,
    one_at_a_time: str,
    arithmetic: Arithmetic,
) -> dict[str, object]:
    """The manifest of one load. "exact": under `settings` no bit of an answer that is computed alone differs from
    transformers' own; in the fast arithmetic, from its own with everything resident. "arithmetic" is what computes."""
    shape = plan.sizes.shape
    return {
        "model": plan.spec.model,
        "model_hash": model_hash,
        "architecture": plan.config.model_type,
        "layers": shape.layers,
        "head_layers": shape.heads,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "expert_bytes": shape.expert_bytes,
        **plan.spec.describe(),
        "format": plan.format,
        "dtype": plan.compute_type,
        "context": plan.context,
        "device": str(plan.device),
        "device_name": device_name(plan.device),
        "misses_from": TIERS[plan.tier.kind],
        "decode_threads": decode_threads,
        **link(pace, measured_gbps),
        "exact": (arithmetic.fast or plan.closeness == 0.0) and not settings.lossy.active,
        "closeness": arithmetic.closeness(plan.closeness),
        **arithmetic.facts(),
        "one_at_a_time": one_at_a_time,
        "settings": dict(settings),
        "versions": versions(),
    }
