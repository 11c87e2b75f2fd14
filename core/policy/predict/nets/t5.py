"""The parts of a T5 (Raffel et al. 2020): attention with relative positions and no scaling, RMSNorm ahead of each part.

Implemented here because a decoder step takes a few hundred microseconds, too little for a general model's overhead."""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from core.policy.predict.path_reader import BUCKETS, FARTHEST


class KeysValues(NamedTuple):
    """[B, heads, S, d_kv] each."""

    keys: torch.Tensor
    values: torch.Tensor


class RMSNorm(nn.Module):
    """Scales to a root mean square of 1, then by a weight [d]."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed


class Bias(nn.Module):
    """The bias on attention scores by the distance between two positions: 32 learned values per head, exact when near,
    logarithmic up to 128 tokens, one for all beyond."""

    def __init__(self, heads: int, both_ways: bool) -> None:
        super().__init__()
        self.both_ways = both_ways
        self.values = nn.Embedding(BUCKETS, heads)

    def forward(self, queries: int, keys: int) -> torch.Tensor:
        """[1, heads, queries, keys]; the queries are the last of the keys. Without `both_ways`, later keys get -inf."""
        device = self.values.weight.device
        ahead = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
        bias: torch.Tensor = self.values(self.bucket(ahead)).permute(2, 0, 1)[None]
        return bias if self.both_ways else bias.masked_fill(ahead > 0, float("-inf"))

    def bucket(self, ahead: torch.Tensor) -> torch.Tensor:
        """Distances of keys from queries (positive: later) -> rows of the table."""
        count = BUCKETS // 2 if self.both_ways else BUCKETS
        later = (ahead > 0).long() * count if self.both_ways else torch.zeros_like(ahead)
        far = ahead.abs() if self.both_ways else (-ahead).clamp_min(0)
        exact = count // 2
        share = torch.log(far.clamp_min(1) / exact) / math.log(FARTHEST / exact)
        logarithmic = (exact + (share * (count - exact)).long()).clamp_max(count - 1)
        return later + torch.where(far < exact, far, logarithmic)


class Attention(nn.Module):
    """Multi-head attention without biases and without scaling."""

    def __init__(self, d_model: int, heads: int, d_kv: int) -> None:
        super().__init__()
        self.shape = heads, d_kv
        self.q = nn.Linear(d_model, heads * d_kv, bias=False)
        self.k = nn.Linear(d_model, heads * d_kv, bias=False)
        self.v = nn.Linear(d_model, heads * d_kv, bias=False)
        self.o = nn.Linear(heads * d_kv, d_model, bias=False)

    def keys_values(self, x: torch.Tensor) -> KeysValues:
        """Keys and values of states [B, S, d]."""
        return KeysValues(self._split(self.k(x)), self._split(self.v(x)))

    def forward(self, x: torch.Tensor, over: KeysValues, bias: torch.Tensor | None) -> torch.Tensor:
        """[B, T, d] -> [B, T, d]; `bias` is added to the scores [B, heads, T, S]."""
        found = functional.scaled_dot_product_attention(self._split(self.q(x)), over.keys, over.values, bias, scale=1.0)
        out: torch.Tensor = self.o(found.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        split: torch.Tensor = x.unflatten(-1, self.shape).transpose(1, 2)
        return split


class T5Block(nn.Module):
    """Attention over its own positions, with `cross` also over the prompt's, then two linear layers with a ReLU."""

    def __init__(self, d_model: int, d_ff: int, heads: int, d_kv: int, cross: bool) -> None:
        super().__init__()
        self.norm, self.attend = RMSNorm(d_model), Attention(d_model, heads, d_kv)
        self.cross_norm = RMSNorm(d_model) if cross else None
        self.cross = Attention(d_model, heads, d_kv) if cross else None
        self.ff_norm = RMSNorm(d_model)
        self.wi, self.wo = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_ff, d_model, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        bias: torch.Tensor,
        past: KeysValues | None = None,
        prompt: KeysValues | None = None,
        over: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KeysValues]:
        """States [B, T, d] -> (the next block's, keys and values of `past` and of these)."""
        normed = self.norm(x)
        own = self.attend.keys_values(normed)
        if past is not None:
            own = KeysValues(torch.cat((past.keys, own.keys), 2), torch.cat((past.values, own.values), 2))
        x = x + self.attend(normed, own, bias)
        if self.cross is not None and self.cross_norm is not None and prompt is not None:
            x = x + self.cross(self.cross_norm(x), prompt, over)
        return x + self.wo(functional.relu(self.wi(self.ff_norm(x)))), own

    def over(self, prompt: torch.Tensor) -> KeysValues:
        """Keys and values of the prompt's states [B, S, d], the same for every token. Only for a block with `cross`."""
        assert self.cross is not None
        return self.cross.keys_values(prompt)


@torch.no_grad()
def start_weights(net: nn.Module) -> None:
    """T5's initialisation: each matrix by its input size, as scores are not scaled."""
    for module in net.modules():
        if isinstance(module, Attention):
            d_model, d_kv = module.q.in_features, module.shape[1]
            nn.init.normal_(module.q.weight, std=(d_model * d_kv) ** -0.5)
            nn.init.normal_(module.k.weight, std=d_model**-0.5)
            nn.init.normal_(module.v.weight, std=d_model**-0.5)
            nn.init.normal_(module.o.weight, std=module.o.in_features**-0.5)
        elif isinstance(module, T5Block):
            nn.init.normal_(module.wi.weight, std=module.wi.in_features**-0.5)
            nn.init.normal_(module.wo.weight, std=module.wo.in_features**-0.5)
        elif isinstance(module, Bias):
            nn.init.normal_(module.values.weight, std=0.1)
