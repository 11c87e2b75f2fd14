"""Qwen3-Next, Qwen3.5 and Qwen3.6: layers of gated linear attention between those of full attention.

The converter stores norms as 1 + weight and A_log as -exp(A_log). Of Qwen3.5 it also stores the value heads of a linear
layer in another order: the first of each key head, then the second of each, and so on. Of Qwen3-Next it takes the
joint projection apart, which has the queries, keys, values and gates of one key head after the other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from core.importing.sources.gguf import config_parts as c
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import ONE_SHARED, QK_NORM, Names, as_kernel, as_row, less_one, logarithm, same
from core.importing.sources.gguf.tensors import Merge, TensorRecipe, TensorRows
from core.system.gguf import TensorInfo, damaged

LINEAR = {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
LAYER = QK_NORM | ONE_SHARED | LINEAR | {"post_attention_norm": "post_attention_layernorm"}
NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
MERGES: dict[str, Merge] = {
    **dict.fromkeys(NORMS, less_one),
    "ffn_gate_inp_shexp": as_row,
    "ssm_conv1d": as_kernel,
    "ssm_a": logarithm,
}


def qwen35(facts: ModelMetadata) -> dict[str, Any]:
    config = _linear(facts, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
    if sections := facts.get("rope.dimension_sections"):
        config["rope_parameters"] |= {"mrope_section": list(sections[:3]), "mrope_interleaved": True}
    return config


def qwen3_next(facts: ModelMetadata) -> dict[str, Any]:
    return _linear(facts, "qwen3_next", "Qwen3NextForCausalLM") | {
        "decoder_sparse_step": 1,
        "intermediate_size": c.dense_size(facts),
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _linear(facts: ModelMetadata, model_type: str, kind: str) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    c.normed(facts, True)
    config = c.common(facts, model_type, kind)
    heads = Heads(facts)
    width = facts.need("attention.key_length")
    config["rope_parameters"] |= {"partial_rotary_factor": facts.need("rope.dimension_count") / width}
    return config | {
        "head_dim": width,
        "layer_types": _layer_types(facts),
        "linear_conv_kernel_dim": facts.need("ssm.conv_kernel"),
        "linear_key_head_dim": heads.key_width,
        "linear_value_head_dim": heads.value_width,
        "linear_num_key_heads": heads.keys,
        "linear_num_value_heads": heads.values,
        "num_experts": c.experts(facts),
        "moe_intermediate_size": facts.expert_size(),
        "shared_expert_intermediate_size": facts.shape(f"blk.{facts.moe_layers[0]}.ffn_down_shexp.weight")[-1],
    }


def _layer_types(facts: ModelMetadata) -> list[str]:
    """By the tensors. Raises ModelError where metadata says otherwise."""
    linear = [f"blk.{n}.ssm_out.weight" in facts.entries for n in range(facts.layers)]
    interval = facts.get("full_attention_interval")
    if interval and linear != [(n + 1) % interval != 0 for n in range(facts.layers)]:
        raise damaged(facts.file, f"its layers of full attention are not each {interval}th")
    return ["linear_attention" if is_linear else "full_attention" for is_linear in linear]


class Heads:
    """Numbers and widths of a linear layer's heads. Raises ModelError when they contradict each other."""

    def __init__(self, facts: ModelMetadata) -> None:
        self.keys: int = facts.need("ssm.group_count")
        self.values: int = facts.need("ssm.time_step_rank")
        self.key_width: int = facts.need("ssm.state_size")
        inner: int = facts.need("ssm.inner_size")
        if self.values % self.keys or inner % self.values:
            raise damaged(facts.file, f"its {self.values} value heads do not divide {inner} by {self.keys} key heads")
        self.value_width, self.per_key = inner // self.values, self.values // self.keys
        self.joint = 2 * self.keys * self.key_width  # rows of the queries and keys, before the values

    def grouped(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Rows of value heads, `width` each, in the order of transformers: all of a key head side by side."""
        tiled: torch.Tensor = rows.unflatten(0, (self.per_key, self.keys, width))
        return tiled.transpose(0, 1).flatten(0, 2)

    def values_grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """The same for rows that begin with all queries and keys."""
        return torch.cat((rows[: self.joint], self.grouped(rows[self.joint :], self.value_width)))

    def by_key(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Queries, keys and values [rows, in] and gates [rows, in], joined for each key head."""
        both = [part.unflatten(0, (self.keys, -1)) for part in pieces[0][: self.joint].chunk(2)]
        wide = [part.unflatten(0, (self.keys, -1)) for part in (pieces[0][self.joint :], pieces[1])]
        return torch.cat((*both, *wide), dim=1).flatten(0, 1)


def qwen35_names(facts: ModelMetadata) -> Names:
    heads = Heads(facts)

    def rows(width: int) -> Merge:
        return lambda pieces: heads.grouped(pieces[0], width)

    def joint(entries: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorRecipe]:
        stored = f"{prefix}attn_qkv.weight"
        if f"{prefix}ssm_out.weight" not in entries or stored not in entries:
            return {}  # a full layer's joint projection is not known
        recipe = TensorRecipe((TensorRows(stored),), entries[stored].shape, lambda p: heads.values_grouped(p[0]))
        return {"linear_attn.in_proj_qkv.weight": recipe}

    return Names(
        LAYER
        | {
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
        },
        biases=frozenset({"ssm_dt"}),
        merges=MERGES
        | {
            "attn_gate": rows(heads.value_width),
            "ssm_alpha": rows(1),
            "ssm_beta": rows(1),
            "ssm_dt": rows(1),
            "ssm_a": lambda pieces: logarithm([heads.grouped(pieces[0], 1)]),
            "ssm_conv1d": lambda pieces: as_kernel([heads.values_grouped(pieces[0])]),
            "ssm_out": lambda pieces: heads.grouped(pieces[0].T, heads.value_width).T,
        },
        more=joint,
    )


def qwen3_next_names(facts: ModelMetadata) -> Names:
    heads = Heads(facts)

    def joint(entries: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorRecipe]:
        """Older files have the joint projection as it is, newer ones in two parts."""
        whole, *apart = [f"{prefix}{name}.weight" for name in ("ssm_in", "attn_qkv", "attn_gate")]
        if whole in entries:
            recipe = TensorRecipe((TensorRows(whole),), entries[whole].shape, same)
        elif all(name in entries for name in apart):
            rows = sum(entries[name].shape[0] for name in apart)
            shape = (rows, entries[apart[0]].shape[1])
            recipe = TensorRecipe(tuple(TensorRows(name) for name in apart), shape, heads.by_key)
        else:
            return {}
        return {"linear_attn.in_proj_qkvz.weight": recipe}

    return Names(LAYER | {"ssm_ba": "linear_attn.in_proj_ba"}, biases=frozenset({"ssm_dt"}), merges=MERGES, more=joint)
