"""A plain model whose routers answer what a test says."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import DynamicCache

from core.hf.cached_pass import cached_pass
from core.hf.discover import find_experts
from tests.equality.passes import PROMPT

STEPS = 3


def passes(model: Any, cache: Any, before: Callable[[int], None] = lambda step: None) -> torch.Tensor:
    """Logits of the prompt in two chunks and of a few fixed tokens after it, so that all runs see the same ones."""
    tokens = [PROMPT[:15], PROMPT[15:], *([t] for t in PROMPT[3 : 3 + STEPS])]
    logits = []
    with torch.inference_mode():
        for step, ids in enumerate(tokens):
            before(step)
            logits.append(cached_pass(model, torch.tensor([ids]), cache).logits[0].clone())
    return torch.cat(logits)


def routers_of(plain: Any) -> list[Any]:
    return [site.router for site in find_experts(plain)]


def hooked(plain: Any, routers: Sequence[Any], answer: Callable[[int, Any, torch.Tensor], Any]) -> torch.Tensor:
    """Every router but the first returns `answer(layer, its own answer, the input of the router before it)`."""
    given: dict[int, torch.Tensor] = {}

    def hook(layer: int, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        given[layer] = args[0]
        return answer(layer, output, given[layer - 1]) if layer else output

    with ExitStack() as hooks:
        for layer, router in enumerate(routers):
            hooks.enter_context(router.register_forward_hook(functools.partial(hook, layer)))
        return passes(plain, DynamicCache(config=plain.config))


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-4))
