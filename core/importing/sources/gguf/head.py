"""The head of a GGUF model that predicts further tokens: of DeepSeek-V3's kind, as `core.hf.head` has it."""

from collections.abc import Mapping
from dataclasses import replace

from core.errors import ModelError
from core.importing.sources.gguf.layout import STORED, Names, recipes
from core.importing.sources.gguf.tensors import TensorRecipe
from core.system.gguf import TensorInfo

NEXTN = {f"nextn.{name.replace('.', '_')}": name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")}
"""Of a head that predicts further tokens, in the layer after the last one: what it has beside a layer's weights."""
NEXTN_COPIES = frozenset({"nextn.embed_tokens", "nextn.shared_head_head"})  # of the model's own, which are used


def head_recipes(entries: Mapping[str, TensorInfo], names: Names, layer: int) -> dict[str, TensorRecipe]:
    """The same for a head that predicts further tokens, which is stored as this layer; empty where a part of it is
    missing, or something is not known."""
    own = {
        stored: entry
        for stored, entry in entries.items()
        if (at := STORED.fullmatch(stored)) and int(at["layer"]) == layer and at["name"] not in NEXTN_COPIES
    }
    if any(f"blk.{layer}.{part}.weight" not in own for part in NEXTN):
        return {}
    try:
        return recipes(own, replace(names, layers={**names.layers, **NEXTN}), layer + 1, layer)
    except (ModelError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError):  # it is left out
        return {}
