"""A GGUF model as an import source."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from core.hf.bounds import wrong
from core.hf.files import EDGE, ModelFiles
from core.importing.sources.base import Source
from core.importing.sources.gguf.architectures import architecture_of
from core.importing.sources.gguf.config_parts import special_token
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.files import OpenFiles, find_files, read_headers
from core.importing.sources.gguf.format_choice import FormatChoice, choose_format
from core.importing.sources.gguf.head import head_recipes
from core.importing.sources.gguf.layout import layer_of, recipes, without_factors
from core.importing.sources.gguf.tensors import PLAIN, GgufTensors, check_types
from core.importing.sources.gguf.tokenizer import write_tokenizer
from core.system.gguf import Header, damaged
from core.system.wording import reason

ENDS = ("eos", "eot", "eom")  # tokens that end an answer, by their names in metadata


@dataclass
class GgufSource(Source):
    """`notes`: for each kind of part, its stored types and how they are converted to `formats`."""

    header: Header = field(default_factory=lambda: Header({}, {}))
    parts: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.parts)

    def stored_as(self, name: str) -> str:
        assert isinstance(self.tensors, GgufTensors)
        return self.tensors.stored_as(name)

    def holds_codes(self, name: str) -> bool:
        return self.stored_as(name) not in PLAIN

    def write_shell(self, directory: Path) -> ModelFiles:
        dtype = str(self.dense_dtype).removeprefix("torch.")
        config = self.config | {"dtype": dtype}
        _write_json(directory / "config.json", config)
        _write_json(directory / "generation_config.json", generation_config(self.header.metadata))
        write_tokenizer(self.header.metadata, directory, self.parts[0])
        return ModelFiles(directory, config, ())

    def hash(self) -> str:
        digest = hashlib.sha256()
        starts = [
            min((e.offset for e in self.header.tensors.values() if e.file == n), default=0)
            for n in range(len(self.parts))
        ]
        for file, start in zip(self.parts, starts, strict=True):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as handle:
                digest.update(handle.read(start + EDGE))
                handle.seek(max(0, size - EDGE))
                digest.update(handle.read())
        return digest.hexdigest()


def open_gguf(path: Path) -> GgufSource:
    """Open a .gguf file, any part of a split model, or a directory with one model. Reads headers only.

    Raises ModelError for files that are damaged or incomplete, for architectures and settings that cannot be converted
    exactly, and when the package gguf is missing.
    """
    path = Path(path)
    files = find_files(path)
    header = read_headers(files)
    facts = ModelMetadata(header, files)
    try:
        architecture = architecture_of(facts)
        config, names = architecture.config(facts), architecture.names(facts)
        entries, factors = without_factors(header.tensors, names)
        made = recipes(entries, names, facts.layers)
        head = head_recipes(entries, names, facts.layers) if architecture.head else {}
        made |= head
        check_types(entries[piece.name] for recipe in made.values() for piece in recipe.pieces)
        of_head = [facts.layers] if any(recipe.is_expert for recipe in head.values()) else []
        kept = choose_format(entries, [*facts.moe_layers, *of_head])
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        # keys are valid here; tensors whose shapes contradict their names fail anywhere in the descriptions
        raise damaged(files[0], f"its tensors do not fit together ({reason(error)})") from error
    if why := wrong(config):
        raise damaged(files[0], why)
    dense, alike = _dense_dtype(header), kept.alike
    used = {piece.name for recipe in made.values() for piece in recipe.pieces}
    ahead = {name for name in entries if layer_of(name) >= facts.layers} - used
    return GgufSource(
        path=path,
        kind="gguf",
        label=label(header, kept),
        config=config,
        tensors=GgufTensors(OpenFiles(files), entries, made, dense, factors),
        exact_format=alike if kept.exact else None,
        numbers=kept.numbers if kept.exact or alike is None else None,
        dense_dtype=dense,
        header=header,
        parts=files,
        formats=kept.formats,
        notes=kept.notes,
        passed_over={name: entries[name].bytes for name in sorted(ahead)},
    )


def label(header: Header, kept: FormatChoice) -> str:
    """How the model is stored, for display: "GGUF Q4_K and Q6_K"."""
    types = [note.split(": ", 1)[1] for note in kept.notes]
    names = sorted({kind.split(":")[0].split(" (")[0] for note in types for kind in note.split("; ")})
    return f"GGUF {' and '.join(names)}"


def generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The end-of-answer and beginning-of-text token ids."""
    ends = list(dict.fromkeys(at for kind in ENDS if (at := special_token(metadata, kind)) is not None))
    config: dict[str, Any] = {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (found := special_token(metadata, key)) is not None:
            config[name] = found
    return config


def _dense_dtype(header: Header) -> torch.dtype:
    """bfloat16 where anything is quantized, because these models were trained in it; else the matrices' own."""
    types = {entry.type for entry in header.tensors.values() if len(entry.shape) > 1}
    if types - set(PLAIN) or "BF16" in types:
        return torch.bfloat16
    return torch.float16 if "F16" in types else torch.float32


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
