"""Errors of a GPU are told apart whoever reports them: torch, its libraries, the driver, or Triton's launcher."""

import pytest
import torch

from core.runtime.out_of_memory import faulted, shortage


@pytest.mark.parametrize(
    ("error", "short", "fault"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("CUDA error: out of memory (CUDA_ERROR_OUT_OF_MEMORY: 2)"), True, True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True, True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False, True),
        (RuntimeError("CUDA error: device lost\nmore"), False, True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False, False),
    ],
)
def test_what_an_error_says(error: RuntimeError, short: bool, fault: bool) -> None:
    assert bool(shortage(error)) == short and faulted(error) == fault
