"""Memory of fixed size for what grows with the context: filled from the front, cut, copied to host memory and back."""

from __future__ import annotations

import torch


class Allocated:
    """The bytes that the layers of one cache have allocated: each layer adds and subtracts its own, so that no
    pass has to sum them. May be read from any thread."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class ReservedTensor:
    """A tensor of fixed capacity along one dimension, filled from the front. Allocated at the first append, and counted
    in `allocated`."""

    __slots__ = ("_allocated", "_capacity", "_device", "_dim", "_tensor", "bytes", "length")

    def __init__(self, capacity: int, dim: int, allocated: Allocated) -> None:
        self._capacity, self._dim, self._allocated = capacity, dim, allocated
        self._tensor: torch.Tensor | None = None
        self._device: torch.device | None = None  # where it was, once it was allocated
        self.length = self.bytes = 0

    def like(self, other: ReservedTensor) -> None:
        """What was copied from `other` may be put here, before anything was appended."""
        self._device = self._device or other._device

    def drop(self) -> None:
        """Give the memory back, with what it holds, until the next append."""
        self._allocated.bytes -= self.bytes
        self._tensor, self.length, self.bytes = None, 0, 0

    @property
    def memory(self) -> torch.Tensor | None:
        """The whole of it, filled or not; None before the first append."""
        return self._tensor

    def grown(self, count: int) -> torch.Tensor:
        """The caller has filled `count` more positions -> a view of everything so far."""
        assert self._tensor is not None and self.length + count <= self._capacity
        self.length += count
        return self._tensor.narrow(self._dim, 0, self.length)

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Append `new` and return a view of everything so far. Raises ValueError when the capacity is exceeded."""
        if self._tensor is None:
            self._tensor = self._allocate(new)
        start, end = self.length, self.length + new.shape[self._dim]
        if end > self._capacity:
            raise ValueError(f"the KV cache holds {self._capacity} tokens, {end} were given")
        self._tensor.narrow(self._dim, start, end - start).copy_(new)
        self.length = end
        return self._tensor.narrow(self._dim, 0, end)

    def cut(self, length: int) -> torch.Tensor | None:
        """Keep the first `length` positions, or all where there are fewer -> a view of them; None before the first
        append."""
        if self._tensor is None:
            return None
        self.length = min(self.length, length)
        return self._tensor.narrow(self._dim, 0, self.length)

    def copied(self, length: int) -> torch.Tensor | None:
        """A copy in host memory of the first `length` positions; None before the first append."""
        if self._tensor is None:
            return None
        return on_host(self._tensor.narrow(self._dim, 0, min(self.length, length)))

    def put(self, copy: torch.Tensor | None, length: int | None = None) -> torch.Tensor | None:
        """Replace the content by a copy, or by its first `length` positions; returns a view of them."""
        self.length = 0
        if copy is None:
            return self.cut(0)
        whole = copy.shape[self._dim]
        kept = copy.narrow(self._dim, 0, whole if length is None else min(length, whole))
        assert self._device is not None, "a copy is put back where it was taken from"
        return self.append(kept.to(self._device))

    def filled(self, length: int) -> torch.Tensor:
        """The caller has filled the first `length` positions, or all where there are fewer -> a view of them."""
        assert self._tensor is not None
        self.length = min(length, self._capacity)
        return self._tensor.narrow(self._dim, 0, self.length)

    def keep_last(self, full: torch.Tensor, most: int) -> torch.Tensor:
        """Replace the content by the last positions of `full`, at most so many; returns a view of them."""
        self.length = 0
        kept = min(self._capacity, most, full.shape[self._dim])
        return self.append(full.narrow(self._dim, full.shape[self._dim] - kept, kept))

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = list(like.shape)
        shape[self._dim] = self._capacity
        # on a GPU attention may pass over what is not filled yet, masked: it must be numbers
        tensor = like.new_zeros(shape) if like.is_cuda else like.new_empty(shape)
        self._device = tensor.device
        self.bytes = tensor.numel() * tensor.itemsize
        self._allocated.bytes += self.bytes
        return tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, contiguous and of its own."""
    return tensor.detach().to("cpu", copy=True).contiguous()
