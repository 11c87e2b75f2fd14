"""Adapts expert blocks that transformers' experts interface does not support to that interface.

A block gets a subclass of its own class whose router returns (logits [T, E], weights [T, k], ids [T, k], ...) and which
calls its experts with (hidden, ids, weights); the experts get the attributes that the interface sets. Parameters keep
their names. Outputs are summed in the order of experts, as these blocks do.
"""

from collections.abc import Callable

from torch import nn

from core.hf.adapters.dbrx import adapt_dbrx
from core.hf.adapters.jamba import adapt_jamba
from core.hf.adapters.jetmoe import adapt_jetmoe, adapt_jetmoe_attention
from core.hf.adapters.llama4 import adapt_llama4
from core.hf.adapters.longcat import adapt_longcat
from core.hf.adapters.phimoe import adapt_phimoe_rotary
from core.hf.adapters.split import adapt_split
from core.hf.adapters.switch import adapt_switch
from core.hf.expert_attributes import set_expert_attributes

ADAPTERS: dict[str, Callable[[nn.Module], None]] = {  # by transformers' class of the block, experts or embedding
    "Step3p7Experts": set_expert_attributes,
    "Llama4TextMoe": adapt_llama4,
    "LongcatFlashMoE": adapt_longcat,
    "Ernie4_5_VLMoeMoeBlock": adapt_split,
    "DbrxFFN": adapt_dbrx,
    "JambaSparseMoeBlock": adapt_jamba,
    "JetMoeMoE": adapt_jetmoe,
    "JetMoeMoA": adapt_jetmoe_attention,
    "SwitchTransformersSparseMLP": adapt_switch,
    "PhimoeRotaryEmbedding": adapt_phimoe_rotary,
}
UNFIT: dict[str, str] = {  # unsupported classes and the reason
    "DogeCDMoE": "its experts are single rows of two tables, smaller than any transfer would be worth"
}


def adapt(model: nn.Module) -> None:
    """Adapt every block that needs it, once. Raises ModelError for a config that an adapter does not support."""
    for module in list(model.modules()):
        if (adapter := ADAPTERS.get(type(module).__name__)) is not None:
            adapter(module)


def objection(model: nn.Module) -> str:
    """Why a model has no experts that can be offloaded, where that is known; else ""."""
    return next((UNFIT[name] for module in model.modules() if (name := type(module).__name__) in UNFIT), "")


__all__ = ["adapt", "objection"]
