"""Every model type of the installed transformers that may have experts, by the fields of its config."""

import re
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.architectures.tiny import INNER, fields_of

EXPERTS = re.compile(r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_experts_per_tok")


def moe_types() -> list[str]:
    """Names of configs that have such a field themselves or in a config that they nest, in order."""
    return [name for name in CONFIG_MAPPING if _has_experts(name)]


def _has_experts(model_type: str, depth: int = 0) -> bool:
    kind: Any = CONFIG_MAPPING[model_type]
    nested = getattr(kind, "sub_configs", None) or {}
    if any(EXPERTS.fullmatch(name) for owner in (kind, *nested.values()) for name in fields_of(owner)):
        return True
    inner = [getattr(sub, "model_type", "") or INNER.get((model_type, name), "") for name, sub in nested.items()]
    return depth < 3 and any(name in CONFIG_MAPPING and _has_experts(name, depth + 1) for name in inner)
