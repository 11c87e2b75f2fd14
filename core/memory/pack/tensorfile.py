"""Write a safetensors file tensor by tensor: only one tensor at a time is in memory."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from core.errors import ModelError
from core.memory.pack.manifest_json import PackFile
from core.memory.pack.sync import sync_file, write_all

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The file's header: its length, then JSON, padded so that the data starts at a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    file: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
    wrote: Callable[[int], object],
) -> PackFile:
    """Write what `read(name)` returns for every name, widest dtypes first, as safetensors itself does.

    `wrote(bytes)` is called after each. The bytes are on the disk when it returns. Raises OSError, and ModelError when
    a tensor does not match its declared dtype and shape.
    """
    order = dict(sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])))
    head = header(order, metadata)
    digest, size = hashlib.sha256(head), len(head)
    with file.open("wb", buffering=0) as handle:
        handle.write(head)
        for name, (dtype, shape) in order.items():
            tensor = read(name)
            if tuple(tensor.shape) != shape:
                raise ModelError(
                    f"The tensor {name!r} has the shape {tuple(tensor.shape)}, its file says {shape}. "
                    "Download the model again."
                )
            raw = tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(raw)
            write_all(handle, raw)
            size += len(raw)
            wrote(len(raw))
        sync_file(handle.fileno())
    return PackFile(size, digest.hexdigest(), hashlib.sha256(head).hexdigest())
