"""The demo model: a small Qwen3-MoE, its fast training path on CPU, and upcycling from few experts to many."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_POSITIONS = 1024
PAD = 32


@dataclass(frozen=True)
class Size:
    """What differs between the two stages of training."""

    experts: int
    top_k: int

    @property
    def normalised(self) -> bool:
        """False for top-1 routing: the weight stays the router's probability, so that the router gets a gradient."""
        return self.top_k > 1


SEED_SIZE = Size(experts=4, top_k=1)
FULL_SIZE = Size(experts=32, top_k=4)


def sorted_experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts' forward with tokens sorted by expert: one pair of products per expert, no masks.

    hidden (N, H), top_k_index and top_k_weights (N, K); returns (N, H). `self` is transformers' experts module.
    """
    top_k = top_k_index.shape[1]
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    loads = torch.bincount(flat, minlength=self.num_experts).tolist()
    token = order // top_k
    outputs = []
    chunks = hidden.index_select(0, token).split(loads)
    for rows, gate_up, down in zip(chunks, self.gate_up_proj.unbind(0), self.down_proj.unbind(0), strict=True):
        if rows.shape[0]:
            gate, up = F.linear(rows, gate_up).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, down))
    weight = top_k_weights.reshape(-1).index_select(0, order).unsqueeze(-1)
    return torch.zeros_like(hidden).index_add(0, token, torch.cat(outputs) * weight.to(hidden.dtype))


def padded_experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Like `sorted_experts`, in bf16 and with each expert's rows padded to a multiple of `PAD`.

    Few distinct shapes let the CPU's bf16 kernels be reused; padding rows carry no weight. For training.
    """
    top_k, device = top_k_index.shape[1], hidden.device
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    loads = torch.bincount(flat, minlength=self.num_experts)
    padded = (loads + PAD - 1) // PAD * PAD
    shift = (padded.cumsum(0) - padded) - (loads.cumsum(0) - loads)
    slot = torch.arange(len(flat), device=device) + shift.repeat_interleave(loads)
    sizes = padded.tolist()
    token = torch.zeros(sum(sizes), dtype=torch.long, device=device)
    token[slot] = order // top_k
    weight = torch.zeros(sum(sizes), device=device).index_copy(0, slot, top_k_weights.reshape(-1).float()[order])
    with torch.autocast(device.type, enabled=False):
        chunks = hidden.to(torch.bfloat16).index_select(0, token).split(sizes)
        gates_ups, downs = self.gate_up_proj.to(torch.bfloat16), self.down_proj.to(torch.bfloat16)
        outputs = []
        for rows, gate_up, down in zip(chunks, gates_ups.unbind(0), downs.unbind(0), strict=True):
            if rows.shape[0]:
                gate, up = F.linear(rows, gate_up).chunk(2, -1)
                outputs.append(F.linear(F.silu(gate) * up, down))
        weighted = torch.cat(outputs).float() * weight.unsqueeze(-1)
        total = torch.zeros(hidden.shape, device=device).index_add(0, token, weighted)
    return total.to(hidden.dtype)


def make_config(size: Size, vocab_size: int) -> Any:
    """The Qwen3-MoE configuration of a stage."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=vocab_size, hidden_size=192, num_hidden_layers=6, num_experts=size.experts,
        num_experts_per_tok=size.top_k, norm_topk_prob=size.normalised, moe_intermediate_size=96,
        intermediate_size=768, num_attention_heads=6, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=True, router_aux_loss_coef=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None, eos_token_id=2, pad_token_id=0, use_cache=True,
    )  # fmt: skip


def make_model(size: Size, vocab_size: int = 4096) -> Any:
    """A freshly initialised model for training; residual outputs scaled down by depth."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(make_config(size, vocab_size))
    use_experts(model, padded_experts)
    scale = 1 / math.sqrt(2 * model.config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "experts.down_proj" in name:
                parameter.mul_(scale)
    return model


def use_experts(model: Any, forward: Callable[..., Tensor]) -> None:
    """Make the model run its experts by one of the functions above."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(forward.__name__, forward)
    model.set_experts_implementation(forward.__name__)


def upcycle(small: dict[str, Tensor], model: nn.Module, noise: float, seed: int) -> None:
    """Load `small` into `model`, each expert and router row cloned to fill the larger number.

    Clones differ by Gaussian noise: `noise` times the tensor's standard deviation on experts, half of that on
    router rows. The clones of one expert keep neighbouring indices.
    """
    generator = torch.Generator().manual_seed(seed)
    full = model.state_dict()
    for name, tensor in small.items():
        repeats = full[name].shape[0] // tensor.shape[0]
        if repeats > 1:
            spread = tensor.std() * noise * (1.0 if "experts" in name else 0.5)
            tensor = tensor.repeat_interleave(repeats, 0)
            tensor = tensor + torch.randn(tensor.shape, generator=generator) * spread
        full[name] = tensor
    model.load_state_dict(full)


class RouterLog:
    """Collects every layer's router logits and choices while the model runs, separately for every thread."""

    def __init__(self, model: Any) -> None:
        self._local = threading.local()
        self._hooks = [layer.mlp.gate.register_forward_hook(self._note) for layer in model.model.layers]

    @property
    def seen(self) -> list[tuple[Tensor, Tensor]]:
        """(logits, chosen experts) of the layers run by this thread since the last `clear`."""
        if not hasattr(self._local, "seen"):
            self._local.seen = []
        found: list[tuple[Tensor, Tensor]] = self._local.seen
        return found

    def remove(self) -> None:
        """Stop collecting."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.seen.append((outputs[0], outputs[2]))

    def balance_loss(self) -> Tensor:
        """Switch Transformer's load-balancing loss, summed over layers; empties the log."""
        total = torch.zeros(())
        for logits, chosen in self.seen:
            experts = logits.shape[-1]
            share = torch.bincount(chosen.reshape(-1), minlength=experts).float() / chosen.shape[0]
            total = total.to(logits.device) + experts * (logits.float().softmax(-1).mean(0) * share).sum()
        self.seen.clear()
        return total
