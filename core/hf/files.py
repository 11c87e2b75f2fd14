"""A model directory on disk: is everything there and whole? Checked from names, sizes and headers, before any load.

Expert bytes are read with positioned reads into fresh buffers, never through a memory map, whose touched pages would
count as this process's memory. Only safetensors is read; nothing is ever unpickled and no code of a model is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.composite import text_config
from core.errors import ModelError
from core.memory.codec.coded import Coded

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
QUANTIZATION = ("quantization_config", "compression_config")  # the second: what older compressed-tensors wrote
EDGE = 64 << 10  # bytes hashed at each end of a file


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked model directory: its config.json as it is, and the weight files that belong to it, in order."""

    path: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]


ModelPath = str | os.PathLike[str] | ModelFiles
"""A model directory, or one that was checked already."""


class Stored(NamedTuple):
    """Where one tensor lies in a safetensors file; `offset` in bytes from the start of the file."""

    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    bytes: int


def check_model(path: ModelPath) -> ModelFiles:
    """Check a directory that is to be run as it is, and say what is wrong with it. Raises ModelError, for a quantized
    checkpoint too: that is imported first. Reads no weights."""
    if isinstance(path, ModelFiles):
        return path
    files = check_files(Path(path))
    if kind := quantization(files.config):
        raise ModelError(f"The checkpoint in {files.path} is quantized ({kind}), so it is imported once before it is "
                         f"used: python launch.py import {files.path}, or Import in the Model tab.")
    return files


def check_files(root: Path) -> ModelFiles:
    """Check a model directory of any kind, quantized ones included. Raises ModelError; reads no weights."""
    if not root.exists():
        raise ModelError(f"There is no model at {root}. Give a directory that holds config.json and *.safetensors.")
    if not root.is_dir():
        hint = f" A GGUF file is imported: python launch.py import {root}." if root.suffix == ".gguf" else ""
        raise ModelError(f"{root} is a file. Give the directory that holds config.json and *.safetensors.{hint}")
    config = _config(root)
    weights = _weight_files(root)
    for file in weights:
        read_header(file)
    return ModelFiles(root, config, weights)


def quantization(config: dict[str, Any]) -> str:
    """How config.json says that the weights are quantized; empty when they are not."""
    found = quantization_settings(config)
    return str((found or {}).get("quant_method") or "an unnamed method") if found is not None else ""


def quantization_settings(config: dict[str, Any]) -> dict[str, Any] | None:
    """What config.json says of quantization, there or for its text model; None when it says nothing."""
    for owner in (config, text_config(config)):
        for name in QUANTIZATION:
            if found := owner.get(name):
                return dict(found) if isinstance(found, dict) else {"quant_method": str(found)}
    return None


def _config(root: Path) -> dict[str, Any]:
    file = root / "config.json"
    if not file.is_file():
        hint = f" GGUF files are imported: python launch.py import {root}." if any(root.glob("*.gguf")) else ""
        raise ModelError(f"{root} has no config.json, so it is not a model directory. Give the directory that holds "
                         f"config.json and *.safetensors.{hint}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read ({error}). Download it again.") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ModelError(f"{file} names no model_type. Download it again.")
    return config


def _weight_files(root: Path) -> tuple[Path, ...]:
    """The files transformers would read: model.safetensors, or else the shards its index names."""
    single, index = root / "model.safetensors", root / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read ({error!r}). Download it again.") from None
        missing = [n for n in names if not (root / n).is_file()]
        if missing:
            raise ModelError(f"{len(missing)} of {len(names)} weight files are missing from {root}: "
                             f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}. Download them.")
        return tuple(root / n for n in names)
    if any(root.glob("*.bin")) or any(root.glob("*.pt")) or any(root.glob("*.pth")):
        raise ModelError(f"{root} has its weights only as Python pickles (*.bin), which can run code when opened and "
                         "are never read here. Use the model's safetensors version, or convert it.")
    raise ModelError(f"{root} has no weights: neither model.safetensors nor model.safetensors.index.json. "
                     "Download them.")


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header and where the data starts, in bytes. Raises ModelError when the file is cut short."""
    size = file.stat().st_size
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(size - 8, 100 << 20):
                raise ValueError("its header is cut short")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{file} is damaged: {error}. Download it again.") from None
    if size != 8 + length + end:
        raise ModelError(f"{file} is damaged: it has {size:,} bytes, its header says {8 + length + end:,}. "
                         "Download it again.")
    return header, 8 + length


class TensorFiles:
    """Open safetensors files. `read` may be called from any thread; `close` releases the files (and is idempotent)."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.tensors: dict[str, Stored] = {}
        for number, file in enumerate(files):
            header, start = read_header(file)
            for name, entry in header.items():
                if entry["dtype"] not in DTYPES:
                    raise ModelError(f"{file} holds numbers of type {entry['dtype']}, which Moestro cannot read.")
                dtype, (begin, end), shape = DTYPES[entry["dtype"]], entry["data_offsets"], tuple(entry["shape"])
                if end - begin != torch.Size(shape).numel() * dtype.itemsize:
                    raise ModelError(f"{file} is damaged: {name!r} of shape {shape} has {end - begin:,} bytes. "
                                     "Download it again.")
                self.tensors[name] = Stored(number, dtype, shape, start + begin, end - begin)
        self._handles = [file.open("rb", buffering=0) for file in files]
        self._locks = [threading.Lock() for _ in files]

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """A whole tensor, or `row` of its first dimension as [1, ...]: a new CPU tensor in the file's dtype."""
        at = self.tensors[name]
        shape, offset, count = at.shape, at.offset, at.bytes
        if row is not None:
            count //= shape[0]
            shape, offset = (1, *shape[1:]), offset + row * count
        raw = torch.empty(count, dtype=torch.uint8)
        buffer, done = memoryview(raw.numpy().data), 0
        with self._locks[at.file]:
            handle = self._handles[at.file]
            handle.seek(offset)
            while done < count:
                got = handle.readinto(buffer[done:])
                if not got:
                    raise ModelError(f"{handle.name} became shorter while it was read. Download it again.")
                done += got
        return raw.view(at.dtype).view(shape)

    def coded(self, name: str, row: int | None = None) -> Coded | None:
        """None: these are plain numbers."""
        return None

    def close(self) -> None:
        for handle in self._handles:
            handle.close()


def content_hash(files: ModelFiles) -> str:
    """A fast identity of a model: sha256 over config.json, and of each weight file its size, header and 64 KiB at each
    end. It tells models and versions apart; it does not prove that no byte in between was changed."""
    digest = hashlib.sha256((files.path / "config.json").read_bytes())
    for file in files.weights:
        size = file.stat().st_size
        _, start = read_header(file)
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(start + EDGE))
            handle.seek(max(0, size - EDGE))
            digest.update(handle.read())
    return digest.hexdigest()
