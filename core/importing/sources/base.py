"""Interface of a model to import, independent of its format: named tensors, a config, a tokenizer and an identity."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from core.errors import ModelError
from core.hf.files import ModelFiles, content_hash
from core.hf.tensors import Tensors
from core.importing.sources.decoded import Decoded
from core.memory.codec.formats import Numbers
from core.memory.pack.contents import CONFIG, COPIED


@dataclass
class Source:
    """A checkpoint that can be imported. This class handles model directories; other kinds override its methods.

    `tensors` has every weight under the name that transformers' checkpoints of this architecture use, dequantised.

    Experts: `CheckpointReader(meta, source.tensors)`, where `meta = meta_skeleton(source.write_shell(directory))`.
    Dense weights: `reader.dense_names()`, each stored in the number type of `tensors.tensors[name]`.
    """

    path: Path
    kind: str  # safetensors, gptq, awq, compressed-tensors, bitsandbytes, fp8, mxfp4, gguf
    label: str  # shown to the user: "GPTQ 4-bit, groups of 128"
    config: dict[str, Any]  # config.json without quantization_config
    tensors: Tensors
    exact_format: str | None  # our format that holds the codes of all experts exactly, if there is one
    numbers: Numbers | None  # number types that make it, or `formats`, lossless
    dense_dtype: torch.dtype  # of dequantised weights outside the experts
    files: ModelFiles | None = None  # of a model directory
    formats: tuple[str, ...] = ()  # by MoE layer, a head's last, what suits its matrices best, where names say it
    passed_over: Mapping[str, int] = field(default_factory=dict)  # bytes of tensors that `tensors` does not have

    @property
    def bytes(self) -> int:
        """Size of the files that hold its weights."""
        return sum(file.stat().st_size for file in (self.files.weights if self.files is not None else ()))

    def stored_as(self, name: str) -> str:
        """How a tensor is stored, for display: its number type, or the label of what holds its codes."""
        if not self.holds_codes(name):
            return str(self.tensors.tensors[name].dtype).removeprefix("torch.")
        assert isinstance(self.tensors, Decoded)
        several = len({one.bits for one in self.tensors.matrices.values()}) > 1
        return f"{self.label}: {self.tensors.matrices[name].bits} bits" if several else self.label

    def holds_codes(self, name: str) -> bool:
        """Whether a tensor is stored in codes, not in plain numbers."""
        return isinstance(self.tensors, Decoded) and name in self.tensors.matrices

    def write_shell(self, directory: Path) -> ModelFiles:
        """Write config.json into an existing directory and copy the tokenizer and generation files there, so that
        transformers' AutoConfig and AutoTokenizer work on it. Returns it as a model without weights."""
        dtype = str(self.dense_dtype).removeprefix("torch.")
        config = {k: v for k, v in self.config.items() if k != "torch_dtype"} | {"dtype": dtype}
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for pattern in COPIED:
            for file in sorted(self.path.glob(pattern)):
                if file.is_file() and file.suffix != ".py":
                    shutil.copyfile(file, directory / file.name)
        return ModelFiles(directory, config, ())

    def hash(self) -> str:
        """The checkpoint's identity: a hex digest that changes when its config or weights do."""
        if self.files is None:
            raise ModelError(f"{self.path} is not a model directory.")
        return content_hash(self.files)

    def close(self) -> None:
        """Close the files; may be called twice."""
        self.tensors.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
