"""Maps a GGUF model's tensors to transformers'. Names: gguf.constants.TENSOR_NAMES of llama.cpp; the changes that its
converter made to weights (conversion/*.py) are undone here."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from core.errors import ModelError
from core.importing.sources.gguf.tensors import Merge, TensorRecipe, TensorRows
from core.system.gguf import TensorInfo

ROPE_FACTORS = frozenset(f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short"))
"""Tensors that become part of the config: divisors of the rotary embedding's frequencies."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate",
}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
ONE_SHARED = {name: target.replace("experts", "expert") for name, target in SHARED.items()} | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate"
}
CORRECTION = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
BLOCK_SPARSE = {"ffn_gate_inp": "block_sparse_moe.gate"}
STORED = re.compile(r"blk\.(?P<layer>\d{1,9})\.(?P<name>.+?)(?:\.(?P<kind>weight|bias))?")
BARE = ("_bias", "sinks", "A_log", ".D", "scale", "layer_scalar")  # how names end that transformers gives no ".weight"


def same(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """As stored."""
    return pieces[0]


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenated along the outputs."""
    return torch.cat(list(pieces), dim=-2)


def turned(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Transposed: [..., in, out]."""
    return pieces[0].transpose(-1, -2)


def woven(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Outputs interleaved from all pieces, transposed: [..., in, out]."""
    return torch.stack(list(pieces), dim=-2).flatten(-3, -2).transpose(-1, -2)


def woven_bias(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Outputs interleaved from all pieces: [..., out]."""
    return torch.stack(list(pieces), dim=-1).flatten(-2)


def as_row(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n] -> [1, n]; a 2-D tensor stays unchanged."""
    return pieces[0].view(-1, pieces[0].shape[-1])


def as_kernel(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """[channels, width], also with dimensions of 1 -> [channels, 1, width]: a depthwise convolution. A bias stays
    unchanged."""
    stored = pieces[0]
    return stored if stored.dim() == 1 else stored.reshape(-1, 1, stored.shape[-1])


def flat(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """As one dimension."""
    return pieces[0].flatten()


def less_one(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weight of a norm that multiplies by 1 + weight, of which the converter stored the sum."""
    return pieces[0] - 1


def logarithm(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """A_log of a state-space layer, of which the converter stored -exp(A_log). Close, not exact. Raises ModelError for
    what that cannot be."""
    if not pieces[0].is_meta and not bool((pieces[0] < 0).all()):
        raise ModelError("This GGUF model has states that would not decay (ssm_a). Download it again.")
    return torch.log(-pieces[0])


def heads_unpaired(heads: int) -> Merge:
    """Undo llama.cpp's row order of q and k: rotated pairs are adjacent there, transformers expects halves."""
    return lambda pieces: pieces[0].unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(pieces[0].shape)


@dataclass(frozen=True)
class ExpertLayout:
    """Where transformers stores a layer's routed experts. With `{}` for the expert's number: separate gate, up and down
    tensors. Without: stacked; gate and up in one tensor, built by `pair`, unless `up` has a name of its own; down built
    by `single`. `gate` is "" for experts without one."""

    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    pair: Merge = joined
    single: Merge = same


BY_NUMBER = ExpertLayout(
    "block_sparse_moe.experts.{}.w1.weight",
    "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)


@dataclass(frozen=True)
class Names:
    """Tensor names of one architecture, in addition to those common to all.

    `layers` extends and overrides LAYER; `outer`: tensors outside the layers; `biases`: which tensors can have one;
    `merges`: the conversion of a tensor, by its GGUF name (within its layer); `more`: further recipes of a layer, given
    its prefix; `ignored`: tensors that are no weights of transformers' model, or are used by `more`; `prefix`: what a
    layer's names begin with in transformers.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    experts: ExpertLayout = field(default_factory=ExpertLayout)
    biases: frozenset[str] = frozenset()
    merges: Mapping[str, Merge] = field(default_factory=dict)
    more: Callable[[Mapping[str, TensorInfo], str], dict[str, TensorRecipe]] = lambda entries, layer: {}
    ignored: frozenset[str] = frozenset()
    prefix: str = "model.layers."


def layer_of(stored: str) -> int:
    """The layer of a tensor; -1 for one outside the layers."""
    at = STORED.fullmatch(stored)
    return -1 if at is None else int(at["layer"])


def without_factors(
    entries: Mapping[str, TensorInfo], names: Names
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The tensors of a model, and apart from them, by the weights' names, what weights of NVFP4 are multiplied by.
    Scales of activations, which are not rounded here, are in neither."""
    kept, factors = dict(entries), dict[str, TensorInfo]()
    for stored, entry in entries.items():
        base, _, kind = stored.rpartition(".")
        weight = entries.get(f"{base}.weight")
        at = STORED.fullmatch(stored)
        if weight is None or weight.type != "NVFP4" or (at is not None and at["name"] in names.layers):
            continue
        if kind == "input_scale":
            del kept[stored]
        elif kind == "scale":
            if entry.type != "F32" or torch.Size(entry.shape).numel() not in (1, weight.shape[0]):
                raise ModelError(f"{stored} of this GGUF model does not fit its weight. Download it again.")
            factors[f"{base}.weight"] = kept.pop(stored)
    return kept, factors


def recipes(entries: Mapping[str, TensorInfo], names: Names, layers: int, first: int = 0) -> dict[str, TensorRecipe]:
    """transformers' name -> recipe, for every tensor in the layers from the `first` on, `layers` with those before it,
    and outside them.

    Raises ModelError for tensors that this architecture does not have: ignoring one would change the results.
    """
    made: dict[str, TensorRecipe] = {}
    targets = {**LAYER, **names.layers}
    for stored, entry in entries.items():
        outer, _, kind = stored.rpartition(".")
        at = STORED.fullmatch(stored)
        if at is None and outer in names.outer and (kind == "weight" or (kind == "bias" and outer in names.biases)):
            merge = names.merges.get(outer, same)
            made[f"{names.outer[outer]}.{kind}"] = TensorRecipe((TensorRows(stored),), entry.shape, merge)
        elif at is not None and int(at["layer"]) < layers and at["name"] in targets:
            if at["kind"] == "bias" and at["name"] not in names.biases:
                continue  # unknown: reported below
            target, merge = targets[at["name"]], names.merges.get(at["name"], same)
            if at["kind"] is None and not target.endswith(BARE):
                continue
            shape = tuple(merge([torch.empty(entry.shape, device="meta")]).shape)
            suffix = "" if target.endswith(BARE) else f".{at['kind']}"
            made[f"{names.prefix}{at['layer']}.{target}{suffix}"] = TensorRecipe((TensorRows(stored),), shape, merge)
    for layer in range(first, layers):
        made |= _experts(entries, names.experts, layer, f"{names.prefix}{layer}.")
        extra = names.more(entries, f"blk.{layer}.")
        made |= {f"{names.prefix}{layer}.{name}": recipe for name, recipe in extra.items()}
    _refuse_unknown(entries, made, names.ignored, layers)
    return made


def _refuse_unknown(
    entries: Mapping[str, TensorInfo], made: Mapping[str, TensorRecipe], ignored: frozenset[str], layers: int
) -> None:
    used = {piece.name for recipe in made.values() for piece in recipe.pieces}
    unknown: list[str] = []
    for stored in entries:
        at = STORED.fullmatch(stored)
        known = stored in used or stored in ignored or stored in ROPE_FACTORS
        if at is not None:
            known = known or int(at["layer"]) >= layers or at["name"] in ignored
        if not known:
            unknown.append(stored)
    if unknown:
        raise ModelError(
            f"This GGUF model has {len(unknown)} tensors that Moestro does not know "
            f"({', '.join(unknown[:4])}{' ...' if len(unknown) > 4 else ''}), so it would not be computed "
            "as it is meant. Import the model's safetensors version instead."
        )


def routed(entries: Mapping[str, TensorInfo], layer: int) -> dict[str, list[TensorRows]]:
    """Storage of one layer's routed experts: "gate", "up", "down" -> one stacked piece, or one per expert. Without
    "gate" where stacked experts have none; empty for a layer without experts."""
    prefix = f"blk.{layer}.ffn_"
    if f"{prefix}down_exps.weight" in entries:
        pieces = {part: [TensorRows(f"{prefix}{part}_exps.weight")] for part in ("gate", "up", "down")}
        both = entries.get(f"{prefix}gate_up_exps.weight")
        if both is not None:
            half, name = both.shape[1] // 2, f"{prefix}gate_up_exps.weight"
            pieces |= {"gate": [TensorRows(name, (0, half))], "up": [TensorRows(name, (half, 2 * half))]}
        elif f"{prefix}gate_exps.weight" not in entries:
            del pieces["gate"]
    else:  # before April 2024 each expert was a separate tensor
        count = sum(re.fullmatch(re.escape(prefix) + r"down\.\d+\.weight", name) is not None for name in entries)
        pieces = (
            {part: [TensorRows(f"{prefix}{part}.{e}.weight") for e in range(count)] for part in ("gate", "up", "down")}
            if count
            else {}
        )
    lost = [p.name for part in pieces.values() for p in part if p.name not in entries]
    if lost:
        raise ModelError(f"This GGUF model lacks {lost[0]}. Download it again.")
    return pieces


def _experts(
    entries: Mapping[str, TensorInfo], target: ExpertLayout, layer: int, prefix: str
) -> dict[str, TensorRecipe]:
    parts = routed(entries, layer)
    if not parts:
        return {}
    if not target.gate:
        parts.pop("gate", None)  # reported as unknown
    elif "gate" not in parts:
        raise ModelError(f"This GGUF model lacks blk.{layer}.ffn_gate_exps.weight. Download it again.")
    if "{}" not in target.down:
        return _stacked(entries, parts, target, prefix)
    count = len(parts["down"]) if len(parts["down"]) > 1 else entries[parts["down"][0].name].shape[0]
    made: dict[str, TensorRecipe] = {}
    for part, pieces in parts.items():
        name = getattr(target, part)
        for expert in range(count):
            one = len(pieces) == 1
            piece = pieces[0 if one else expert]
            shape = _shape(entries, piece)[1:] if one else _shape(entries, piece)
            made[prefix + name.format(expert)] = TensorRecipe(
                (piece,), shape, same, expert if one else None, is_expert=True
            )
    return made


def _stacked(
    entries: Mapping[str, TensorInfo], parts: Mapping[str, list[TensorRows]], target: ExpertLayout, prefix: str
) -> dict[str, TensorRecipe]:
    made: dict[str, TensorRecipe] = {}
    gate, up, down = (tuple(parts[part]) for part in ("gate", "up", "down"))
    apart = ((target.gate, same, gate), (target.up, same, up))
    together = ((target.gate, target.pair, gate + up),)
    for name, merge, pieces in (*(apart if target.up else together), (target.down, target.single, down)):
        empty = [torch.empty(_shape(entries, p), device="meta") for p in pieces]
        made[prefix + name] = TensorRecipe(pieces, tuple(merge(empty).shape), merge, is_expert=True)
        biases = tuple(TensorRows(p.name.removesuffix("weight") + "bias") for p in pieces)
        if biases[0].name in entries:
            bias_merge = woven_bias if len(biases) > 1 else same
            empty = [torch.empty(entries[b.name].shape, device="meta") for b in biases]
            made[f"{prefix}{name}_bias"] = TensorRecipe(
                biases, tuple(bias_merge(empty).shape), bias_merge, is_expert=True
            )
    return made


def _shape(entries: Mapping[str, TensorInfo], piece: TensorRows) -> tuple[int, ...]:
    shape = entries[piece.name].shape
    return shape if piece.rows is None else (shape[0], piece.rows[1] - piece.rows[0], shape[2])
