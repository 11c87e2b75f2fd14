"""Which device computes, and in the user's words why a GPU is not used or is slower than it could be."""

import functools
import re
from typing import NamedTuple

import torch

from core.errors import BudgetError
from core.system.command import COMMAND
from core.system.nvidia import nvidia_gpus

BF16 = (8, 0)  # from this compute capability on a GPU has bfloat16 arithmetic of its own
MEND = f"`{COMMAND} doctor --mend` replaces it by one that can"


def choose_device(name: str) -> torch.device:
    """ "auto" is the GPU if there is one that torch can use. Raises BudgetError when a GPU is requested and there is
    none."""
    if name == "cpu":
        return torch.device("cpu")
    if wrong := why_no_gpu() or why_not_built_for(torch.device("cuda")):
        if name == "cuda":
            raise BudgetError(f"There is no GPU on this machine that can be used: {wrong}. Or choose device cpu.")
        return torch.device("cpu")
    return torch.device("cuda")


class NoGpu(NamedTuple):
    """Why torch sees no GPU, and what to do, without a full stop; and whether the machine has one all the same."""

    reason: str
    present: bool


def passed_over(name: str) -> str:
    """Why `choose_device` took the CPU although this machine has a GPU; "" where it does not."""
    if name != "auto":
        return ""
    none = _no_gpu()
    if none is None:
        wrong = why_not_built_for(torch.device("cuda"))
    else:
        wrong = none.reason if none.present else ""
    return f"Computed on the CPU: {wrong}." if wrong else ""


def why_no_gpu() -> str:
    """Why torch sees no GPU at all, and what to do, without a full stop; "" when it sees one."""
    none = _no_gpu()
    return none.reason if none else ""


def _no_gpu() -> NoGpu | None:
    return None if torch.cuda.is_available() else _why_none(torch.version.cuda or torch.version.hip or "")


@functools.lru_cache(maxsize=4)
def _why_none(built_for: str) -> NoGpu:
    if not built_for:
        gpus = [gpu.name for gpu in nvidia_gpus()]
        return NoGpu(f"this torch is a CPU build and cannot use {', '.join(gpus) or 'a GPU'}. {MEND}", bool(gpus))
    try:
        torch.cuda.init()
    except Exception as error:  # its text holds the driver's
        text = " ".join(str(error).split())
        if found := re.search(r"too old \(found version (\d+)\)", text):
            major, minor = int(found[1]) // 1000, int(found[1]) % 1000 // 10
            return NoGpu(
                f"the NVIDIA driver is too old: it has CUDA {major}.{minor}, and this torch is built for CUDA "
                f"{built_for}. Update the driver",
                True,
            )
        if "no NVIDIA driver" in text:
            return NoGpu("no NVIDIA driver is installed, or it does not run. Install it from nvidia.com", False)
        return NoGpu(text.partition(". ")[0].rstrip(".") or "torch finds none", "driver" in text)
    return NoGpu("torch finds none. CUDA_VISIBLE_DEVICES may hide it", False)


def why_not_built_for(device: torch.device) -> str:
    """Why this torch has no machine code for a GPU, and what to do, without a full stop; "" when it has."""
    built = [
        found for name in torch.cuda.get_arch_list() if (found := re.fullmatch(r"(sm|compute)_(\d+)(\d)(\w?)", name))
    ]
    if not built or torch.version.hip is not None:
        return ""
    capability = torch.cuda.get_device_capability(device)
    for kind, major, minor, exact in (one.groups() for one in built):
        of = int(major), int(minor)
        if of == capability or (not exact and of[1] <= capability[1] and of[0] == capability[0]):
            return ""
        if kind == "compute" and not exact and of <= capability:  # the driver compiles it
            return ""
    has, codes = f"{capability[0]}.{capability[1]}", ", ".join(one[0] for one in built)
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {has}, and this torch {torch.__version__} is "
        f"built for {codes} only. Install a torch that is built for it (pytorch.org lists them)"
    )


def remark(device: torch.device, dtype: torch.dtype) -> str:
    """What the user should know of computing in this number type on a GPU; "" = nothing."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip or not torch.cuda.is_available():
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability >= BF16:
        return ""
    return (
        f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic of its own (compute capability "
        f"{capability[0]}.{capability[1]}; 8.0 and later have): choose the compute type float16, which is faster on it "
        "and rounds differently."
    )
