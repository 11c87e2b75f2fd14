"""The same passes for the reference and for the engine: the prompt, whole or in chunks, then greedy decode steps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from core.hf.cached_pass import cached_pass

PROMPT = torch.randint(3, 250, (24,), generator=torch.Generator().manual_seed(1)).tolist()
STEPS = 24


def plain_transformers(path: Path, dtype: torch.dtype) -> Any:
    """transformers' own model with grouped_mm. Weights are copied out of the file's memory map, where they may lie at
    any address, to aligned ones: the same product over an unaligned matrix can differ in its last bit."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="grouped_mm").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@torch.inference_mode()
def run(
    model: Any, cache: Any, before: Callable[[int], None], steps: int = STEPS, chunks: Sequence[int] = (len(PROMPT),)
) -> tuple[torch.Tensor, list[int]]:
    """Logits [len(PROMPT) + steps, V] and the greedy tokens; `before(step)` is called ahead of each pass but the
    prompt's first chunks."""
    *first, ids = torch.tensor([PROMPT]).split(list(chunks), dim=1)
    logits = [cached_pass(model, chunk, cache).logits[0].clone() for chunk in first]
    tokens = []
    for step in range(steps + 1):
        before(step)
        out = cached_pass(model, ids, cache).logits[0]
        logits.append(out.clone())
        ids = out[-1:].argmax(-1)[None]
        if step < steps:
            tokens.append(int(ids))
    return torch.cat(logits), tokens
