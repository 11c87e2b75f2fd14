"""The experts of a token and their weights, from the router's logits.

Experts are chosen by their logits, or, where a bias corrects the choice, by score + bias; the greatest first, of equals
the one with the lower index, and NaN counts as the greatest. A score is
    softmax:         exp(logit - greatest logit) / total over all experts
    softmax_chosen:  the same over the chosen ones alone
    sigmoid:         sigmoid(logit)
A total has expert e, or the chosen one j, in lane e or j mod 8. Weights are the scores, if `renormalised` divided by
(their total + epsilon), then times `scale`, and then times the scale of the expert where each has one.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from core.runtime.program.choose import GroupRoom, Groups, keep_groups, order, room, take_first
from core.runtime.program.exp import exp, sigmoid
from core.runtime.program.vectors import FLOATS, INTS, LANES, WIDTH, ZERO, Kernel, number, pieces
from core.system.native.ir import fp32, splat

FIELDS = ("logits", "bias", "scales", "ids", "weights")
NONE = fp32(float("-inf"))
Score = Literal["softmax", "softmax_chosen", "sigmoid"]


@dataclass(frozen=True)
class Route:
    """`chosen` of `experts`. `bias`: whether there is one; `scales`: whether each expert has a factor of its weight."""

    experts: int
    chosen: int
    score: Score = "softmax"
    bias: bool = False
    renormalised: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    scales: bool = False
    groups: Groups | None = None

    def __post_init__(self) -> None:
        assert not (self.bias and self.score == "softmax_chosen")
        assert 0 < self.chosen <= (self.groups.size * self.groups.chosen if self.groups else self.experts)
        assert not self.groups or self.groups.size * self.groups.count == self.experts


@functools.cache
def kernel(spec: Route) -> int:
    """The address of the kernel. A unit is a token: logits [tokens, experts], bias and scales [experts], fp32 -> ids
    [tokens, chosen], i64, and weights [tokens, chosen], fp32."""
    code = Kernel("route")
    orders, scores = room(code, spec.experts), room(code, spec.experts)
    found, factors = room(code, spec.chosen), room(code, spec.chosen)
    grouped = spec.groups and GroupRoom.on_stack(code, spec.groups)
    at = code.fields(FIELDS)
    with code.loop("%from", "%to") as token:
        logits = code.at(at["logits"], token.index, spec.experts * 4)
        ids, weights = (
            code.at(at[name], token.index, spec.chosen * size) for name, size in (("ids", 8), ("weights", 4))
        )
        divisor = _score(code, spec, logits, at["bias"], scores, orders)
        if spec.groups and grouped:
            keep_groups(code, spec.groups, grouped, orders)
        with code.loop(0, spec.chosen) as j:
            place = take_first(code, orders, spec.experts)
            code.store("i64", place, code.at(ids, j.index, 8), 8)
            for of, into in ((scores, found), (at["scales"], factors))[: 1 + spec.scales]:
                code.store("float", code.load("float", code.at(of, place, 4), 4), code.at(into, j.index, 4), 4)
        _weigh(code, spec, found, factors, divisor, weights)
    return code.address()


def _score(code: Kernel, spec: Route, logits: str, bias: str, scores: str, orders: str) -> str:
    """Write the scores of all experts (before they are divided) and their orders -> what scores are divided by."""
    greatest = ""
    if spec.score == "softmax":
        for some in code.over(spec.experts, [splat("float", LANES, NONE)]):
            some.values = [code.larger(_logits(code, logits, *some.span), some.values[0])]
        greatest = code.everywhere(code.largest(some.values[0]))
    for some in code.over(spec.experts, [ZERO]):
        value = logit = _logits(code, logits, *some.span)
        if spec.score == "softmax":
            value = exp(code, code.op("fsub", value, greatest))
            value = code.filled(value, some.count, ZERO)
            some.values = [code.op("fadd", some.values[0], value)]
        elif spec.score == "sigmoid":
            value = sigmoid(code, value)
        code.store(FLOATS, value, code.at(scores, some.first, 4), WIDTH)
        if not spec.bias:
            code.store(INTS, order(code, logit, some.count), code.at(orders, some.first, 4), WIDTH)
    divisor = code.everywhere(code.total(some.values[0])) if spec.score == "softmax" else ""
    if spec.bias:
        for some in code.over(spec.experts):
            value = code.load(FLOATS, code.at(scores, some.first, 4), WIDTH)
            if divisor:
                value = code.op("fdiv", value, divisor)
            value = code.op("fadd", value, code.read(bias, *some.span, torch.float32))
            code.store(INTS, order(code, value, some.count), code.at(orders, some.first, 4), WIDTH)
    return divisor


def _logits(code: Kernel, logits: str, first: str | int, count: int) -> str:
    """Some logits; -inf in lanes that have none."""
    return code.filled(code.read(logits, first, count, torch.float32), count, splat("float", LANES, NONE))


def _weigh(code: Kernel, spec: Route, found: str, factors: str, divisor: str, weights: str) -> None:
    """Write the weights, from the scores and factors of the chosen experts."""
    values = [code.read(found, first, count, torch.float32) for first, count in pieces(spec.chosen)]
    if spec.score == "softmax":
        values = [code.op("fdiv", value, divisor) for value in values]
    elif spec.score == "softmax_chosen":
        most = splat("float", LANES, NONE)
        for first, count in pieces(spec.chosen):
            most = code.larger(_logits(code, found, first, count), most)
        greatest = code.everywhere(code.largest(most))
        values = [exp(code, code.op("fsub", value, greatest)) for value in values]
        values = _divided(code, spec, values, 0.0)
    if spec.renormalised:
        values = _divided(code, spec, values, spec.epsilon)
    for (first, count), value in zip(pieces(spec.chosen), values, strict=True):
        if spec.scale != 1:
            value = code.op("fmul", value, number(spec.scale))
        if spec.scales:
            value = code.op("fmul", value, code.read(factors, first, count, torch.float32))
        code.write(value, weights, first, count, torch.float32)


def _divided(code: Kernel, spec: Route, values: list[str], epsilon: float) -> list[str]:
    """The values of the chosen experts divided by (their total + epsilon)."""
    sums = ZERO
    for (_, count), value in zip(pieces(spec.chosen), values, strict=True):
        sums = code.op("fadd", sums, code.filled(value, count, ZERO))
    sum_ = code.total(sums)
    if epsilon:
        sum_ = code.let(f"fadd float {sum_}, {fp32(epsilon)}")
    divisor = code.everywhere(sum_)
    return [code.op("fdiv", value, divisor) for value in values]
