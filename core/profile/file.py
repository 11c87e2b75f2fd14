"""Arrays and their metadata in one safetensors file: a JSON text in its head, and a checksum of both."""

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from core.errors import ProfileError
from core.system.reading import parse_json, require_regular

SUM = "moestro.checksum"  # in the file's head, beside the JSON text
Arrays = dict[str, npt.NDArray[Any]]
DAMAGED = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
"""What reading a damaged file may raise, and what making sense of it."""


def write(path: Path, key: str, content: Mapping[str, Any], arrays: Arrays, version: int) -> None:
    """Writes the file atomically. Raises OSError or SafetensorError, keeping the old file."""
    from safetensors.numpy import save_file

    text = json.dumps({**content, "version": version})
    fresh = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        os.close(os.open(fresh, os.O_CREAT | os.O_WRONLY, 0o600))  # private: it reflects the user's texts
        save_file(arrays, fresh, {key: text, SUM: checksum(text, arrays)})
        with fresh.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except (OSError, SafetensorError):
        with contextlib.suppress(OSError):  # the folder may be read-only
            fresh.unlink(missing_ok=True)
        raise


def read(path: Path, key: str, version: int) -> tuple[dict[str, Any], Arrays]:
    """Returns the metadata and the arrays. Raises ProfileError for a file of a later version, or one of DAMAGED."""
    require_regular(path, error=ProfileError)
    with safe_open(path, framework="numpy") as file:
        about = file.metadata() or {}
        content: dict[str, Any] = parse_json(about[key], nonfinite=True)
        if type(content["version"]) is not int:
            raise ValueError("it does not say which version it is")
        if content["version"] > version:
            raise ProfileError(f"{path} was written by a later version of Moestro. Update Moestro, or calibrate again.")
        arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
    if checksum(about[key], arrays) != about[SUM]:
        raise ValueError("its checksum does not match")
    return content, arrays


def error_text(error: Exception) -> str:
    """Describes one of DAMAGED as what is wrong with the file."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    return str(error) if isinstance(error, ValueError | SafetensorError) else "it does not say what a profile says"


def checksum(text: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Checksum of the JSON text, and of the arrays with their names in order."""
    value = zlib.crc32(text.encode())
    for name in sorted(arrays):
        value = zlib.crc32(name.encode(), value)
        if arrays[name].size:
            value = zlib.crc32(arrays[name].data.cast("B"), value)
    return f"{value:08x}"
