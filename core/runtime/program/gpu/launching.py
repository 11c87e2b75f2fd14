"""What launches the program's kernels on a GPU."""

import torch

from core.errors import ModelError
from core.memory.codec import kernels
from core.memory.cuda_driver import DriverError


def launcher_for(device: torch.device) -> kernels.Launcher:
    """Raises ModelError, with the reason, where there is none."""
    reason = kernels.why_not(device)
    try:
        if not reason:
            return kernels.launcher_of(device)
    except DriverError as error:
        reason = str(error)
    raise ModelError(f"the fast arithmetic's kernels cannot run on this GPU: {reason}")
