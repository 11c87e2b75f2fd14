"""Tiny random checkpoints with a head that predicts further tokens, written in the public layout of DeepSeek-V3 and
GLM-4.x: the head is a layer after the last one, with copies of the embeddings and of the output layer."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer

LAYERS = 3


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by name."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Replace the weights of a checkpoint, and entries of its config."""
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(stated))
    return path


def with_head(arch: str, path: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write such a checkpoint of `arch`, with a tokenizer, of LAYERS layers and a head."""
    save_tokenizer(make_checkpoint(arch, path, dtype=dtype, num_hidden_layers=LAYERS + 1, **overrides))
    tensors, draw = tensors_of(path), torch.Generator().manual_seed(5)
    hidden, at = tensors["model.norm.weight"].shape[0], f"model.layers.{LAYERS}"
    norms = [f"{at}.enorm.weight", f"{at}.hnorm.weight", f"{at}.shared_head.norm.weight"]
    tensors |= {name: (1 + 0.2 * torch.randn(hidden, generator=draw)).to(dtype) for name in norms}
    tensors[f"{at}.eh_proj.weight"] = (0.2 * torch.randn(hidden, 2 * hidden, generator=draw)).to(dtype)
    tensors[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{at}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return write(path, tensors, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)


def counting(path: Path, noise: float) -> Path:
    """Have a checkpoint follow each token by the one that has the next number, but for what attention and experts add,
    which is little."""
    tensors = tensors_of(path)
    embedded = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"].float()).to(torch.float32)
    tensors["model.embed_tokens.weight"] = embedded
    tensors["lm_head.weight"] = 4 * embedded.roll(1, 0).contiguous()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = noise * tensor
    return write(path, tensors)


def dense(path: Path, noise: float = 0.15) -> Path:
    """Write a dense model that counts, with the same tokens."""
    return counting(save_tokenizer(make_checkpoint("qwen3", path, tie_word_embeddings=False)), noise)


def predictable(arch: str, path: Path, noise: float = 0.15, **overrides: Any) -> Path:
    """As `with_head`, of a model that counts, and so does its head."""
    tensors = tensors_of(counting(with_head(arch, path, **overrides), noise))
    hidden, at = tensors["model.norm.weight"].shape[0], f"model.layers.{LAYERS}"
    tensors[f"{at}.eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{at}.{name}.weight"] = torch.ones(hidden)
    del tensors[f"{at}.embed_tokens.weight"], tensors[f"{at}.shared_head.head.weight"]
    return write(path, tensors)
