"""The weighted sum of a token's experts: fma(weight, output, sum) in the router's order from 0, and then the expert
that all tokens share: + its output, or fma(sigmoid(gate), output, sum)."""

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from core.runtime.program.exp import sigmoid
from core.runtime.program.vectors import FLOATS, LANES, ZERO, Kernel

FIELDS = ("experts", "pairs", "weights", "shared", "shared_gate", "out")
AT_ONCE = 8  # vectors of sums
Shared = Literal["", "plain", "gated"]


@dataclass(frozen=True)
class Combine:
    """Of `width` numbers and `chosen` experts a token. `shared`: whether there is a shared expert, and a gate to it."""

    width: int
    chosen: int
    shared: Shared = ""


@functools.cache
def kernel(spec: Combine) -> int:
    """The address of the kernel. A unit is a token: pairs [tokens, chosen], i64, has the rows of experts [n, width] in
    the router's order, and -1 for one that is left out; weights [tokens, chosen]; shared [tokens, width]; shared_gate
    [tokens], before its sigmoid; out [tokens, width]: all fp32."""
    code, size = Kernel("combine"), spec.width * 4
    at = code.fields(FIELDS)
    with code.loop("%from", "%to") as token:
        pairs, weights = (
            code.at(at[name], token.index, spec.chosen * each) for name, each in (("pairs", 8), ("weights", 4))
        )
        shared, out = (code.at(at[name], token.index, size) for name in ("shared", "out"))
        if spec.shared == "gated":
            gate = code.load("float", code.at(at["shared_gate"], token.index, 4), 4)
            gate = sigmoid(code, code.everywhere(gate))
        for block in code.over(spec.width, size=AT_ONCE * LANES):
            with code.loop(0, spec.chosen, 1, [(FLOATS, ZERO)] * len(block.pieces)) as each:
                row = code.integer(pairs, each.index)
                there = code.let(f"icmp sge i64 {row}, 0")
                weight = code.spread(weights, each.index)
                # of an expert that is left out nothing is read: what was last written here is memory as well
                begin = code.let(f"select i1 {there}, ptr {code.at(at['experts'], row, size)}, ptr {out}")
                each.next = []
                for (start, count), so_far in zip(block.pieces, each.values, strict=True):
                    value = code.read(code.at(begin, block.first, 4), start, count, torch.float32)
                    after = code.fma(weight, value, so_far)
                    each.next.append(code.let(f"select i1 {there}, {FLOATS} {after}, {FLOATS} {so_far}"))
            for (start, count), value in zip(block.pieces, each.values, strict=True):
                if spec.shared:
                    more = code.read(code.at(shared, block.first, 4), start, count, torch.float32)
                    value = code.fma(gate, more, value) if spec.shared == "gated" else code.op("fadd", value, more)
                code.write(value, code.at(out, block.first, 4), start, count, torch.float32)
    return code.address()
