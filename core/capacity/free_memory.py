"""Memory available for a load, next to the model loaded now or in its place."""

import torch

from core.system.memory_limits import host_memory
from core.types import Memory


def free_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the memory that `device` computes in."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    memory = host_memory()
    return memory.available, memory.total


def give_back(device: torch.device) -> None:
    """Return to the system what torch keeps of freed memory: of a GPU's, of pinned memory, and for its products."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def device_free(device: torch.device, instead_of: Memory | None = None) -> int:
    """Free bytes of the memory that `device` computes in, plus those that the model loaded now
    (`instead_of`) would free."""
    freed = 0
    if instead_of is not None:
        freed = instead_of.used + (instead_of.host + instead_of.kept if device.type == "cpu" else 0)
    return free_bytes(device)[0] + freed


def host_free(device: torch.device, instead_of: Memory | None = None) -> int:
    """The same for host memory."""
    if device.type == "cpu":
        return device_free(device, instead_of)
    return free_bytes(torch.device("cpu"))[0] + (instead_of.host + instead_of.kept if instead_of is not None else 0)
