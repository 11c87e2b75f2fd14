"""Memory in whole pages, which a disk can write into without the system's cache between them."""

from __future__ import annotations

import mmap

import torch

PAGE = 4096  # what packs are aligned to; a multiple of every common sector size


def page_up(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def aligned(size: int) -> torch.Tensor:
    """uint8 [size] at a page's start, zeroed. Its memory goes back to the system as soon as nothing refers to it."""
    pages = mmap.mmap(-1, max(page_up(size), PAGE))
    return torch.frombuffer(pages, dtype=torch.uint8, count=size)
