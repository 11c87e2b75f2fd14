"""The weighted sum of a token's experts: fma(weight, output, sum) in the router's order from 0, and then the expert
that all tokens share: + its output, or fma(sigmoid(gate), output, sum)."""

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from core.runtime.program.exp import sigmoid
from core.runtime.program.vectors import (
    FLOATS,
    LANES,
    ZERO,
    code_address,
    everywhere,
    fields,
    fma,
    kernel_code,
    load,
    op,
    pieces,
    store,
)

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
    code, size = kernel_code("combine"), spec.width * 4
    at = fields(code, FIELDS)
    with code.loop("%from", "%to") as token:
        pairs, weights = (
            code.at(at[name], token.index, spec.chosen * each) for name, each in (("pairs", 8), ("weights", 4))
        )
        shared, out = (code.at(at[name], token.index, size) for name in ("shared", "out"))
        if spec.shared == "gated":
            gate = code.load("float", code.at(at["shared_gate"], token.index, 4), 4)
            gate = sigmoid(code, everywhere(code, gate))

        def some(first: str, vectors: list[tuple[int, int]]) -> None:
            with code.loop(0, spec.chosen, 1, [(FLOATS, ZERO)] * len(vectors)) as each:
                row = code.load("i64", code.at(pairs, each.index, 8), 8)
                there = code.let(f"icmp sge i64 {row}, 0")
                weight = everywhere(code, code.load("float", code.at(weights, each.index, 4), 4))
                # of an expert that is left out nothing is read: what was last written here is memory as well
                begin = code.let(f"select i1 {there}, ptr {code.at(at['experts'], row, size)}, ptr {out}")
                each.next = []
                for (start, count), so_far in zip(vectors, each.values, strict=True):
                    value = load(code, code.at(begin, first, 4), start, count, torch.float32)
                    after = fma(code, weight, value, so_far)
                    each.next.append(code.let(f"select i1 {there}, {FLOATS} {after}, {FLOATS} {so_far}"))
            for (start, count), value in zip(vectors, each.values, strict=True):
                if spec.shared:
                    more = load(code, code.at(shared, first, 4), start, count, torch.float32)
                    value = fma(code, gate, more, value) if spec.shared == "gated" else op(code, "fadd", value, more)
                store(code, value, code.at(out, first, 4), start, count, torch.float32)

        full = spec.width - spec.width % (AT_ONCE * LANES)
        if full:
            with code.loop(0, full, AT_ONCE * LANES) as block:
                some(block.index, [(i * LANES, LANES) for i in range(AT_ONCE)])
        if full < spec.width:
            some(str(full), pieces(spec.width - full))
    return code_address(code)
