"""Carries a plan out: dense weights into a model without experts, experts encoded into host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from core.errors import BudgetError, ModelError
from core.fit import Plan
from core.hf import CheckpointReader, ExpertsSite, load_skeleton
from core.memory.store import HostStore

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load leaves in memory."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    store: HostStore
    sites: tuple[ExpertsSite, ...]
    model_hash: str


def load(plan: Plan, progress: Progress, cancel: threading.Event | None) -> Loaded:
    """Carry a plan out. Raises BudgetError before anything is read when it does not fit, Cancelled when stopped."""
    if problem := plan.fit().problem:
        raise BudgetError(problem)
    progress("Reading dense weights", 0.0)
    tokenizer = load_tokenizer(plan.files.path)
    model = load_skeleton(plan.files, plan.dtype, plan.device)
    own_memory(model)
    with CheckpointReader(model, plan.files) as reader:
        layers, experts = len(reader.sites), plan.sizes.shape.experts
        store = HostStore(plan.codec, layers * experts, pin=plan.device.type == "cuda")

        def read() -> Iterator[dict[str, torch.Tensor]]:
            for eid in range(layers * experts):
                yield reader.read(*divmod(eid, experts))

        store.fill(read(), lambda share: progress(f"Reading {layers * experts} experts", 0.1 + 0.9 * share), cancel)
        return Loaded(model, tokenizer, store, tuple(reader.sites), reader.content_hash())


def own_memory(model: torch.nn.Module) -> None:
    """Copy dense weights out of the checkpoint's memory map: the file can then be moved or deleted, and products run on
    aligned addresses, on which results do not depend on where in the file a weight happens to lie."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ModelError when it is missing or needs code of the model's own."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True,
                                                                           trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{path} has no usable tokenizer: {error}. Put the model's tokenizer files beside its "
                         "config.json.") from error
    return tokenizer
