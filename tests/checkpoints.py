"""Tiny random checkpoints of real architectures, written to disk the way transformers saves them."""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.architectures.tiny import tiny

SMALL: dict[str, Any] = dict(num_hidden_layers=3, eos_token_id=None)
ARCHITECTURES: dict[str, dict[str, Any]] = {  # beside what `tiny` makes of their configs
    "mixtral": dict(num_experts_per_tok=2, head_dim=None, sliding_window=None),
    "qwen2_moe": {},
    "qwen3_moe": dict(head_dim=16),
    "olmoe": dict(intermediate_size=64),
    "phimoe": dict(sliding_window=None),
    "gpt_oss": dict(sliding_window=32),
    "glm4_moe": dict(head_dim=16, n_group=1),
    "deepseek_v2": dict(
        n_group=2, topk_method="group_limited_greedy", q_lora_rank=None, n_shared_experts=2, routed_scaling_factor=1.5
    ),
    "deepseek_v3": {},
    "granitemoe": dict(intermediate_size=64),
}
LINEAR: dict[str, Any] = dict(layer_types=["linear_attention", "linear_attention", "full_attention"])
EXTRA: dict[str, dict[str, Any]] = {  # built on request: a router with a second argument
    "minimax_m2": dict(intermediate_size=64, rotary_dim=16)
}
MORE: dict[str, dict[str, Any]] = {  # tested on fewer cases (tests/equality/test_logits.py)
    "ernie4_5_moe": {},
    "dots1": dict(norm_topk_prob=True, head_dim=16, sliding_window=4096),
    "lfm2_moe": {},
    "qwen3_next": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "flex_olmo": dict(intermediate_size=64),
    "granitemoeshared": dict(intermediate_size=64),
    "granitemoehybrid": dict(intermediate_size=64),
    "hunyuan_v1_moe": dict(intermediate_size=64),
    "jamba": dict(num_hidden_layers=4, intermediate_size=64),
    "nemotron_h": dict(num_hidden_layers=4, n_group=1, sliding_window=None),
    "bailing_hybrid": {},
    "glm4_moe_lite": dict(n_group=1),
    "deepseek_v32": {},
    "exaone_moe": dict(sliding_window_pattern=3),
    "inkling_text": dict(
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        n_shared_experts=2,
        rel_extent=32,
        unpadded_vocab_size=None,
    ),
}


def random_model(arch: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model of `arch`: a key of ARCHITECTURES, EXTRA or MORE, or any model type, then as tests.architectures
    makes it small."""
    torch.manual_seed(seed)
    named = (ARCHITECTURES | EXTRA | MORE).get(arch)
    fields = tiny(arch) | ({} if named is None else SMALL | named) | overrides
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **fields), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
            elif "bias" in name:
                parameter.normal_(0, 0.05)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0, 0.05)
    return model


_MADE: dict[tuple[Any, ...], Path] = {}  # folders that nobody changes, by what was asked for


def make_checkpoint(
    arch: str,
    directory: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "600KB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `arch` to `directory` and return it: a copy, where a test before wanted the same."""
    key = arch, seed, dtype, max_shard_size, repr(sorted(overrides.items()))
    if key not in _MADE:
        kept = Path(tempfile.mkdtemp(prefix="moestro-checkpoint-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        random_model(arch, seed, dtype, **overrides).save_pretrained(kept, max_shard_size=max_shard_size)
        _MADE[key] = kept
    shutil.copytree(_MADE[key], directory, dirs_exist_ok=True)
    return directory
