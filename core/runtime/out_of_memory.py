"""Tells a GPU without memory from other errors of torch's."""

import torch

REFUSALS = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
FAULTS = ("CUDA error", "Triton Error [CUDA]")  # of torch, of the driver, and of Triton's own launcher


def faulted(error: BaseException) -> bool:
    """Whether a GPU, or what drives it, reported an error."""
    return any(fault in str(error) for fault in FAULTS)


def shortage(error: BaseException) -> str:
    """What a GPU had no memory for, to follow "has no room for"; "" for any other error."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"what it computes with ({text.partition('. GPU')[0]})"
    return f"what its libraries need ({text})" if any(refusal in text for refusal in REFUSALS) else ""
