"""Memory in whole pages, as direct disk reads (without the system's file cache) require."""

import mmap

import torch

PAGE = 4096  # alignment of packs; a multiple of every common sector size


def page_up(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def aligned(size: int) -> torch.Tensor:
    """uint8 [size], page-aligned and zeroed. The memory returns to the system when the last reference is gone."""
    pages = mmap.mmap(-1, max(page_up(size), PAGE))
    return torch.frombuffer(pages, dtype=torch.uint8, count=size)
