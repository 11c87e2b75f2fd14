"""What a tiny qwen3_moe routes and computes, by plain transformers and by its weights: the definitions, spelled
out, with nothing of the engine."""

import functools
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests.equality.passes import plain_transformers


@dataclass
class Passed:
    """One text: per layer h [T, H], the full softmax p [T, E], ids [T, k], weights g [T, k], experts' outputs
    [T, k, H]; and the embedding's output [T, H]."""

    hidden: list[torch.Tensor] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    ids: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    embedded: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


class Oracle:
    def __init__(self, path: Path) -> None:
        self.model = plain_transformers(path, torch.float32)
        self.blocks = [layer.mlp for layer in self.model.model.layers]
        self.k: int = self.model.config.num_experts_per_tok

    @torch.no_grad()
    def read(self, ids: list[int]) -> Passed:
        found = Passed()

        def embedded(module: object, args: object, output: torch.Tensor) -> None:
            found.embedded = output[0].clone()

        def routed(block: Any, module: object, args: tuple[torch.Tensor, ...]) -> None:
            self._layer(found, block, args[0].reshape(-1, args[0].shape[-1]))

        with ExitStack() as hooks, self.model.model.embed_tokens.register_forward_hook(embedded):
            for block in self.blocks:
                hooks.enter_context(block.gate.register_forward_pre_hook(functools.partial(routed, block)))
            self.model(input_ids=torch.tensor([ids]))
        return found

    def route(self, block: Any, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        probs = (h @ block.gate.weight.T).softmax(-1)
        weights, ids = probs.topk(self.k, dim=-1)
        if self.model.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return probs, weights, ids

    def _layer(self, found: Passed, block: Any, h: torch.Tensor) -> None:
        probs, weights, ids = self.route(block, h)
        outs = torch.stack(
            [torch.stack([self.expert(block.experts, int(e), x) for e in row]) for x, row in zip(h, ids, strict=True)]
        )
        for name, value in (("hidden", h), ("probs", probs), ("ids", ids), ("weights", weights), ("outs", outs)):
            getattr(found, name).append(value.clone())

    def expert(self, experts: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (experts.gate_up_proj[expert] @ x).chunk(2)
        down: torch.Tensor = experts.down_proj[expert] @ (functional.silu(gate) * up)
        return down
