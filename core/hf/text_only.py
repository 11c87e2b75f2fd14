"""Models of text and images, video or sound, kept to their text: the other parts are taken out before weights are read.

What is left computes what the whole model computes for a prompt of text: transformers' own code, called the same way,
which looks at those parts only when it is given an image or a sound.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from core.system.text_config import text_config

LEFT_OUT = "_moestro_left_out"  # on a model: names of the parts that were taken out
MAPPINGS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)


def text_class(config: Any) -> tuple[Any, Any] | None:
    """(config, class) of what transformers would write text with, or None. The config is the nested one where the
    class is that of a text model, as AutoModelForCausalLM has it."""
    for mapping in MAPPINGS:
        if type(config) not in mapping or config.is_encoder_decoder:
            continue
        kind = mapping[type(config)]
        text = text_config(config)
        if text is not config and kind.config_class is type(text):
            text.dtype = text.dtype or config.dtype
            return text, kind
        return config, kind
    return None


def keep_text(model: Any) -> tuple[str, ...]:
    """Take every part out of a model that is neither its text model nor its output layer; returns their names, also
    when called again. A model of text alone is left as it is."""
    known: tuple[str, ...] | None = getattr(model, LEFT_OUT, None)
    if known is not None:
        return known
    text = text_config(model.config)
    found = next(
        (
            name
            for name, module in model.named_modules()
            if name and getattr(module, "config", None) is text and hasattr(module, "layers")
        ),
        "",
    )
    left_out: list[str] = []
    if text is not model.config and found:
        output = model.get_output_embeddings()
        owner: nn.Module = model
        for step in found.split("."):
            for name, child in list(owner.named_children()):
                if name != step and child is not output and next(child.parameters(), None) is not None:
                    setattr(owner, name, None)
                    left_out.append(name)
            owner = owner.get_submodule(step)
    setattr(model, LEFT_OUT, tuple(left_out))
    return tuple(left_out)
