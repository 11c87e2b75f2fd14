"""Names and conversions of layers that keep a state (Mamba, Mamba-2, Kimi's delta attention) in GGUF models.

llama.cpp's converter stores A as -exp(A_log), gives A and D of Mamba-2 a second dimension of 1, and divides the norm of
a state into groups (conversion/mamba.py, jamba.py, nemotron.py, kimi_linear.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from core.errors import ModelError
from core.importing.sources.gguf.layout import as_kernel
from core.importing.sources.gguf.tensors import Merge


def flat(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """As one dimension."""
    return pieces[0].flatten()


def as_log(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """-exp(A_log) -> A_log, which is rounded. Raises ModelError where that is not possible."""
    stored = pieces[0]
    if not stored.is_meta and not bool((stored < 0).all()):
        raise ModelError("This GGUF model has states that would grow without end (ssm_a). Download it again.")
    return torch.log(-stored)


def log_of_heads(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """-exp(A_log), one number a head -> A_log [heads]."""
    return as_log(pieces).flatten()


def log_of_kimi(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """-exp(A_log), one number a head -> A_log [1, 1, heads, 1]."""
    return as_log(pieces).reshape(1, 1, -1, 1)


def mamba2(module: str) -> dict[str, str]:
    """Names of a Mamba-2 layer, whose `module` it is."""
    parts = {"in": "in_proj", "conv1d": "conv1d", "dt": "dt_bias", "a": "A_log", "d": "D", "norm": "norm"}
    return {f"ssm_{stored}": f"{module}.{target}" for stored, target in (parts | {"out": "out_proj"}).items()}


MAMBA2_BIASES = frozenset({"ssm_conv1d", "ssm_dt"})
MAMBA2_MERGES: Mapping[str, Merge] = {
    "ssm_conv1d": as_kernel,
    "ssm_a": log_of_heads,
    "ssm_d": flat,
    "ssm_norm": flat,
}
NEMOTRON = {
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "mixer.o_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
NEMOTRON_OUTER = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
JAMBA = {
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_conv1d": "mamba.conv1d",
    **{f"ssm_{part}": f"mamba.{part}_proj" for part in ("in", "x", "dt", "out")},
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
}
KIMI = {
    **{f"ffn_{part}": f"block_sparse_moe.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in ("q", "k", "v")},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
