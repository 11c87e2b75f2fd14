"""What a layer has after attention: a dense feed-forward layer, or a router and experts, of which one may be shared by
all tokens. Found by trying the modules on random states."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from core.errors import ModelError
from core.hf.discover import ExpertsSite, RouterOutput, read_router
from core.memory.codec.fast.steps import named, single
from core.runtime.program import route
from core.runtime.program.activation import activation_of
from core.runtime.program.choose import Groups
from core.runtime.program.gate import Gate
from core.runtime.program.route import Route, Score
from core.runtime.program.weights import (
    CLOSE,
    FP32,
    TRIED,
    NormWeight,
    Weight,
    drawn,
    forward,
    has_weights,
    known,
    near,
    plain_weight,
    replaced,
    weight_of,
)

SCALES = "routed_scaling_factor", "router_scaling_factor", "route_scale"  # of weights
DENSE = (  # names of first products, and of the last one
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
)
COUNTS = "n_group", "num_group", "n_groups"  # of groups of experts
GROUPED = 4 * TRIED  # random rows for a router that may have such: rules for choosing groups differ in few rows
SAME = 0.9  # of random rows for which a rule has to choose logits as the router does; equal ones are alike
EPSILON = 1e-20  # added to totals of sigmoids by all models with such routers: no trial shows it


@dataclass(frozen=True, slots=True)
class Dense:
    """down(activation(gate(x)) * up(x)). `first`: gates and ups, one after the other, of one matrix or of two."""

    first: tuple[Weight, ...]
    down: Weight
    form: Gate


@dataclass(frozen=True, slots=True)
class Routed:
    """A router and its experts. `correction` [experts], fp32, is added to scores for the choice alone; `shared` is
    computed for every token, times the sigmoid of `shared_gate` where there is one. `batched`: the router's module gets
    states [1, T, H]. `beside`: of experts beside a dense
    layer, `shared`, with other states than that gets."""

    site: ExpertsSite
    router: Weight
    route: Route
    correction: torch.Tensor | None
    shared: Dense | None
    shared_gate: Weight | None
    batched: bool = False
    beside: Beside | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """Norms of the residual stream for the router and for the experts, and of what both layers return, before it is
    added. `scales` [experts], fp32, multiply the experts' weights."""

    router: NormWeight
    experts: NormWeight
    after_experts: NormWeight
    after_shared: NormWeight
    scales: torch.Tensor


class _Seen(NamedTuple):
    """A pass of the block over random states."""

    x: torch.Tensor  # [T, H]
    router: RouterOutput
    ids: torch.Tensor  # [T, k] as the experts get them
    weights: torch.Tensor
    experts: torch.Tensor  # [T, H] in place of what they return
    output: torch.Tensor
    batched: bool


@torch.inference_mode()
def dense_of(module: Any, dtype: torch.dtype) -> Dense:
    """A dense feed-forward layer for states of a type."""
    names = next((names for names in DENSE if all(hasattr(module, name) for name in names)), DENSE[0])
    known(module, names)
    *parts, last = (getattr(module, name) for name in names)
    *first, down = (weight_of(one) for one in (*parts, last))
    between = drawn(FP32, TRIED, 2 * down.inputs)
    found = activation_of(module, lambda rows: _between(module, parts, last, rows.to(dtype)), between, down.inputs)
    if found is None or found.interleaved:
        raise ModelError(f"the activation of {type(module).__name__} is not known")
    return Dense(tuple(first), down, found)


def _between(module: Any, first: Sequence[nn.Module], last: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The hidden states of a dense layer whose first products would be the parts of these rows."""
    with contextlib.ExitStack() as stack:
        for one, part in zip(first, rows.chunk(len(first), -1), strict=True):
            stack.enter_context(replaced(one, lambda x, part=part: part))
        stack.enter_context(replaced(last, lambda x: x))
        return torch.as_tensor(forward(module, rows))


@torch.inference_mode()
def routed_of(site: ExpertsSite, dtype: torch.dtype) -> Routed:
    """The router of a block, its experts, and the one that all tokens share."""
    block: Any = site.parent
    shared, shared_gate, names = None, None, list[str]()
    for name, child in block.named_children():
        if child in (site.module, site.router) or not has_weights(child):
            names.append(name)
        elif hasattr(child, "down_proj") and shared is None:
            shared = name
        elif isinstance(child, nn.Module) and getattr(child, "out_features", 0) == 1 and shared_gate is None:
            shared_gate = name
    own = [name for name, one in block.named_parameters(recurse=False) if one.numel() == site.num_experts]
    known(block, (*names, *own, *(name for name in (shared, shared_gate) if name)))
    router, vectors = _matrix(site)
    rows = GROUPED if _numbers(site, COUNTS) else TRIED
    seen = _seen(site, drawn(dtype, rows, router.shape[1]))
    beside = [getattr(block, name) if name else None for name in (shared, shared_gate)]
    scale = _combined(site, seen, *beside)
    bias = _bias(seen, router, vectors)
    rule, correction = _rule(site, seen, [one for one in vectors if one is not bias])
    return Routed(
        site,
        plain_weight(router, site.router, bias),
        replace(rule, scale=rule.scale * scale),
        correction,
        dense_of(getattr(block, shared), dtype) if shared else None,
        weight_of(getattr(block, shared_gate)) if shared_gate else None,
        seen.batched,
    )


def _matrix(site: ExpertsSite) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The matrix of a router, and vectors of a number for each expert, in fp32."""
    owners = [(site.router, True), (site.parent, False)]
    tensors = [
        one.detach()
        for owner, whole in owners
        for one in (*owner.parameters(recurse=whole), *owner.buffers(recurse=whole))
    ]
    vectors = [one.float().flatten().contiguous() for one in tensors if one.numel() == site.num_experts]
    others = [one for one in tensors if one.numel() != site.num_experts]
    if len(others) != 1 or others[0].dim() != 2:
        raise ModelError(f"routers of the kind {type(site.router).__name__} are not known")
    return others[0], vectors


def _bias(seen: _Seen, router: torch.Tensor, vectors: list[torch.Tensor]) -> torch.Tensor | None:
    """Which of the vectors is added to a router's product, if any."""
    product, logits = seen.x.float() @ router.float().t(), seen.router.logits
    nearest = min(
        (None, *vectors), key=lambda one: float((logits - (product if one is None else product + one)).norm())
    )
    if not near(product if nearest is None else product + nearest, logits):
        raise ModelError("a router does more than one product")
    return nearest


def _seen(site: ExpertsSite, x: torch.Tensor) -> _Seen:
    """Run the block with random numbers in place of what experts return."""
    given: list[Any] = []
    experts = drawn(x.dtype, *x.shape).flip(0)

    def instead(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        given[:] = hidden, ids, weights
        return experts.view(hidden.shape)

    answers: list[RouterOutput] = []
    sizes: list[int] = []

    def answered(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        sizes.extend(one.dim() for one in args[:1])
        answers.append(read_router(site, output))

    hook = site.router.register_forward_hook(answered)
    try:
        with replaced(site.module, instead):
            output = forward(site.parent, x[None])
    finally:
        hook.remove()
    if len(given) != 3 or len(answers) != 1 or not torch.equal(given[0].reshape(x.shape), x):
        raise ModelError(f"{type(site.parent).__name__} calls its experts in another way")
    output = output[0] if isinstance(output, tuple) else output
    return _Seen(x, answers[0], given[1], given[2].float(), experts, output.reshape(x.shape), sizes == [3])


def _combined(site: ExpertsSite, seen: _Seen, shared: Any, shared_gate: Any) -> float:
    """What a block multiplies its experts' outputs by. Raises ModelError where it adds them in another way."""
    more = torch.zeros(())
    if shared is not None:
        more = forward(shared, seen.x).float()
        more = more if shared_gate is None else forward(shared_gate, seen.x).float().sigmoid() * more
    elif shared_gate is not None:
        raise ModelError("a gate without a shared expert is not known")
    for scale in (1.0, *_numbers(site, SCALES)):
        if near(seen.output, seen.experts.float() * scale + more):
            return scale
    raise ModelError("a block adds the outputs of its experts in a way that is not known")


def _rule(site: ExpertsSite, seen: _Seen, vectors: list[torch.Tensor]) -> tuple[Route, torch.Tensor | None]:
    """How experts are chosen and weighed."""
    logits = seen.router.logits.float().contiguous()
    wanted_logits, order = logits.gather(-1, seen.ids).sort(-1)
    wanted, best, most = seen.weights.gather(-1, order), None, 0.0
    for rule, correction in _rules(site, vectors):
        ids, weights = torch.empty(len(logits), rule.chosen, dtype=torch.int64), torch.empty(len(logits), rule.chosen)
        at = {"logits": logits, "ids": ids, "weights": weights} | ({} if correction is None else {"bias": correction})
        single(route.kernel(rule), named(route.FIELDS, **at), len(logits))
        chosen, order = logits.gather(-1, ids).sort(-1)
        same = (chosen == wanted_logits).all(-1)
        found = weights.gather(-1, order)
        agree = float(same.float().mean())
        if agree >= SAME and agree > most and torch.allclose(found[same], wanted[same], rtol=CLOSE, atol=1e-4):
            best, most = (rule, correction), agree
            if most == 1:
                break
    if best is not None:
        return best
    raise ModelError(f"{type(site.router).__name__} weighs experts by a rule that is not known")


def _rules(site: ExpertsSite, vectors: list[torch.Tensor]) -> Iterator[tuple[Route, torch.Tensor | None]]:
    """Rules that a router may have: those that use more of what it has come first."""
    scales = {float(value) for value in _numbers(site, SCALES)} - {1.0}
    count = next(iter(_numbers(site, COUNTS)), 1)
    kept = next(iter(_numbers(site, ("topk_group",))), 1)
    groups: list[Groups | None] = [None]
    if count > kept:
        size = site.num_experts // int(count)
        groups[:0] = [Groups(int(count), size, int(kept), best) for best in (2, 1) if best <= size]
    scores: tuple[Score, ...] = ("softmax", "sigmoid") if not vectors else ("sigmoid", "softmax")
    plain = Route(site.num_experts, site.top_k)
    nothing = torch.zeros(site.num_experts)  # so that scores are added up to those of groups, not logits
    for grouped, vector, score, scale in itertools.product(groups, (*vectors, None), scores, (*scales, 1.0)):
        correction = nothing if vector is None and grouped is not None and grouped.best > 1 else vector
        for renormalised in (False, True):
            yield (
                replace(
                    plain,
                    score=score,
                    bias=correction is not None,
                    renormalised=renormalised,
                    epsilon=EPSILON if renormalised and score == "sigmoid" else 0.0,
                    scale=scale,
                    groups=grouped,
                ),
                correction,
            )
    yield replace(plain, score="softmax_chosen"), None


def _numbers(site: ExpertsSite, names: tuple[str, ...]) -> list[float]:
    """The numbers that a router or its block has under such names."""
    found = [getattr(owner, name, None) for owner in (site.router, site.parent) for name in names]
    return [one for one in found if isinstance(one, (int, float)) and not isinstance(one, bool)]
