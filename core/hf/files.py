"""Checks that a model directory is complete and valid, from names, sizes and headers, before any load.

Only safetensors is read; nothing is ever unpickled and no code of a model is run.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ModelError, NotImported
from core.hf.bounds import wrong
from core.hf.quantization import quantization
from core.hf.safetensors_file import read_header
from core.system.command import COMMAND
from core.system.paths import expanded
from core.system.reading import CONFIG_BYTES, INDEX_BYTES, is_file_name, open_regular, read_json

EDGE = 64 << 10  # bytes hashed at each end of a file
INDEX = "model.safetensors.index.json"
SMALL_JSON = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
LIMITED = {
    "tokenizer.json": INDEX_BYTES,
    "tokenizer.model": INDEX_BYTES,
    "vocab.json": INDEX_BYTES,
    "merges.txt": INDEX_BYTES,
    "chat_template.jinja": CONFIG_BYTES,
    "chat_template.json": CONFIG_BYTES,
}
"""Files that are only measured, not parsed, here: their libraries have limits of their own."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked model directory: its unmodified config.json, and its weight files in order."""

    path: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]


ModelPath = str | os.PathLike[str] | ModelFiles
"""A model directory, or one that was checked already."""
DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
KINDS = ("*.json", "*.safetensors", "*.bin", "*.gguf")  # files of a model that decide what it is


def model_path(name: str) -> Path:
    """ "demo" is the bundled model; anything else is a directory, or a GGUF file."""
    return DEMO if name == "demo" else expanded(name)


def stamp(path: Path) -> tuple[int, ...]:
    """A value that changes when a file of the model does."""
    stats: list[int] = []
    for file in [path] if path.is_file() else [file for pattern in KINDS for file in sorted(path.glob(pattern))]:
        try:
            found = file.stat()
            stats += found.st_mtime_ns, found.st_size
        except OSError:  # such as a broken link: reported when the file is read
            stats.append(0)
    return tuple(stats)


def check_model(path: ModelPath) -> ModelFiles:
    """Check a directory that is to be run without import. Raises ModelError with the problem, also for a quantized
    checkpoint, which must be imported first. Reads no weights."""
    if isinstance(path, ModelFiles):
        return path
    files = check_files(Path(path))
    if kind := quantization(files.path, files.config):
        raise NotImported(
            f"The checkpoint in {files.path} is quantized ({kind}), so it is imported once before it is "
            f"used: {COMMAND} import {files.path}."
        )
    return files


def check_files(root: Path) -> ModelFiles:
    """Check a model directory of any kind, quantized ones included. Raises ModelError; reads no weights."""
    try:
        if not root.exists():
            raise ModelError(f"There is no model at {root}. Give a directory that holds config.json and *.safetensors.")
        if not root.is_dir():
            where = "Give the directory that holds config.json and *.safetensors."
            if root.suffix == ".gguf":
                raise NotImported(f"{root} is a file. {where} A GGUF file is imported: {COMMAND} import {root}.")
            raise ModelError(f"{root} is a file. {where}")
        config = _config(root)
        _check_small_json(root)
        return ModelFiles(root, config, _weight_files(root))
    except OSError as error:
        raise ModelError(
            f"{root} cannot be read: {error.strerror or error}. Check the disk and your permissions."
        ) from None


def _config(root: Path) -> dict[str, Any]:
    file = root / "config.json"
    if not os.path.lexists(file):
        text = f"{root} has no config.json, so it is not a model directory. Give the directory that holds config.json "
        if any(root.glob("*.gguf")):
            raise NotImported(f"{text}and *.safetensors. GGUF files are imported: {COMMAND} import {root}.")
        raise ModelError(f"{text}and *.safetensors.")
    config = read_json(file, nonfinite=True)  # some models have Infinity as a limit
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ModelError(f"{file} names no model_type. Download it again.")
    if why := wrong(config):
        raise ModelError(f"{file} cannot be used: {why}. Download it again.")
    return config


def _check_small_json(root: Path) -> None:
    """Raises ModelError for a file of SMALL_JSON that transformers would read without a size limit."""
    for name in SMALL_JSON:
        file = root / name
        if os.path.lexists(file):
            found = read_json(file, nonfinite=True)
            if not isinstance(found, dict):
                raise ModelError(f"{file} is damaged: it holds no object. Download it again.")
            if type(found.get("model_max_length", 0)) not in (int, float, type(None)):
                raise ModelError(
                    f"{file} is damaged: its model_max_length is {found['model_max_length']!r:.60}, not a "
                    "number. Download it again."
                )
            for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
                ids = found.get(key)
                if not all(i is None or type(i) is int for i in (ids if isinstance(ids, list) else [ids])):
                    raise ModelError(
                        f"{file} is damaged: its {key} is {ids!r:.60}, which is no token. Download it again."
                    )
    for name, limit in LIMITED.items():
        if os.path.lexists(root / name):
            with open_regular(root / name) as handle:
                size = os.fstat(handle.fileno()).st_size
            if size > limit:
                raise ModelError(
                    f"{root / name} is {size:,} bytes large, and such a file has {limit:,} at most. Download it again."
                )


def _weight_files(root: Path) -> tuple[Path, ...]:
    """The files transformers would read: model.safetensors, or else the shards its index names. Checks that their
    headers are valid and that each tensor is in exactly the file that the index names."""
    single, index = root / "model.safetensors", root / INDEX
    if os.path.lexists(single):
        read_header(single)
        return (single,)
    if os.path.lexists(index):
        return _shards(root, _weight_map(index))
    if any(root.glob("*.bin")) or any(root.glob("*.pt")) or any(root.glob("*.pth")):
        raise ModelError(
            f"{root} has its weights only as Python pickles (*.bin), which can run code when opened and "
            "are never read here. Use the model's safetensors version, or convert it."
        )
    raise ModelError(
        f"{root} has no weights: neither model.safetensors nor model.safetensors.index.json. Download them."
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file name, from the index. Raises ModelError, also for files outside its directory."""
    found = read_json(index, INDEX_BYTES)
    found = found if isinstance(found, dict) else {}
    named = found.get("weight_map")
    if (
        not isinstance(named, dict)
        or not named
        or not isinstance(found.get("metadata", {}), dict)
        or not all(isinstance(name, str) for name in named.values())
    ):
        raise ModelError(f"{index} is damaged: it has no weight_map from tensors to files. Download it again.")
    for name in set(named.values()):
        if not is_file_name(name) or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index} names {name[:200]!r}, which is not a safetensors file in its folder. Download the "
                "model again, from a source that you trust."
            )
    return named


def _shards(root: Path, named: dict[str, str]) -> tuple[Path, ...]:
    names = sorted(set(named.values()))
    missing = [n for n in names if not os.path.exists(root / n)]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(names)} weight files are missing from {root}: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}. Download them."
        )
    place: dict[str, str] = {}
    for name in names:
        for tensor in read_header(root / name)[0]:
            if place.setdefault(tensor, name) != name:
                raise ModelError(
                    f"The tensor {tensor!r} is in {root / place[tensor]} and in {name}. Download the model again."
                )
    for tensor, name in named.items():
        if (found := place.get(tensor, name)) != name:  # a tensor in no file is reported by its reader
            raise ModelError(
                f"{root / INDEX} is damaged, or not of these files: it says that {tensor!r} is in "
                f"{name}, but it is in {found}. Download the model again."
            )
    return tuple(root / n for n in names)


def content_hash(files: ModelFiles) -> str:
    """A fast identity of a model: sha256 over config.json, and of each weight file its size, header and 64 KiB at each
    end. It distinguishes models and versions; it does not detect every changed byte."""
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
