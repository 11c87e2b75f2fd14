"""A checkpoint of hundreds of megabytes, written in about a second: real headers and names, one block of numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.memory.pack.tensorfile import write_tensors
from tests.checkpoints import COMMON
from tests.tiny_tokenizer import save_tokenizer


def make_large(directory: Path, layers: int = 6, experts: int = 32, hidden: int = 1024, inner: int = 512) -> Path:
    """A bf16 qwen3_moe checkpoint of 6 * hidden * inner * experts * layers bytes (604 MB) and some dense weights."""
    directory.mkdir(parents=True)
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{
            **COMMON,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_experts": experts,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": inner,
            "intermediate_size": inner,
            "head_dim": 64,
        },
    )
    config.dtype = "bfloat16"
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(directory)
    save_tokenizer(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {n: (torch.bfloat16, tuple(t.shape)) for n, t in model.state_dict().items() if ".experts." not in n}
    for layer in range(layers):
        for expert in range(experts):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors |= {
                f"{at}.gate_proj.weight": (torch.bfloat16, (inner, hidden)),
                f"{at}.up_proj.weight": (torch.bfloat16, (inner, hidden)),
                f"{at}.down_proj.weight": (torch.bfloat16, (hidden, inner)),
            }
    block = torch.randn(2 * hidden * hidden, generator=torch.Generator().manual_seed(0)).mul_(0.05).bfloat16()

    def read(name: str) -> torch.Tensor:
        shape = tensors[name][1]
        start = sum(name.encode()) % 997  # so that tensors differ
        return block[start : start + torch.Size(shape).numel()].view(shape)

    write_tensors(directory / "model.safetensors", tensors, read, {"format": "pt"}, int)
    return directory
