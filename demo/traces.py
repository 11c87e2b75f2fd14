"""Cache-relevant properties of the model's routing: hit rates of LRU, LFU and Belady; and similarity of its experts.

A trace is the experts that every token selects, layer by layer, for consecutive questions and windows of held-out text.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import RouterLog

Trace = list[tuple[int, ...]]
NEVER = 1 << 60


@torch.inference_mode()
def record(model: Any, requests: Sequence[Sequence[int]]) -> list[Trace]:
    """Per layer, the experts of every token of the requests, each run as a context of its own."""
    log = RouterLog(model)
    traces: list[Trace] = [[] for _ in model.model.layers]
    for ids in requests:
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
        for trace, (_, chosen) in zip(traces, log.seen, strict=True):
            trace += [tuple(sorted(token)) for token in chosen.tolist()]
        log.seen.clear()
    log.remove()
    return traces


def next_uses(trace: Trace) -> list[dict[int, int]]:
    """For every position, when each expert used there is used again."""
    upcoming: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for time in range(len(trace) - 1, -1, -1):
        found.append({expert: upcoming.get(expert, NEVER) for expert in trace[time]})
        upcoming.update(dict.fromkeys(trace[time], time))
    return found[::-1]


def hit_rate(trace: Trace, slots: int, victim_key: Callable[[int], Any], used: Callable[[int, int], None]) -> float:
    """The share of experts found resident; a miss evicts the resident expert with the smallest `victim_key`.

    A token's own experts are never evicted while it runs. `used(expert, time)` is called for every use.
    """
    resident: set[int] = set()
    hits = 0
    for time, experts in enumerate(trace):
        hits += sum(expert in resident for expert in experts)
        for expert in experts:
            used(expert, time)
        for expert in experts:
            if expert not in resident:
                if len(resident) >= slots:
                    resident.remove(min(resident - set(experts), key=lambda e: (victim_key(e), e)))
                resident.add(expert)
    return hits / sum(map(len, trace))


def lru(trace: Trace, slots: int) -> float:
    """Evicts the least recently used expert."""
    last: dict[int, int] = {}
    return hit_rate(trace, slots, last.__getitem__, last.__setitem__)


def lfu(trace: Trace, slots: int) -> float:
    """Evicts the least frequently used expert."""
    count: Counter[int] = Counter()
    return hit_rate(trace, slots, count.__getitem__, lambda expert, _: count.update((expert,)))


def belady(trace: Trace, slots: int) -> float:
    """Evicts the expert whose next use is farthest away: the upper bound."""
    uses = next_uses(trace)
    again: dict[int, int] = {}
    return hit_rate(trace, slots, lambda e: -again[e], lambda e, time: again.__setitem__(e, uses[time][e]))


def hit_rates(traces: list[Trace], experts: int) -> dict[str, dict[str, float]]:
    """Mean hit rate over layers by policy and share of slots."""
    policies = {"LRU": lru, "LFU": lfu, "Belady": belady}
    return {
        name: {
            f"{share}%": round(sum(run(trace, experts * share // 100) for trace in traces) / len(traces), 3)
            for share in (25, 50, 75)
        }
        for name, run in policies.items()
    }


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
