"""Finds the Mixture-of-Experts layers of a loaded model, independent of its architecture's name."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from core.errors import ModelError
from core.hf.adapters import objection
from core.memory.codec import PartSpec
from core.system.text_config import text_config

FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")  # set by transformers' decorator
INITIALISED = "_is_hf_initialized"  # set by transformers on a module with no own parameters left to initialise
PARTS = "_moestro_parts"  # on an experts module with stripped weights: their specs


@dataclass(frozen=True, eq=False, slots=True)
class ExpertsSite:
    """One MoE layer. `index` counts MoE layers from 0. References the model's own modules; holds no weights."""

    index: int
    name: str  # dotted name of `module` in the model
    module: nn.Module  # the experts; called with (hidden [T,H], ids [T,k], weights [T,k])
    parent: nn.Module  # the block that owns router, experts and any shared expert
    router: nn.Module
    num_experts: int
    top_k: int
    parts: dict[str, PartSpec]  # of ONE expert, in the model's own layout
    has_gate: bool
    has_bias: bool
    is_transposed: bool  # weights are [in, out] instead of [out, in]
    is_concatenated: bool  # gate and up are concatenated; False: interleaved
    has_post_expert_norm: bool


class RouterOutput(NamedTuple):
    """A router's output in a fixed order; models and versions of transformers differ in theirs."""

    logits: torch.Tensor  # [T, E]
    weights: torch.Tensor  # [T, k]
    ids: torch.Tensor  # [T, k] integers


def read_router(site: ExpertsSite, output: tuple[torch.Tensor, ...]) -> RouterOutput:
    """Identify a router's outputs: ids are the integer tensor, logits are E wide, and where weights are E wide too (k =
    E), logits are at the opposite end from the ids. Raises ModelError for any other output."""
    tensors = output if isinstance(output, tuple) else ()
    floats = [t.is_floating_point() for t in tensors]
    ids = [i for i, float_ in enumerate(floats) if not float_]
    wide = [i for i, float_ in enumerate(floats) if float_ and tensors[i].shape[-1] == site.num_experts]
    if not wide and tensors and tensors[0].shape[-1] == site.num_experts + 1:  # one extra: "no expert" (zaya)
        tensors, wide = (tensors[0][..., :-1], *tensors[1:]), [0]
    if len(tensors) < 3 or not ids or not wide:
        raise ModelError(f"The router {type(site.router).__name__} does not return logits, weights and expert ids")
    logits = max(wide, key=lambda i: abs(i - ids[0]))
    weights = next(i for i in range(3) if i not in (ids[0], logits))
    return RouterOutput(tensors[logits], tensors[weights], tensors[ids[0]])


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' experts interface supports this module."""
    return all(hasattr(module, flag) for flag in FLAGS)


def part_specs(module: nn.Module) -> dict[str, PartSpec]:
    """Shape and dtype of one expert's parts: from the parameters [E, ...], or as recorded when they were stripped."""
    noted: dict[str, PartSpec] | None = getattr(module, PARTS, None)
    if noted is not None:
        return noted
    experts: int = getattr(module, "num_experts")  # noqa: B009 - nn.Module types every attribute as Tensor | Module
    return {
        name: PartSpec(tuple(p.shape[1:]), p.dtype)
        for name, p in module.named_parameters(recurse=False)
        if p.dim() >= 2 and p.shape[0] == experts
    }


def strip(model: nn.Module) -> None:
    """Delete the stacked expert parameters and record their specs. The checkpoint's expert weights then have no target
    and are never read."""
    for name, module in model.named_modules():
        if is_experts(module):
            specs = part_specs(module)
            for part in specs:
                delattr(module, part)
            setattr(module, PARTS, specs)
            for owner in (module, model.get_submodule(name.rpartition(".")[0])):
                setattr(owner, INITIALISED, True)


def find_experts(model: nn.Module) -> list[ExpertsSite]:
    """Every MoE layer in order. Raises ModelError when there is none, or when the layers' experts differ."""
    recorded = _recorded_routers(model)
    sites: list[ExpertsSite] = []
    for name, module in model.named_modules():
        if is_experts(module):
            parent = model.get_submodule(name.rpartition(".")[0])
            router = _router(parent, recorded, name)
            flag: dict[str, Any] = {f: getattr(module, f) for f in FLAGS}
            sites.append(
                ExpertsSite(
                    index=len(sites),
                    name=name,
                    module=module,
                    parent=parent,
                    router=router,
                    top_k=_top_k(model, parent, router),
                    parts=part_specs(module),
                    has_post_expert_norm=bool(getattr(module, "has_post_expert_norm", False)),
                    **flag,
                )
            )
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    if not sites:
        why = objection(model) or "transformers' experts interface serves none of its layers"
        raise ModelError(
            f"{kind!r} is not a Mixture-of-Experts model that Moestro can run: {why}. Choose another model."
        )
    if any(s.parts != sites[0].parts or s.num_experts != sites[0].num_experts for s in sites):
        raise ModelError(
            f"The layers of this {kind!r} model have experts of different number or size, which Moestro "
            "does not support yet. Choose another model."
        )
    return sites


def _recorded_routers(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Router classes that the model declares for `output_router_logits`."""
    recorders: list[Any] = []
    for module in model.modules():
        declared = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        recorders += declared if isinstance(declared, list) else [declared]
    return tuple(getattr(r, "target_class", r) for r in recorders if r is not None)


def _router(parent: nn.Module, recorded: tuple[type[nn.Module], ...], name: str) -> nn.Module:
    named = [getattr(parent, attribute, None) for attribute in ("gate", "router")]
    for child in (*(c for c in parent.modules() if c is not parent and isinstance(c, recorded)), *named):
        if isinstance(child, nn.Module):
            return child
    raise ModelError(
        f"No router was found next to the experts {name!r}: this model is built in a way that Moestro does "
        "not know. Choose another model."
    )


def _top_k(model: nn.Module, parent: nn.Module, router: nn.Module) -> int:
    for owner in (router, parent, text_config(getattr(model, "config", None))):
        for attribute in ("top_k", "num_experts_per_tok", "top_k_experts"):
            value = getattr(owner, attribute, None)
            if isinstance(value, int):
                return value
    raise ModelError("How many experts a token uses could not be found in this model. Choose another model.")
