"""Cache-relevant properties of the model's routing: hit rates of LRU, LFU and Belady; and similarity of its experts.

Routed are the tokens of consecutive questions and windows of held-out text, through caches of Moestro's simulator.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from core.profile.trace import ArrayTrace
from core.simulate import BELADY, Config, simulate

from .model import RouterLog

Routed = npt.NDArray[np.int16]  # [tokens, layers, k] the experts of every token


@torch.inference_mode()
def record(model: Any, requests: Sequence[Sequence[int]]) -> Routed:
    """The experts of every token of the requests, each run as a context of its own."""
    log = RouterLog(model)
    found = list[Routed]()
    for ids in requests:
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
        found.append(torch.stack([chosen for _, chosen in log.seen], 1).to(torch.int16).cpu().numpy())
        log.seen.clear()
    log.remove()
    return np.concatenate(found)


def hit_rates(routed: Routed, experts: int) -> dict[str, dict[str, float]]:
    """Hit rate over all layers by policy and share of slots, of caches that start empty and have one token a pass."""
    trace, total = ArrayTrace(routed, experts), routed.shape[1] * experts
    policies, shares = {"LRU": "lru", "LFU": "lfu", "Belady": BELADY}, (25, 50, 75)
    configs = [Config(policy, total * share // 100) for policy in policies.values() for share in shares]
    rates = iter(simulate(trace, configs, processes=1))
    return {name: {f"{share}%": round(next(rates).hit_rate or 0.0, 3) for share in shares} for name in policies}


@torch.inference_mode()
def expert_likeness(model: Any, requests: Sequence[Sequence[int]], samples: int = 256) -> list[float]:
    """Per layer, the mean over experts of the cosine similarity of its outputs with its most similar expert's.

    Outputs are those of all experts on the same sample of inputs of the layer, weights in float32.
    """
    inputs: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].flatten(0, -2)))
        for layer, kept in zip(model.model.layers, inputs, strict=True)
    ]
    for ids in requests:
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    means = []
    for layer, kept in zip(model.model.layers, inputs, strict=True):
        rows = torch.cat(kept)
        rows = rows[:: max(1, len(rows) // samples)][:samples].float()
        outputs = []
        experts = layer.mlp.experts
        for gate_up, down in zip(experts.gate_up_proj.float(), experts.down_proj.float(), strict=True):
            gate, up = F.linear(rows, gate_up).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, down).reshape(-1))
        unit = F.normalize(torch.stack(outputs), dim=1)
        means.append(round(float((unit @ unit.T).fill_diagonal_(-1).amax(1).mean()), 3))
    return means


@torch.inference_mode()
def perplexity(model: Any, ids: Sequence[int], window: int = 256) -> float:
    """Perplexity of text, in windows that do not overlap."""
    count = (len(ids) - 1) // window
    inputs = torch.tensor(ids[: count * window]).view(count, window)
    targets = torch.tensor(ids[1 : count * window + 1]).view(count, window)
    total = 0.0
    for start in range(0, count, 16):
        logits = model(input_ids=inputs[start : start + 16].to(model.device), use_cache=False).logits.float()
        flat = targets[start : start + 16].reshape(-1).to(model.device)
        total += float(F.cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, reduction="sum"))
    return round(float(torch.tensor(total / (count * window)).exp()), 2)
