"""Typed access to a GGUF model's metadata by llama.cpp's key names."""

import re
import struct
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from core.errors import ModelError
from core.importing.sources.gguf.files import OpenFiles
from core.importing.sources.gguf.keys import check
from core.importing.sources.gguf.layout import routed
from core.system.gguf import Header, TensorInfo, damaged

BEYOND = (
    "attention.sliding_window",
    "attention.scale",
    "attention.shared_kv_layers",
    "expert_weights_scale",
    "attention.temperature_scale",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "router_logit_softcapping",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
    "attention.value_scale",
    "moe_latent_size",
    "expert_group_scale",
    "experts_per_group",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "pooling_type",
)
"""Settings that change what a model computes: an architecture has those in transformers that its row names."""
NEUTRAL = {"expert_weights_scale": 1, "embedding_scale": 1, "residual_scale": 1, "logit_scale": 1}
"""The values of such settings that change nothing; otherwise 0."""
DIMENSIONS = {"_exps.weight": 3, "_exps.bias": 2, "_norm.weight": 1}
"""By how a tensor's name ends. The norm of a state (ssm_norm) has one dimension, or two where it has groups."""
BLOCK = re.compile(r"blk\.(?P<layer>\d{1,9})\.")


class ModelMetadata:
    """Metadata and tensor shapes of one model. `get` and `need` add the architecture's prefix."""

    def __init__(self, header: Header, parts: tuple[Path, ...]) -> None:
        """`parts`: the model's files. Raises ModelError that names the first when a key's value has the wrong type or
        is out of bounds."""
        self.parts, file = parts, parts[0]
        self.metadata: Mapping[str, Any] = header.metadata
        self.entries: Mapping[str, TensorInfo] = header.tensors
        self.file = file
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError(f"The GGUF file {file} names no architecture. Download it again.")
        self.architecture = name
        check(self.metadata, name, file)

    def get(self, key: str, default: Any = None) -> Any:
        """A value; floats as the decimal before rounding to 32 bits; a per-layer list of equal values gives that value.
        Raises ModelError for layers that differ."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and "sections" not in key:
            if any(v != value[0] for v in value):
                raise ModelError(
                    f"The layers of this GGUF model differ in {key}, which Moestro does not support. "
                    "Import the model's safetensors version instead."
                )
            value = value[0]
        return shortest(value) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        """A required value. Raises ModelError when it is missing."""
        value = self.get(key)
        if value is None:
            raise ModelError(
                f"This GGUF file does not say {self.architecture}.{key}. Download a newer conversion of the model."
            )
        return value

    def each(self, key: str) -> list[Any]:
        """The values of a key: none, one, or one for each layer."""
        value = self.metadata.get(f"{self.architecture}.{key}", [])
        return value if isinstance(value, list) else [value]

    def by_layer(self, key: str, default: Any = None) -> list[Any]:
        """A value for each layer."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and len(value) < self.layers:
            raise damaged(self.file, f"its {key} has {len(value)} values for {self.layers} layers")
        return value[: self.layers] if isinstance(value, list) else [value] * self.layers

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape. Raises ModelError when it is missing."""
        if name not in self.entries:
            raise ModelError(f"This GGUF model lacks {name}. Download it again.")
        return self.entries[name].shape

    @property
    def layers(self) -> int:
        """Number of decoder layers; multi-token prediction layers come after them and are not used."""
        return int(self.need("block_count")) - int(self.get("nextn_predict_layers", 0))

    @cached_property
    def moe_layers(self) -> list[int]:
        return [n for n in range(self.layers) if routed(self.entries, n)]

    @property
    def dense_lead(self) -> int:
        """Number of layers before the first with experts. Raises ModelError when a layer without
        experts follows later."""
        moe = self.moe_layers
        if moe != list(range(moe[0], self.layers)):
            raise ModelError(
                "This GGUF model has layers without experts between others, which its architecture does "
                "not have in transformers. Import the model's safetensors version instead."
            )
        return moe[0]

    def expert_size(self) -> int:
        """Inner width of one routed expert."""
        piece = routed(self.entries, self.moe_layers[0])["down"][0]
        return self.entries[piece.name].shape[-1]

    def first(self, name: str) -> str:
        """The full name of the first layer's tensor of this name; that of layer 0 where no layer has it."""
        return next((at for n in range(self.layers) if (at := f"blk.{n}.{name}") in self.entries), f"blk.0.{name}")

    def has(self, name: str) -> bool:
        """Whether any layer has a tensor of this name, such as "attn_q.bias"."""
        return any(stored.endswith(f".{name}") for stored in self.entries)

    def values(self, name: str) -> list[float]:
        """A small tensor's numbers, such as the factors of a rotary embedding. Raises ModelError unless it is a vector
        of F32."""
        entry = self.entries[name]
        if entry.type != "F32" or len(entry.shape) != 1:
            raise damaged(self.file, f"its {name} is no list of numbers")
        files = OpenFiles(self.parts)
        try:
            return files.read(entry.file, entry.offset, entry.bytes).view(torch.float32).tolist()
        finally:
            files.close()

    def check(self, handled: Collection[str]) -> None:
        """Raises ModelError for settings that cannot be converted (`handled`: those that the architecture has), and
        where settings and tensors contradict each other."""
        self._check_sizes()
        for key in BEYOND:
            if key not in handled and any(v not in (0, NEUTRAL.get(key, 0)) for v in self.each(key)):
                raise ModelError(
                    f"This GGUF model uses {key}, which its architecture does not have in transformers. "
                    "Import the model's safetensors version instead."
                )
        if self.get("attention.causal", True) is False:
            raise ModelError("This GGUF model is not a text-generating one. Choose another model.")

    def check_layers(self) -> None:
        """Raises ModelError unless every layer of the file is used, or is a multi-token prediction layer."""
        blocks = int(self.need("block_count"))
        if self.layers < 1:
            raise damaged(self.file, f"of its {blocks} layers, {blocks - self.layers} predict further tokens")
        numbers = {int(at["layer"]) for name in self.entries if (at := BLOCK.match(name))}
        ahead = {int(at["layer"]) for name in self.entries if (at := BLOCK.match(name)) and "nextn" in name}
        lost = sorted(n for n in numbers if n >= blocks or (n >= self.layers and n not in ahead))
        if lost:
            raise damaged(self.file, f"it says that it has {self.layers} layers, but holds weights of layer {lost[0]}")

    def _check_sizes(self) -> None:
        """Check that sizes in metadata agree with the tensors."""
        router = self.shape(f"blk.{self.moe_layers[0]}.ffn_gate_inp.weight")
        vocabulary, *width = self.shape("token_embd.weight")
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        for key, held in (
            ("expert_count", router[0]),
            ("embedding_length", width[0] if width else 1),
            ("vocab_size", vocabulary),
            ("expert_feed_forward_length", self.expert_size()),
        ):
            if (stated := self.get(key)) and stated != held:
                raise damaged(self.file, f"its {self.architecture}.{key} is {stated:,}, but its tensors have {held:,}")
        for name, entry in self.entries.items():
            if name.endswith(".ssm_norm.weight"):
                continue
            wanted = next((n for end, n in DIMENSIONS.items() if name.endswith(end)), len(entry.shape))
            if len(entry.shape) != wanted:
                raise damaged(self.file, f"{name!r} has {len(entry.shape)} dimensions instead of {wanted}")
        if isinstance(tokens, list) and len(tokens) > vocabulary:
            raise damaged(self.file, f"it has {len(tokens):,} tokens, but embeddings of only {vocabulary:,}")


def shortest(value: float) -> float:
    """The number with the fewest digits that equals `value` in 32 bits: 9.999999974752427e-07 becomes 1e-06."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value
