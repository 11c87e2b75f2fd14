"""A Qwen3-MoE checkpoint of random weights, of any size, written layer by layer.

A router of random weights spreads almost evenly over the experts and hardly repeats itself from token to token. That is
the hardest case for any cache: a trained model of these sizes hits more often at the same budget."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.models.sizes import VERSION, Sizes

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def checkpoint(folder: Path, sizes: Sizes, seed: int = 0, say: Callable[[str], None] = lambda text: None) -> Path:
    """The checkpoint's directory inside `folder`; written if it does not exist yet. One layer is in memory at a time;
    an interrupted write leaves nothing that could be taken for a checkpoint."""
    target = folder / f"{sizes.name}-v{VERSION}-{seed}"
    if target.is_dir():
        return target
    say(f"writing {sizes.expert_bytes / 1e9:.2g} GB of random experts to {target}")
    partial = folder / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config(sizes), indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER:
        shutil.copyfile(DEMO / name, partial / name)
    index: dict[str, str] = {}
    for number, tensors in enumerate(_shards(sizes, seed)):
        shard = f"model-{number + 1:05d}-of-{sizes.layers + 1:05d}.safetensors"
        save_file(tensors, partial / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard)
    (partial / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8"
    )
    partial.rename(target)
    return target


def config(sizes: Sizes) -> dict[str, object]:
    """config.json of a Qwen3-MoE model of these sizes."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": 4 * sizes.hidden,
        "moe_intermediate_size": sizes.width,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "use_cache": True,
    }


def _shards(sizes: Sizes, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yields named weights (bf16), one layer after the other, those outside the layers last.

    Standard deviations keep activations near 1, so that rounding does not change the chosen experts; router logits have
    a spread of 2, and output logits one wide enough that sampled text does not repeat itself."""
    hidden, width = sizes.hidden, sizes.width
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for number in range(sizes.layers + 1):
        random = torch.Generator().manual_seed(seed * 1000 + number)

        def normal(rows: int, columns: int, scale: float, random: torch.Generator = random) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, scale, generator=random)

        if number == sizes.layers:
            yield {
                "model.embed_tokens.weight": normal(sizes.vocab, hidden, 1.0),
                "model.norm.weight": _ones(hidden),
                "lm_head.weight": normal(sizes.vocab, hidden, 2 / hidden**0.5),
            }
            return
        unit, at = hidden**-0.5, f"model.layers.{number}."
        named = {
            "self_attn.q_proj.weight": normal(queries, hidden, unit),
            "self_attn.q_norm.weight": _ones(sizes.head_dim),
            "self_attn.k_proj.weight": normal(keys, hidden, unit),
            "self_attn.k_norm.weight": _ones(sizes.head_dim),
            "self_attn.v_proj.weight": normal(keys, hidden, unit),
            "self_attn.o_proj.weight": normal(hidden, queries, queries**-0.5),
            "input_layernorm.weight": _ones(hidden),
            "post_attention_layernorm.weight": _ones(hidden),
            "mlp.gate.weight": normal(sizes.experts, hidden, 2 * unit),
        }
        for expert in range(sizes.experts):
            named |= {
                f"mlp.experts.{expert}.gate_proj.weight": normal(width, hidden, unit),
                f"mlp.experts.{expert}.up_proj.weight": normal(width, hidden, unit),
                f"mlp.experts.{expert}.down_proj.weight": normal(hidden, width, width**-0.5),
            }
        yield {at + name: tensor for name, tensor in named.items()}


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
