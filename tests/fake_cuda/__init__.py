"""A GPU that is none: the engine's CUDA path on a machine without one.

Numbers are computed by torch on the CPU, at once. What is imitated is what goes wrong on a GPU: work of different
streams that nothing orders (`clocks`, `races`), memory that is reserved or runs out, pinned memory that is refused
(`memory`), tensors of two devices in one product (`tensors`), and calls that fail, then and ever after (`faults`).
Tests take the fixture `fake_cuda`.
"""

from tests.fake_cuda.device import FakeCuda, installed

__all__ = ["FakeCuda", "installed"]
