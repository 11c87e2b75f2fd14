"""Text-only use of multimodal models: the other parts are removed before weights are read.

The rest computes the same as the whole model for a text prompt: it is transformers' own code, called the same way,
which uses those parts only when given an image or a sound.
"""

from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from core.hf.text_to_text import SERVED
from core.system.text_config import text_config

LEFT_OUT = "_moestro_left_out"  # on a model: names of the removed parts
MAPPINGS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)


def text_class(config: Any) -> tuple[Any, Any] | None:
    """(config, class) that transformers would use for text generation, or None. The config is the nested one where the
    class is that of a text model, as AutoModelForCausalLM has it."""
    if config.is_encoder_decoder and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        kind = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)]
        return (config, kind) if kind.__name__ in SERVED else None
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
    """Remove every part of a model that is neither its text model nor its output layer; returns their names, also on
    repeated calls. A text-only model stays unchanged."""
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
