"""The experts of a token and their weights, from the router's logits.

Experts are chosen by their logits, or, where a bias corrects the choice, by score + bias; the greatest first, of equals
the one with the lower index, and NaN counts as the greatest. A score is
    softmax:         exp(logit - greatest logit) / total over all experts
    softmax_chosen:  the same over the chosen ones alone
    sigmoid:         sigmoid(logit)
A total has expert e, or the chosen one j, in lane e or j mod 8. Weights are the scores, if `renormalised` divided by
(their total + epsilon), and then times `scale`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from core.runtime.program.exp import exp, sigmoid
from core.runtime.program.vectors import (
    FLOATS,
    INTS,
    LANES,
    WIDTH,
    ZERO,
    code_address,
    everywhere,
    fields,
    filled,
    kernel_code,
    larger,
    largest,
    load,
    number,
    op,
    over,
    pieces,
    store,
    total,
)
from core.system.native.ir import Code, fp32, splat, vector

FIELDS = ("logits", "bias", "ids", "weights")
NAN, TAKEN = 0x7FFFFFFF, -0x80000000  # as orders: see _order
NONE = fp32(float("-inf"))


@dataclass(frozen=True)
class Route:
    """`chosen` of `experts`. `bias`: whether there is one."""

    experts: int
    chosen: int
    score: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    bias: bool = False
    renormalised: bool = False
    epsilon: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        assert 0 < self.chosen <= self.experts and not (self.bias and self.score == "softmax_chosen")


@functools.cache
def kernel(spec: Route) -> int:
    """The address of the kernel. A unit is a token: logits [tokens, experts] and bias [experts], fp32 -> ids [tokens,
    chosen], i64, and weights [tokens, chosen], fp32."""
    code, room = kernel_code("route"), -(-spec.experts // LANES)
    orders = code.let(f"alloca [{room * WIDTH} x i8], align {WIDTH}")
    scores = code.let(f"alloca [{room * WIDTH} x i8], align {WIDTH}")
    found = code.let(f"alloca [{-(-spec.chosen // LANES) * WIDTH} x i8], align {WIDTH}")
    at = fields(code, FIELDS)
    with code.loop("%from", "%to") as token:
        logits = code.at(at["logits"], token.index, spec.experts * 4)
        ids, weights = (
            code.at(at[name], token.index, spec.chosen * size) for name, size in (("ids", 8), ("weights", 4))
        )
        divisor = _score(code, spec, logits, at["bias"], scores, orders)
        _choose(code, spec, scores, orders, ids, found)
        _weigh(code, spec, found, divisor, weights)
    return code_address(code)


def _score(code: Code, spec: Route, logits: str, bias: str, scores: str, orders: str) -> str:
    """Write the scores of all experts (before they are divided) and their orders -> what scores are divided by."""
    greatest = ""
    if spec.score == "softmax":

        def most(first: str | int, count: int, values: list[str]) -> list[str]:
            return [larger(code, _logits(code, logits, first, count), values[0])]

        greatest = everywhere(code, largest(code, over(code, spec.experts, most, [splat("float", LANES, NONE)])[0]))

    def score(first: str | int, count: int, sums: list[str]) -> list[str]:
        value = order = _logits(code, logits, first, count)
        if spec.score == "softmax":
            value = exp(code, op(code, "fsub", value, greatest))
            value = filled(code, value, count, ZERO)
            sums = [op(code, "fadd", sums[0], value)]
        elif spec.score == "sigmoid":
            value = sigmoid(code, value)
        code.store(FLOATS, value, code.at(scores, first, 4), WIDTH)
        if not spec.bias:
            code.store(INTS, _order(code, order, count), code.at(orders, first, 4), WIDTH)
        return sums

    sums = over(code, spec.experts, score, [ZERO])[0]
    divisor = everywhere(code, total(code, sums)) if spec.score == "softmax" else ""
    if spec.bias:

        def biased(first: str | int, count: int, values: list[str]) -> list[str]:
            value = code.load(FLOATS, code.at(scores, first, 4), WIDTH)
            if divisor:
                value = op(code, "fdiv", value, divisor)
            value = op(code, "fadd", value, load(code, bias, first, count, torch.float32))
            code.store(INTS, _order(code, value, count), code.at(orders, first, 4), WIDTH)
            return []

        over(code, spec.experts, biased)
    return divisor


def _logits(code: Code, logits: str, first: str | int, count: int) -> str:
    """Some logits; -inf in lanes that have none."""
    return filled(code, load(code, logits, first, count, torch.float32), count, splat("float", LANES, NONE))


def _order(code: Code, value: str, count: int) -> str:
    """Numbers as integers of the same order: -0 as 0, NaN as the largest; TAKEN in the lanes from `count` on."""
    known = code.let(f"fcmp ord {FLOATS} {value}, {ZERO}")
    bits = code.let(f"bitcast {FLOATS} {op(code, 'fadd', value, number(0))} to {INTS}")
    sign = code.let(f"ashr {INTS} {bits}, {splat('i32', LANES, 31)}")
    nan = splat("i32", LANES, NAN)
    flipped = code.let(f"xor {INTS} {bits}, {code.let(f'and {INTS} {sign}, {nan}')}")
    found = code.let(f"select <{LANES} x i1> {known}, {INTS} {flipped}, {INTS} {nan}")
    return filled(code, found, count, splat("i32", LANES, TAKEN), INTS)


def _choose(code: Code, spec: Route, scores: str, orders: str, ids: str, found: str) -> None:
    """Write the ids of the chosen experts, and their scores to `found`."""
    room = -(-spec.experts // LANES) * LANES
    with code.loop(0, spec.chosen) as j:
        begun = [(INTS, splat("i32", LANES, TAKEN)), (INTS, ZERO)]
        with code.loop(0, room, LANES, begun) as each:  # of each lane the first of the greatest
            order = code.load(INTS, code.at(orders, each.index, 4), WIDTH)
            start = code.broadcast("i32", code.let(f"trunc i64 {each.index} to i32"), LANES)
            more = code.let(f"icmp sgt {INTS} {order}, {each.values[0]}")
            each.next = [
                code.let(f"select <{LANES} x i1> {more}, {INTS} {new}, {INTS} {old}")
                for new, old in zip((order, start), each.values, strict=True)
            ]
        most, starts = each.values
        greatest = code.call("i32", f"llvm.vector.reduce.smax.v{LANES}i32", (INTS, most))
        equal = code.let(f"icmp eq {INTS} {most}, {code.broadcast('i32', greatest, LANES)}")
        places = code.let(f"add {INTS} {starts}, {vector('i32', range(LANES))}")
        places = code.let(f"select <{LANES} x i1> {equal}, {INTS} {places}, {INTS} {splat('i32', LANES, NAN)}")
        place = code.let(f"zext i32 {code.call('i32', f'llvm.vector.reduce.smin.v{LANES}i32', (INTS, places))} to i64")
        code.store("i64", place, code.at(ids, j.index, 8), 8)
        code.store("float", code.load("float", code.at(scores, place, 4), 4), code.at(found, j.index, 4), 4)
        code.store("i32", str(TAKEN), code.at(orders, place, 4), 4)


def _weigh(code: Code, spec: Route, found: str, divisor: str, weights: str) -> None:
    """Write the weights, from the scores of the chosen experts."""
    values = [load(code, found, first, count, torch.float32) for first, count in pieces(spec.chosen)]
    if spec.score == "softmax":
        values = [op(code, "fdiv", value, divisor) for value in values]
    elif spec.score == "softmax_chosen":
        most = splat("float", LANES, NONE)
        for first, count in pieces(spec.chosen):
            most = larger(code, _logits(code, found, first, count), most)
        greatest = everywhere(code, largest(code, most))
        values = [exp(code, op(code, "fsub", value, greatest)) for value in values]
        values = _divided(code, spec, values, 0.0)
    if spec.renormalised:
        values = _divided(code, spec, values, spec.epsilon)
    for (first, count), value in zip(pieces(spec.chosen), values, strict=True):
        if spec.scale != 1:
            value = op(code, "fmul", value, number(spec.scale))
        store(code, value, weights, first, count, torch.float32)


def _divided(code: Code, spec: Route, values: list[str], epsilon: float) -> list[str]:
    """The values of the chosen experts divided by (their total + epsilon)."""
    sums = ZERO
    for (_, count), value in zip(pieces(spec.chosen), values, strict=True):
        sums = op(code, "fadd", sums, filled(code, value, count, ZERO))
    sum_ = total(code, sums)
    if epsilon:
        sum_ = code.let(f"fadd float {sum_}, {fp32(epsilon)}")
    divisor = everywhere(code, sum_)
    return [op(code, "fdiv", value, divisor) for value in values]
