"""Types and bounds of a GGUF model's metadata values: checked once, trusted afterwards.

Keys by llama.cpp's names (gguf-py/gguf/constants.py), without the architecture's prefix.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.hf.bounds import MOST
from core.system.gguf import damaged

LAYERS, WIDTH, EXPERTS, TOKENS = MOST.layers, MOST.width, MOST.experts, MOST.tokens
COUNTS: Mapping[str, tuple[int, int]] = {
    "block_count": (1, LAYERS),
    "nextn_predict_layers": (0, LAYERS),
    "leading_dense_block_count": (0, LAYERS),
    "interleave_moe_layer_step": (1, LAYERS),
    "context_length": (2, TOKENS),
    "vocab_size": (1, MOST.vocabulary),
    "embedding_length": (1, WIDTH),
    "feed_forward_length": (0, WIDTH),
    "expert_feed_forward_length": (0, WIDTH),
    "expert_shared_feed_forward_length": (0, WIDTH),
    "attention.head_count": (1, WIDTH),
    "attention.head_count_kv": (0, WIDTH),
    "attention.key_length": (1, WIDTH),
    "attention.value_length": (1, WIDTH),
    "attention.key_length_mla": (0, WIDTH),
    "attention.value_length_mla": (0, WIDTH),
    "attention.key_length_swa": (1, WIDTH),
    "attention.value_length_swa": (1, WIDTH),
    "attention.shared_kv_layers": (0, LAYERS),
    "embedding_length_per_layer_input": (0, WIDTH),
    "attention.kv_lora_rank": (1, WIDTH),
    "attention.q_lora_rank": (0, WIDTH),
    "attention.sliding_window": (0, TOKENS),
    "rope.dimension_count": (1, WIDTH),
    "rope.dimension_count_swa": (1, WIDTH),
    "rope.dimension_sections": (0, WIDTH),
    "rope.scaling.original_context_length": (1, TOKENS),
    "full_attention_interval": (1, LAYERS),
    "ssm.conv_kernel": (1, WIDTH),
    "ssm.inner_size": (1, WIDTH),
    "ssm.state_size": (1, WIDTH),
    "ssm.time_step_rank": (1, WIDTH),
    "ssm.group_count": (1, WIDTH),
    "shortconv.l_cache": (1, WIDTH),
    "kda.head_dim": (1, WIDTH),
    "attention.indexer.head_count": (1, WIDTH),
    "attention.indexer.key_length": (1, WIDTH),
    "attention.indexer.top_k": (1, TOKENS),
    "attention.temperature_length": (0, TOKENS),
    "moe_latent_size": (0, WIDTH),
    "expert_count": (0, EXPERTS),
    "expert_used_count": (1, EXPERTS),
    "expert_shared_count": (0, EXPERTS),
    "expert_group_count": (0, EXPERTS),
    "expert_group_used_count": (0, EXPERTS),
    "expert_gating_func": (0, 255),
}
"""Whole numbers: least and most."""
POSITIVE = ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
NOT_NEGATIVE = (
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.clamp_kqv",
    "final_logit_softcapping",
    "rope.scaling.factor",
    "rope.scale_linear",
    "attention.scale",
    "attention.value_scale",
    "attention.temperature_scale",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "expert_weights_scale",
)
NUMBERS = (*POSITIVE, *NOT_NEGATIVE, "rope.scaling.yarn_log_multiplier")
FLAGS = ("expert_weights_norm", "rope.scaling.finetuned", "attention.causal")
TEXTS = ("rope.scaling.type",)


def check(metadata: Mapping[str, Any], architecture: str, file: Path) -> None:
    """Raises ModelError that names the file, the key and its value when a value is invalid."""
    for key, value in metadata.items():
        prefix, _, name = key.partition(".")
        if prefix == architecture and (wanted := _wrong(name, value)):
            raise damaged(file, f"its {key} is {value!r:.60}, not {wanted}")


def _wrong(key: str, value: Any) -> str:
    """What the value should have been, or "" if valid. A list has one value per layer."""
    values = value if isinstance(value, list) else [value]
    if key in COUNTS:
        least, most = COUNTS[key]
        good = bool(values) and all(type(v) is int and least <= v <= most for v in values)
        return "" if good else f"a whole number from {least} to {most:,}"
    if key in FLAGS:
        return "" if isinstance(value, bool) else "true or false"
    if key in TEXTS:
        return "" if isinstance(value, str) else "a text"
    if key in NUMBERS and not (values and all(type(v) in (int, float) for v in values)):
        return "a number"
    if any(isinstance(v, float) and not math.isfinite(v) for v in values):
        return "a finite number"
    if key in POSITIVE and min(values) <= 0:
        return "more than 0"
    return "0 or more" if key in NOT_NEGATIVE and min(values) < 0 else ""
