"""Checkpoints of random weights with each kind of layer between experts, as transformers writes them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.models.generate import DEMO, TOKENIZER

COMMON = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # what is between experts -> model type, its sizes
    "grouped heads": ("qwen3_moe", {"num_experts": 16, "moe_intermediate_size": 256, "norm_topk_prob": True}),
    "windows and sinks": ("gpt_oss", {"num_local_experts": 16, "intermediate_size": 256, "sliding_window": 128}),
    "experts beside a dense layer": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "num_experts": 16,
            "top_k_experts": 4,
            "moe_intermediate_size": 256,
            "intermediate_size": 512,
            "global_head_dim": 128,
            "sliding_window": 512,
            "attention_k_eq_v": True,
        },
    ),
    "gated delta nets": (
        "qwen3_next",
        {
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 16,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
    ),
    "latents": (
        "deepseek_v3",
        LATENT
        | {
            "intermediate_size": 1024,
            "moe_intermediate_size": 256,
            "n_shared_experts": 1,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
}
SMALL = {"hidden_size": 256, "num_hidden_layers": 4}


@torch.no_grad()
def checkpoint_of(kind: str, folder: Path, small: bool, say: Callable[[str], None] = lambda text: None) -> Path:
    """The directory of a checkpoint in bf16 inside `folder`, written if it does not exist yet."""
    model_type, sizes = KINDS[kind]
    target = folder / f"{model_type}-{'small' if small else 'kinds'}"
    if target.is_dir():
        return target
    say(f"writing random weights to {target}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **COMMON | sizes | (SMALL if small else {}))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.normal_(0, 1)
        elif parameter.dim() >= 2:
            inputs = parameter.shape[1] if model_type == "gpt_oss" and parameter.dim() == 3 else parameter.shape[-1]
            parameter.normal_(0, inputs**-0.5)
        elif "q_norm" in name and model_type == "gemma4_text":
            parameter.fill_(0.1)  # scores are not scaled otherwise
    for module in model.modules():
        if hasattr(module, "in_proj_qkvz"):  # queries are keys: what others read is next to nothing, and rounding alone
            width, heads = module.head_k_dim, module.num_k_heads
            for one in (module.in_proj_qkvz.weight.unflatten(0, (heads, -1)), module.conv1d.weight[None]):
                queries = width if one.dim() == 3 else heads * width
                one[:, :queries].copy_(one[:, queries : 2 * queries])
    partial = folder / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for name in TOKENIZER:
        shutil.copyfile(DEMO / name, partial / name)
    partial.rename(target)
    return target
