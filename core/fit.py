"""Does it fit? Worked out from config and file headers alone, before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from core.config import LoadSpec
from core.errors import BudgetError, ContextError
from core.hf import Outline, check_model, meta_skeleton, outline
from core.hf.files import ModelFiles
from core.memory.codec import Codec, make_codec
from core.sizes import Sizes, human, sizes_of
from core.types import Fit, Memory

DEFAULT_CONTEXT = 8192     # when the model allows more and the user asked for nothing
HOST_MARGIN = 256 << 20    # host memory left to the system
DEMO = Path(__file__).resolve().parent.parent / "assets" / "demo"


def model_path(name: str) -> Path:
    """"demo" is the bundled model; anything else is a directory."""
    return DEMO if name == "demo" else Path(name).expanduser()


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked load: everything that is known before a weight is read."""

    spec: LoadSpec
    files: ModelFiles
    outline: Outline
    config: Any
    device: torch.device
    dtype: torch.dtype
    context: int
    codec: Codec
    sizes: Sizes

    def fit(self, instead_of: Memory | None = None) -> Fit:
        """The verdict on this plan, beside whatever is loaded or `instead_of` it."""
        return fit_of(self.sizes, self.spec, self.device, self.context, self.outline.context_limit, instead_of)


def plan(spec: LoadSpec) -> Plan:
    """Read config and headers only. Raises ModelError, ContextError or BudgetError with what is wrong."""
    files = check_model(model_path(spec.model))
    device = choose_device(spec.device)
    dtype = None if spec.dtype == "auto" else getattr(torch, spec.dtype)
    meta = meta_skeleton(files, dtype)
    dtype = dtype or meta.dtype
    shape = outline(meta)
    context = choose_context(spec.context, shape.context_limit)
    site = shape.sites[0]
    codec = make_codec(spec.format, group_size=spec.group_size, dtype=dtype, device=device, specs=site.parts,
                       is_transposed=site.is_transposed)
    return Plan(spec, files, shape, meta.config, device, dtype, context, codec,
                sizes_of(shape, meta.config, codec, context))


def estimate(spec: LoadSpec, instead_of: Memory | None = None) -> Fit:
    """Does it fit? Milliseconds, and no weights are read. Raises ModelError when the model itself is unusable."""
    return plan(spec).fit(instead_of)


def free_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the memory that `device` computes in."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def choose_device(name: str) -> torch.device:
    """"auto" is the GPU when there is one. Raises BudgetError when a GPU is asked for and none is there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BudgetError("There is no usable GPU on this machine. Choose device cpu, or auto.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def choose_context(asked: int, limit: int) -> int:
    """The context to reserve. Raises ContextError when more is asked for than the model can do."""
    if asked > limit:
        raise ContextError(f"The context of {asked} tokens is longer than the {limit} that this model can take.")
    return asked or min(limit, DEFAULT_CONTEXT)


def fit_of(sizes: Sizes, spec: LoadSpec, device: torch.device, context: int, context_limit: int,
           instead_of: Memory | None = None) -> Fit:
    """The verdict. `instead_of` = the memory of a model loaded now, which is given back first."""
    budget, scope = spec.settings.budget, str(spec.settings["scope"])
    free, _ = free_bytes(device)
    freed = (instead_of.used, instead_of.host) if instead_of is not None else (0, 0)
    free += sum(freed) if device.type == "cpu" else freed[0]
    host = sizes.blob * sizes.shape.total
    host_free = free if device.type == "cpu" else free_bytes(torch.device("cpu"))[0] + freed[1]
    on_host = host + (sizes.budget_bytes(budget) if device.type == "cpu" else 0)
    problem = sizes.problem(budget, scope, free)
    if not problem and on_host + HOST_MARGIN > host_free:
        problem = (f"The experts need {human(host)} of host memory"
                   + (" beside the budget" if device.type == "cpu" else "")
                   + f", but only {human(host_free)} are free. Choose a smaller expert format, or close other "
                   "programs.")
    slots = sizes.slots(budget)
    warning = ""
    if not problem and slots < sizes.shape.total and slots < 2 * sizes.slots_min(scope):
        warning = "Barely more than one token's experts fit: expect almost every request to be fetched."
    return Fit(model=spec.model, shape=sizes.shape, format=spec.format, device=str(device), context=context,
               context_limit=context_limit, dense=sizes.dense, kv=sizes.kv, workspace=sizes.workspace, slots=slots,
               slots_min=sizes.slots_min(scope), budget=sizes.budget_bytes(budget),
               budget_min=sizes.bytes(sizes.slots_min(scope)), budget_all=sizes.bytes(sizes.shape.total),
               device_free=free, host=host, host_free=host_free, problem=problem, warning=warning)
