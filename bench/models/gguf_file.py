"""Writes a generated checkpoint as a GGUF file for llama.cpp: the same weights bit for bit, including the tokenizer."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.hf.files import check_files
from core.hf.safetensors_file import TensorFiles

PLAIN = {  # our name -> GGUF name, in a layer; norms and the router are fp32 in GGUF
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_proj": "attn_k",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
Weight = tuple[str, tuple[int, ...], bool, Callable[[], torch.Tensor]]  # name, shape, fp32, how to get it


def write_bf16(model: Path, target: Path) -> Path:
    """Writes `target` from a bf16 Qwen3-MoE checkpoint, such as the demo or one of `bench.models.generate`. One layer's
    matrices are in memory."""
    import gguf

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    unfinished = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(unfinished, "qwen3moe")
    _describe(writer, config, json.loads((model / "tokenizer.json").read_text(encoding="utf-8")))
    kinds = {True: gguf.GGMLQuantizationType.F32, False: gguf.GGMLQuantizationType.BF16}
    tensors = TensorFiles(check_files(model).weights)
    weights = list(_weights(config, tensors))
    for name, shape, full, _ in weights:
        size = int(np.prod(shape)) * (4 if full else 2)
        writer.add_tensor_info(name, shape, np.dtype(np.float32 if full else np.uint16), size, kinds[full])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, full, read in weights:
        weight = read()
        writer.write_tensor_data(weight.float().numpy() if full else weight.view(torch.uint16).numpy())
    writer.close()
    tensors.close()
    return unfinished.rename(target)


def _weights(config: dict[str, Any], tensors: TensorFiles) -> Iterator[Weight]:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]

    def plain(ours: str, theirs: str) -> Weight:
        shape = tuple(tensors.tensors[ours].shape)
        return theirs, shape, len(shape) == 1 or "gate_inp" in theirs, lambda: tensors.read(ours)

    def stacked(at: str, part: str) -> torch.Tensor:
        return torch.stack([tensors.read(f"{at}mlp.experts.{e}.{part}.weight") for e in range(experts)])

    for ours, theirs in OUTER.items():
        if f"{ours}.weight" in tensors.tensors:  # tied embeddings are there once, in both formats
            yield plain(f"{ours}.weight", f"{theirs}.weight")
    for layer in range(config["num_hidden_layers"]):
        at, block = f"model.layers.{layer}.", f"blk.{layer}."
        for ours, theirs in PLAIN.items():
            yield plain(f"{at}{ours}.weight", f"{block}{theirs}.weight")
        for part, theirs in EXPERTS.items():
            shape = (experts, hidden, width) if part == "down_proj" else (experts, width, hidden)
            yield f"{block}{theirs}.weight", shape, False, partial(stacked, at, part)


def _describe(writer: Any, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    import gguf

    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    vocab: dict[str, int] = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    special = {t["id"] for t in tokenizer["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(vocab, key=lambda token: vocab[token]))
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(vocab))]
    )
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
