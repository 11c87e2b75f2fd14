"""Plans an import from headers alone: which tensors, which format, how many bytes."""

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from core.errors import ModelError, MoestroError
from core.hf.checkpoint import CheckpointReader
from core.hf.discover import ExpertsSite
from core.hf.head import attach, layer_of_head, objection, remove
from core.hf.skeleton import meta_skeleton
from core.importing.sources import Source, open_source
from core.importing.sources.codings import by_layer
from core.importing.sources.decoded import Decoded
from core.memory.codec import Codec, make_codec
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.formats import FORMATS, Numbers, format_of, numbers_of
from core.memory.codec.layers import LayerCodecs
from core.memory.codec.segments import ExpertParts, Segments
from core.memory.pack import pack_at
from core.memory.pack.kind import Kind
from core.memory.pack.manifest import identity_of
from core.memory.pages import page_up
from core.system.text_config import text_config

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ImportPlan:
    """A checked import: everything known before a weight is read."""

    source: Source
    name: str  # display name of the model
    reader: CheckpointReader
    site: ExpertsSite  # any site: all have the same experts
    codecs: LayerCodecs  # of all MoE layers
    numbers: Numbers
    blocks: int  # that experts are stored in
    dense: dict[str, tuple[torch.dtype, tuple[int, ...]]]  # checkpoint tensors outside the experts
    shell: Path  # directory of the config and tokenizer
    hash: str
    head: str | None  # why the checkpoint's head is left out; "" = it is not, None = there is none
    head_layer: str  # what the names of its modules begin with

    @property
    def layers(self) -> int:
        """MoE layers, with that of a head."""
        return len(self.reader.sites)

    @property
    def heads(self) -> int:
        """Of these, the ones of a head."""
        return int(self.head == "" and self.reader.sites[-1].name.startswith(self.head_layer))

    @cached_property
    def kinds(self) -> Mapping[Codec, Kind]:
        """How the pack has the experts of each codec."""
        return {codec: self._kind(codec) for codec in self.codecs.distinct}

    def _kind(self, codec: Codec) -> Kind:
        whole = Kind(codec.name, codec.blob_layout, (), page_up(codec.blob_bytes))
        if (cutter := whole.cut(self.parts, self.blocks)) is None:
            return whole
        return replace(whole, segments=cutter.segments, padded_bytes=page_up(cutter.bytes))

    @cached_property
    def cutters(self) -> Mapping[Codec, Segments | None]:
        """What cuts those into their segments."""
        return {codec: kind.cutter(self.parts) for codec, kind in self.kinds.items()}

    @property
    def parts(self) -> ExpertParts:
        """How the model lays out an expert."""
        site = self.site
        return ExpertParts(site.parts, site.is_transposed, site.has_gate, site.is_concatenated)

    def padded_bytes(self, layer: int) -> int:
        """Bytes of one expert of a layer in the pack."""
        return self.kinds[self.codecs[layer]].padded_bytes

    @property
    def formats(self) -> tuple[str, ...]:
        """The name of each layer's formats."""
        return tuple(codec.name for codec in self.codecs)

    @property
    def dense_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.dense.values())

    @property
    def bytes(self) -> int:
        """Bytes that will be written, except config, tokenizer and manifest."""
        return self.dense_bytes + self.site.num_experts * sum(map(self.padded_bytes, range(self.layers)))

    def identity(self, moestro: str) -> dict[str, Any]:
        """Distinguishes this import from others."""
        segments = self.kinds[self.codecs[0]].segments
        top = segments[0].stop if segments else 0
        return identity_of(self.hash, self.formats, self.numbers, top, moestro, self.heads)

    @property
    def facts(self) -> dict[str, str]:
        """The manifest's description of the source."""
        notes = getattr(self.source, "notes", ()) if self.formats == self.source.formats else ()
        return {
            "kind": self.source.kind,
            "label": self.source.label,
            "name": self.name,
            "hash": self.hash,
            **({"stored": " / ".join(notes)} if notes else {}),
        }

    def read(self, layer: int, expert: int) -> dict[str, QuantizedTensor | torch.Tensor]:
        """One expert's parts, as codes where one of our formats holds them. Raises ModelError."""
        try:
            return self.reader.read_coded(layer, expert)
        except OSError as error:
            raise ModelError(f"{self.source.path} cannot be read: {error.strerror or error}. Check the disk.") from None

    def encode(self, layer: int, expert: int) -> tuple[torch.Tensor, dict[str, str]]:
        """One expert's bytes as stored in the pack (uint8), and how each part's numbers were derived."""
        parts = self.read(layer, expert)
        blob, cutter = self.codecs[layer].encode(parts), self.cutters[self.codecs[layer]]
        return (
            cutter.cut(blob) if cutter else blob,
            {name: self.origin(layer, name, part) for name, part in parts.items()},
        )

    def origin(self, layer: int, name: str, part: torch.Tensor | QuantizedTensor) -> str:
        """How the numbers of a part of a layer's experts were derived for the pack, in words."""
        codec, is_weight = self.codecs[layer], self.site.parts[name].is_weight
        plain = not is_weight or codec.formats[name].is_plain
        numbers = codec.numbers_in(name) if is_weight else self.numbers
        if isinstance(part, QuantizedTensor):
            oriented = part.turned() if self.site.is_transposed else part
            held = None if plain else oriented.held_in(codec.formats[name].name)
            if held is None:
                return f"{'dequantised' if plain else 'requantised'} from {part.format}"
            zero = numbers.zero if held.zero is None else held.zero.dtype
            kept = (held.scale.dtype, zero) == (numbers.scale, numbers.zero)
            return "exact codes" if kept else f"exact codes, their scales cast to {str(numbers.scale)[6:]}"
        if is_weight and self.source.holds_codes(self.reader.names_of(layer, 0, name)[0]):
            return f"{'dequantised' if plain else 'requantised'} from {self.source.label}"
        stored = str(part.dtype).removeprefix("torch.")
        if not plain:
            return f"quantised from {stored}"
        return "as stored" if part.dtype == numbers.weight else f"cast from {stored}"


@contextmanager
def open_job(path: Path, name: str, format: str, blocks: int, head: bool = True) -> Iterator[ImportPlan]:
    """Open a source and plan its import, with its head if that is of a known kind and wanted. Raises ModelError or
    SettingError, before anything is written."""
    if pack_at(path):
        raise ModelError(f"{path} is an expert pack already. Load it as it is.")
    if format != "auto":
        format_of(format)
    folder = ""
    try:
        with tempfile.TemporaryDirectory(prefix="moestro-") as folder, open_source(path) as source:
            yield _plan(source, name, format, blocks, Path(folder), head)
    except MoestroError as error:
        if (text := for_people(str(error), folder, path)) != str(error):
            raise type(error)(text) from error
        raise
    except OSError as error:  # from reading headers, or from the temporary directory
        raise ModelError(
            for_people(f"{path} cannot be imported: {error}. Check the disk and your permissions.", folder, path)
        ) from error


def refusal(path: Path) -> str:
    """Why an import of this source is refused before it begins; "" if it is not."""
    try:
        with open_job(path, path.name, "auto", 1):
            return ""
    except MoestroError as error:
        return str(error)


def for_people(text: str, folder: str, path: Path) -> str:
    """An error's text with the user's own path in place of the temporary `folder`, into which config and tokenizer were
    copied from a directory, or written from a single file."""
    if not folder:
        return text
    for name in {folder, os.path.realpath(folder)}:
        if path.is_dir():
            text = text.replace(name, str(path))
        else:
            text = re.sub(re.escape(name) + r"([\\/][\w.-]*\w)?", lambda found: str(path), text)
    return text


def _plan(source: Source, name: str, format: str, blocks: int, shell: Path, wanted: bool) -> ImportPlan:
    meta = meta_skeleton(source.write_shell(shell))
    config = text_config(meta.config)
    head = objection(config, source.tensors.tensors) if wanted else None
    layer = layer_of_head(config)
    reader, head = _with_head(meta, source, layer) if head == "" else (None, head)
    reader = CheckpointReader(meta, source.tensors) if reader is None else reader
    unused = [name for name in reader.unused if not name.startswith(layer)]
    if source.kind == "gguf" and unused:  # each of its tensors has its place, or was left out on purpose
        raise ModelError(
            f"This GGUF model has {len(unused)} tensors that transformers' model of its kind does not have "
            f"({', '.join(unused[:4])}{' ...' if len(unused) > 4 else ''}), so it would not be computed "
            "as it is meant. Import the model's safetensors version instead."
        )
    site, (formats, numbers) = reader.sites[0], formats_for(source, format, reader)
    if len({*formats}) == 1 and formats[0] in FORMATS:
        numbers = numbers_of(format_of(formats[0]), source.dense_dtype, numbers)
    numbers = numbers or Numbers(*[source.dense_dtype] * 3)
    codecs = {
        name: make_codec(
            name,
            specs=site.parts,
            dtype=source.dense_dtype,
            device=CPU,
            is_transposed=site.is_transposed,
            stored=numbers,
        )
        for name in dict.fromkeys(formats)
    }
    every = LayerCodecs([codecs[name] for name in formats], site.num_experts)
    stated = source.tensors.tensors
    plan = ImportPlan(
        source,
        name,
        reader,
        site,
        every,
        numbers,
        blocks,
        {n: (stated[n].dtype, tuple(stated[n].shape)) for n in reader.dense_names()},
        shell,
        source.hash(),
        head,
        layer,
    )
    assert plan.kinds  # raises SettingError where experts cannot be cut into as many blocks
    return plan


def _with_head(meta: Any, source: Source, layer: str) -> tuple[CheckpointReader | None, str]:
    """A model with its head, which is this layer, and "". Where there is no way to read that: none, and why."""
    try:
        attach(meta)
    except ModelError as error:
        return None, str(error)
    try:
        reader = CheckpointReader(meta, source.tensors, keep_open=True)
        if not reader.lacking(layer):
            return reader, ""
    except ModelError:  # of the model's own weights it comes again
        pass
    remove(meta)
    return None, "some of its weights are missing, or are stored in a way that is not known"


def formats_for(source: Source, format: str, reader: CheckpointReader) -> tuple[tuple[str, ...], Numbers | None]:
    """The name of each layer's formats, and number types that lose nothing of codes that they hold. "auto": what holds
    the source's codes, each matrix's in a format of its own where they differ."""
    layers = len(reader.sites)
    if format == "auto" and source.formats:
        return source.formats[:layers], source.numbers
    if format == "auto" and source.exact_format is None:
        assert isinstance(source.tensors, Decoded)
        return by_layer(source.tensors, reader, source.dense_dtype)
    chosen = source.exact_format if format == "auto" else format
    assert chosen is not None
    return (chosen,) * layers, source.numbers if chosen == source.exact_format else None


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system of a directory that may not exist yet."""
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
