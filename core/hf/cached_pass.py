"""A pass of a transformers model with a KV cache, by whatever name the installed transformers takes it: its models call
the argument `cache` since 5.24, and `past_key_values` before."""

import inspect
from functools import partial
from typing import Any, Final

import torch
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

from core.errors import ModelError

ROWS: Final = "logits_to_keep"  # the last n rows, or the rows of a tensor of indices
CACHE: Final = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def cached_pass(model: Any, input_ids: torch.Tensor, cache: DynamicCache, **more: Any) -> Any:
    """The model's output for input_ids [B, T], which follow what the cache holds; it then holds them, too."""
    return model(input_ids=input_ids, use_cache=True, **{CACHE: cache}, **more)


def with_chosen_rows(model: Any) -> None:
    """Give a model whose forward computes the logits of all tokens the argument `logits_to_keep` that others have; one
    that has it stays as it is. Raises ModelError where the logits are not computed by one module."""
    if ROWS in inspect.signature(model.forward).parameters:
        return
    if model.get_output_embeddings() is None:
        raise ModelError(
            f"{model.config.model_type!r} does not work the way Moestro needs: its code computes the logits of all "
            "tokens of a prompt, not of chosen ones. Choose another model."
        )
    vars(model)["forward"] = partial(_of_chosen_rows, model)


def _of_chosen_rows(model: Any, *args: Any, logits_to_keep: int | torch.Tensor = 0, **kwargs: Any) -> Any:
    rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    head = model.get_output_embeddings()
    with head.register_forward_pre_hook(lambda module, given: (given[0][:, rows], *given[1:])):
        return type(model).forward(model, *args, **kwargs)
