"""Finds and checks one model's GGUF files, and reads them by position into fresh buffers."""

import threading
from pathlib import Path

import torch

from core.errors import ModelError
from core.system.gguf import Header, TensorInfo, damaged, read_header
from core.system.gguf_parts import missing, part_of, parts_in


def find_files(path: Path) -> tuple[Path, ...]:
    """The files of the model at `path`, in order: a .gguf file, any part of a split one, or a directory with one model.
    Raises ModelError when parts are missing, or when a directory is ambiguous."""
    if path.is_dir():
        return find_files(_only_model(path))
    if not path.is_file():
        raise ModelError(f"There is no file {path}. Give a .gguf file, or a directory that holds one.")
    part = part_of(path.name)
    if part is None:
        return (path,)
    there = parts_in(path.parent).get((part.stem, part.total), frozenset())
    if len(there) < part.total or not there:
        absent = missing(part, there, 3)
        raise ModelError(
            f"{part.total - len(there)} of the {part.total} parts of {path.name} are missing from {path.parent}: "
            f"{', '.join(absent)}{' ...' if part.total - len(there) > 3 else ''}. Download them."
        )
    return tuple(path.with_name(part.name(number)) for number in sorted(there))


def _only_model(directory: Path) -> Path:
    """The single model of a directory: a file, or the first part of a split one. Vision parts (mmproj) do not count."""
    models: dict[str, Path] = {}
    for file in sorted(directory.glob("*.gguf")):
        if not file.name.lower().startswith("mmproj"):
            part = part_of(file.name)
            models.setdefault(part.stem if part else file.name, file)
    if not models:
        raise ModelError(f"{directory} holds no .gguf file. Give a .gguf file, or a directory that holds one.")
    if len(models) > 1:
        names = [file.name for file in models.values()]
        raise ModelError(
            f"{directory} holds {len(names)} GGUF models ({', '.join(names[:4])}"
            f"{' ...' if len(names) > 4 else ''}). Give the file to import."
        )
    return next(iter(models.values()))


def read_headers(files: tuple[Path, ...]) -> Header:
    """The model's metadata, from the first file, and the tensors of all files. Raises ModelError."""
    tensors: dict[str, TensorInfo] = {}
    first: Header | None = None
    for number, file in enumerate(files):
        header = read_header(file, number)
        first = first or header
        if double := next((name for name in header.tensors if name in tensors), None):
            raise ModelError(
                f"{file} has the tensor {double!r}, which another part of the model has too: they are not "
                "parts of the same model. Download them again."
            )
        tensors |= header.tensors
    assert first is not None
    stated = _stated(first, "split.count", 1, files[0])
    if stated > 1 and stated != len(files):
        raise ModelError(
            f"{files[0]} is one of {stated} parts, but its name does not say which. Give the parts their "
            "names back: model-00001-of-00003.gguf and so on."
        )
    wanted = _stated(first, "split.tensors.count", len(tensors), files[0])
    if wanted != len(tensors):
        raise ModelError(
            f"{files[0]} and its other parts hold {len(tensors)} tensors instead of {wanted}: they are "
            "not parts of the same model. Download them again."
        )
    return Header(first.metadata, tensors)


def _stated(header: Header, key: str, default: int, file: Path) -> int:
    value = header.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise damaged(file, f"its {key} is {value!r:.40}")
    return value


class OpenFiles:
    """Open files. `read` may be called from any thread; `close` may be called twice."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._handles = [file.open("rb", buffering=0) for file in files]
        self._locks = [threading.Lock() for _ in files]

    def read(self, file: int, offset: int, count: int) -> torch.Tensor:
        """`count` bytes from `offset` on, as a new uint8 tensor."""
        raw = torch.empty(count, dtype=torch.uint8)
        buffer, done = memoryview(raw.numpy().data), 0
        with self._locks[file]:
            handle = self._handles[file]
            handle.seek(offset)
            while done < count:
                got = handle.readinto(buffer[done:])
                if not got:
                    raise ModelError(f"{handle.name} became shorter while it was read. Download it again.")
                done += got
        return raw

    def close(self) -> None:
        for handle in self._handles:
            handle.close()
