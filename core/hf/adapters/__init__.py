"""Blocks of experts that transformers' experts interface does not serve, made to look as if it did.

A block gets a subclass of its own class whose router answers (logits [T, E], weights [T, k], ids [T, k], ...) and which
calls its experts with (hidden, ids, weights); the experts get what that interface marks experts with. Parameters keep
their names. Sums are made in the order of experts, as these blocks make them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from core.hf.adapters.dbrx import adapt_dbrx
from core.hf.adapters.jetmoe import adapt_jetmoe, adapt_jetmoe_attention
from core.hf.adapters.llama4 import adapt_llama4
from core.hf.adapters.longcat import adapt_longcat
from core.hf.adapters.marks import mark
from core.hf.adapters.split import adapt_split

ADAPTERS: dict[str, Callable[[nn.Module], None]] = {  # by the class of transformers that a block, or experts, have
    "Step3p7Experts": mark,
    "Llama4TextMoe": adapt_llama4,
    "LongcatFlashMoE": adapt_longcat,
    "Ernie4_5_VLMoeMoeBlock": adapt_split,
    "DbrxFFN": adapt_dbrx,
    "JetMoeMoE": adapt_jetmoe,
    "JetMoeMoA": adapt_jetmoe_attention,
}
UNFIT: dict[str, str] = {  # and why others cannot be run
    "DogeCDMoE": "its experts are single rows of two tables, smaller than any transfer would be worth",
}


def adapt(model: nn.Module) -> None:
    """Adapt every block that needs it, once. Raises ModelError for a config that an adapter does not serve."""
    for module in list(model.modules()):
        if (adapter := ADAPTERS.get(type(module).__name__)) is not None:
            adapter(module)


def objection(model: nn.Module) -> str:
    """Why a model without experts that can be run has none, where that is known; else ""."""
    return next((UNFIT[name] for module in model.modules() if (name := type(module).__name__) in UNFIT), "")


__all__ = ["adapt", "objection"]
