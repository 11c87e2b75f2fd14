"""Tiny random checkpoints with a head that predicts further tokens, written in the public layouts. DeepSeek-V3's and
GLM-4.x's is a layer after the last one, with copies of the embeddings and of the output layer. Qwen3-Next's and
Qwen3.5's has names of its own, and so have MiMo's, of which there are several."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer

LAYERS = 3
QWEN = {  # beside DeepSeek's
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
}
MIMO = {  # beside those of its layer, of which one has another name
    "final_layernorm.": "shared_head.norm.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
}
AHEAD = "model.mtp.layers."
MIMO_CONFIG: dict[str, Any] = dict(
    v_head_dim=8,
    n_group=1,
    layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    rope_parameters={
        kind: dict(rope_type="default", rope_theta=theta, partial_rotary_factor=0.5)
        for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
    },
)
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]  # of layers, and the head's


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
    qwen, mimo = arch.startswith("qwen"), arch.startswith("mimo")
    overrides |= {"layer_types": KINDS} if qwen else MIMO_CONFIG | {"sliding_window": 9} if mimo else {}
    save_tokenizer(make_checkpoint(arch, path, dtype=dtype, num_hidden_layers=LAYERS + 1, **overrides))
    tensors, draw = tensors_of(path), torch.Generator().manual_seed(5)
    hidden, at = tensors["model.norm.weight"].shape[0], f"model.layers.{LAYERS}"
    norms = [f"{at}.enorm.weight", f"{at}.hnorm.weight", f"{at}.shared_head.norm.weight"]
    tensors |= {name: (1 + 0.2 * torch.randn(hidden, generator=draw)).to(dtype) for name in norms}
    tensors[f"{at}.eh_proj.weight"] = (0.2 * torch.randn(hidden, 2 * hidden, generator=draw)).to(dtype)
    if qwen:
        return write(path, _named(tensors), num_hidden_layers=LAYERS, layer_types=KINDS[:LAYERS])
    if mimo:
        own = {f"{name}_types": MIMO_CONFIG[f"{name}_types"][:LAYERS] for name in ("layer", "mlp_layer")}
        return write(path, _named_mimo(tensors), num_hidden_layers=LAYERS, **own)
    tensors[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{at}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return write(path, tensors, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)


def _named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the head's names in Qwen's checkpoints."""
    found, at = dict[str, torch.Tensor](), f"model.layers.{LAYERS}."
    for name, tensor in tensors.items():
        own = name.removeprefix(at)
        if own != name:
            own = next(qwen + own.removeprefix(one) for qwen, one in QWEN.items() if own.startswith(one))
        found[own] = tensor
    return found


def _named_mimo(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the first head's names in MiMo's checkpoints, and a second head with other weights."""
    found, at = dict[str, torch.Tensor](), f"model.layers.{LAYERS}."
    for name, tensor in tensors.items():
        own = name.removeprefix(at)
        if own == name:
            found[name] = tensor
            continue
        for mimo, one in MIMO.items():
            own = mimo + own.removeprefix(one) if own.startswith(one) else own
        found |= {f"{AHEAD}0.{own}": tensor, f"{AHEAD}1.{own}": tensor + 1}
    return found


def head_of_checkpoint(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """The names of a head's tensors -> what DeepSeek-V3 calls them within the layer."""
    kinds = {f"model.layers.{LAYERS}.": "", **QWEN, **{f"{AHEAD}0.{own}": one for own, one in MIMO.items()}}
    kinds[f"{AHEAD}0."] = ""
    found = ((name, prefix) for name in tensors for prefix in reversed(kinds) if name.startswith(prefix))
    return {name: kinds[prefix] + name.removeprefix(prefix) for name, prefix in found}


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
    hidden, ones = tensors["model.norm.weight"].shape[0], 0.0 if arch.startswith("qwen") else 1.0
    for name, one in head_of_checkpoint(tensors).items():
        if one == "eh_proj.weight":
            tensors[name] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
        elif one in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
            tensors[name] = torch.full((hidden,), ones)
        elif one in ("embed_tokens.weight", "shared_head.head.weight"):
            del tensors[name]
    return write(path, tensors)
