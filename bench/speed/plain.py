"""The baseline: the same decode loop over plain transformers, with each of its experts implementations."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from core.hf.cached_pass import cached_pass

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


class Plain:
    """transformers' own model, everything in memory, greedy decode one token at a time."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        self._model = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def decode(
        self, ids: list[int], tokens: int, implementation: str, threads: int, text: Sequence[int] = ()
    ) -> list[float]:
        """Milliseconds of each of `tokens` decode passes after a prefill of `ids`, on `threads` CPU threads: of the
        likeliest tokens (greedy), or of the first of `text`."""
        self._model.set_experts_implementation(implementation)
        torch.set_num_threads(threads)
        cache = DynamicCache(config=self._model.config)
        inputs = torch.tensor([ids], device=self._device)
        passes = []
        for step in range(tokens + 1):
            began_s = time.perf_counter()
            logits = cached_pass(self._model, inputs, cache, logits_to_keep=1).logits
            likeliest = int(logits[:, -1].argmax(-1))
            token = text[step] if text else likeliest
            inputs = torch.tensor([[token]], device=self._device)
            if step:
                passes.append((time.perf_counter() - began_s) * 1e3)
        return passes

    @torch.inference_mode()
    def prefill(self, ids: list[int], threads: int) -> tuple[float, torch.Tensor]:
        """Seconds of reading a prompt in one pass with grouped_mm experts, and the logits [V] after its last token."""
        torch.set_num_threads(threads)
        self._model.set_experts_implementation("grouped_mm")
        cache, inputs = DynamicCache(config=self._model.config), torch.tensor([ids], device=self._device)
        began_s = time.perf_counter()
        logits = cached_pass(self._model, inputs, cache, logits_to_keep=1).logits[0, -1]
        int(logits.argmax())
        return time.perf_counter() - began_s, logits

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> list[list[float]]:
        """[T][vocab] logits after every token of a text, computed one token at a time by eager experts."""
        self._model.set_experts_implementation("eager")
        cache = DynamicCache(config=self._model.config)
        return [
            cached_pass(self._model, torch.tensor([[token]], device=self._device), cache).logits[0, -1].float().tolist()
            for token in ids
        ]
