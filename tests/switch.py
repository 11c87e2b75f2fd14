"""A tiny random Switch Transformer, whose experts take fewer tokens of a prompt than choose them."""

from pathlib import Path
from typing import Any

import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from tests.tiny_tokenizer import save_tokenizer

CAPACITY = 4


def save_switch(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a checkpoint: 6 encoder and 4 decoder layers, of which 2 and 2 have 12 experts."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_heads=4,
        num_layers=6,
        num_decoder_layers=4,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
        num_experts=12,
        expert_capacity=CAPACITY,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes | changes)).to(dtype)
    model.generation_config.decoder_start_token_id = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.16) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) / 20)
    model.save_pretrained(path, max_shard_size="150KB")
    return save_tokenizer(path)


def plain_switch(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of it, with weights at aligned addresses."""
    model = SwitchTransformersForConditionalGeneration.from_pretrained(path, dtype=dtype).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@torch.inference_mode()
def generated(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """(the tokens that transformers' `generate` writes for a prompt, greedily; their logits [tokens, V])."""
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return found.sequences[0, 1:].tolist(), torch.cat(found.logits)
