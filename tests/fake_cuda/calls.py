"""What a call of torch is given: tensors and devices, and whether its result's shape depends on their numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

CPU = torch.device("cpu")
MIXED = frozenset(
    "copy_ __getitem__ __setitem__ index_put_ set_ __get__ is_same_size _has_compatible_shallow_copy_type".split()
)


def on_host(
    name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], str | None]:
    """The arguments with the CPU in place of the GPU, and the kind of device that they name."""
    asked: str | None = None

    def host(value: Any) -> Any:
        nonlocal asked
        if isinstance(value, str):
            value = torch.device(value)
        asked = value.type
        return CPU if asked == "cuda" else value

    if kwargs.get("device") is not None:
        kwargs["device"] = host(kwargs["device"])
    named = name == "to"
    args = tuple(
        host(value) if isinstance(value, torch.device) or (named and i == 1 and isinstance(value, str)) else value
        for i, value in enumerate(args)
    )
    return args, kwargs, asked


def needs_numbers(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the shape of a call's result depends on numbers that are on the device."""
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        by = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        return isinstance(by, torch.Tensor) and kwargs.get("output_size") is None
    if name == "__getitem__":
        return any(one.dtype in (torch.bool, torch.uint8) or one.dim() == 0 for one in tensors_of(args[1:]))
    if name == "__setitem__":  # a number for all that a mask marks is a `masked_fill_`
        given = isinstance(args[2], torch.Tensor) and args[2].dim() > 0
        return given and any(one.dtype in (torch.bool, torch.uint8) for one in tensors_of(args[1:2]))
    return False


def sends(args: Sequence[Any]) -> bool:
    """Whether indices are numbers of the host, in a list or a tensor there."""
    at = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(one, list) for one in at)


def check_devices(name: str, given: Iterable[torch.Tensor], ours: int) -> None:
    """Raises RuntimeError for a product of tensors on two devices."""
    if name not in MIXED and ours < sum(tensor.dim() > 0 and not tensor.is_meta for tensor in given):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu in {name}")


def tensors_of(values: Iterable[Any], depth: int = 2) -> list[torch.Tensor]:
    """The tensors among values, and in the lists and tuples among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif depth and isinstance(value, (list, tuple)):
            found += tensors_of(value, depth - 1)
    return found


def key_of(tensor: torch.Tensor) -> int | None:
    """What names a tensor's storage; None where it has none, as inside vmap."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None
    return key


def address_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
