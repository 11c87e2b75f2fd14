"""The experts of a token and their weights, `core.runtime.program.route` in Triton. Importing it needs triton."""

import triton
import triton.language as tl

from core.runtime.program import choose
from core.runtime.program.gpu.exp import exp, sigmoid
from core.runtime.program.gpu.rms import total

NONE = tl.constexpr(float("-inf"))
NAN, TAKEN, LEAST = tl.constexpr(choose.NAN), tl.constexpr(choose.TAKEN), tl.constexpr(choose.LEAST)
BEYOND = tl.constexpr(1 << 30)


def _order(value: tl.tensor, known: tl.tensor) -> tl.tensor:
    """fp32 numbers as integers of the same order: -0 as 0, NaN as the greatest; TAKEN where not `known`."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & NAN)
    return tl.where(known, tl.where(value == value, flipped, NAN), TAKEN)


order = triton.jit(_order)


def _lane_total(values: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """[1]: the sum of COUNT numbers, of which number i is in lane i mod 8; those after the last are 0."""
    rows = tl.reshape(values, (COUNT // 8, 8))
    sums = tl.zeros((8,), tl.float32)
    for i in tl.static_range(COUNT // 8):
        sums += tl.sum(tl.where((tl.arange(0, COUNT // 8) == i)[:, None], rows, 0.0), 0)
    return total(sums)


lane_total = triton.jit(_lane_total)


def _number_of(order: tl.tensor) -> tl.tensor:
    """The number that has an order."""
    return (order ^ ((order >> 31) & NAN)).to(tl.float32, bitcast=True)


number_of = triton.jit(_number_of)


def _first_of(orders: tl.tensor, at: tl.tensor) -> tl.tensor:
    """The place, among places `at`, of the first of the greatest orders."""
    return tl.min(tl.where(orders == tl.max(orders, 0), at, BEYOND), 0)


first_of = triton.jit(_first_of)


def _keep_groups(orders: tl.tensor, e: tl.tensor, G: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """The orders, with that of -inf in groups that are not kept. G: core.runtime.program.choose.Groups; COUNT: a power
    of two that is no less than G.count."""
    g = tl.arange(0, COUNT)
    best = tl.zeros((COUNT,), tl.float32)
    for group in range(G.count):
        own = tl.where(e // G.size == group, orders, TAKEN)
        sum_ = number_of(tl.max(own, 0))
        if G.best == 2:
            sum_ += number_of(tl.max(tl.where(e == first_of(own, e), TAKEN, own), 0))
        best = tl.where(g == group, sum_, best)
    places, kept = order(best, g < G.count), tl.zeros_like(e)
    for _ in range(G.chosen):
        group = first_of(places, g)
        places = tl.where(g == group, TAKEN, places)
        kept = tl.where(e // G.size == group, 1, kept)
    return tl.where((kept == 0) & (e < G.count * G.size), LEAST, orders)


keep_groups = triton.jit(_keep_groups)


def _score(value: tl.tensor, greatest: tl.tensor, divisor: tl.tensor, SCORE: tl.constexpr) -> tl.tensor:
    """Scores of logits."""
    if SCORE == "softmax":
        return tl.div_rn(exp(value - greatest), tl.zeros_like(value) + divisor)
    if SCORE == "sigmoid":
        return sigmoid(value)
    return value


score = triton.jit(_score)


def _routed(
    logits: tl.tensor,
    bias: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    R: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """R: core.runtime.program.route.Route. Of a token: logits, bias and scales [experts], fp32 -> ids [chosen], int64,
    and weights [chosen], fp32. EXPERTS, CHOSEN and GROUPS: powers of two that are no less, and no less than 8."""
    e = tl.arange(0, EXPERTS)
    known = e < R.experts
    own = tl.load(logits + e, mask=known, other=NONE)
    greatest = tl.zeros((1,), tl.float32)
    divisor = greatest + 1.0
    if R.score == "softmax":
        greatest += tl.max(tl.where(own == own, own, NONE), 0)
        sums = tl.zeros((8,), tl.float32)
        for first in range(0, R.experts, 8):
            k = first + tl.arange(0, 8)
            some = exp(tl.load(logits + k, mask=k < R.experts, other=NONE) - greatest)
            sums += tl.where(k < R.experts, some, 0.0)
        divisor = total(sums)
    if R.bias:
        orders = order(score(own, greatest, divisor, R.score) + tl.load(bias + e, mask=known, other=0), known)
    else:
        orders = order(own, known)
    if R.groups is not None:
        orders = keep_groups(orders, e, R.groups, GROUPS)
    j = tl.arange(0, CHOSEN)
    chosen = tl.zeros((CHOSEN,), tl.float32)
    factors = chosen
    for i in range(R.chosen):
        place = first_of(orders, e)
        orders = tl.where(e == place, TAKEN, orders)
        tl.store(ids + i, place.to(tl.int64))
        chosen = tl.where(j == i, tl.load(logits + place), chosen)
        if R.scales:
            factors = tl.where(j == i, tl.load(scales + place), factors)
    there = j < R.chosen
    if R.score == "softmax_chosen":
        most = tl.max(tl.where((chosen == chosen) & there, chosen, NONE), 0)
        value = tl.where(there, exp(chosen - most), 0.0)
        value = tl.div_rn(value, tl.zeros_like(value) + lane_total(value, CHOSEN))
    else:
        value = score(chosen, greatest, divisor, R.score)
    if R.renormalised:
        value = tl.where(there, value, 0.0)
        value = tl.div_rn(value, tl.zeros_like(value) + (lane_total(value, CHOSEN) + R.epsilon))
    if R.scale != 1:
        value *= R.scale
    if R.scales:
        value *= factors
    tl.store(weights + j, value, mask=there)


routed = triton.jit(_routed)


def _route(
    logits: tl.tensor,
    bias: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    R: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """As `routed`; a program is a token."""
    token = tl.program_id(0).to(tl.int64)
    ids, weights = ids + token * R.chosen, weights + token * R.chosen
    routed(logits + token * R.experts, bias, scales, ids, weights, R, EXPERTS, CHOSEN, GROUPS)


route = triton.jit(_route)
