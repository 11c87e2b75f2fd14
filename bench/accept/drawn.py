"""The models of `launch.py accept`: shapes of real ones, as large as this machine can hold, with random weights.

Of a large model only what is not an expert is written; one random expert then stands for all, as what is measured is
time and memory. Where bits are compared, every expert is different (bench.models.generate)."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from bench.accept.report import Report
from bench.models.generate import DEMO, TOKENIZER, config
from bench.models.sizes import Sizes
from core.capacity.free_memory import free_bytes
from core.engine import loading
from core.hf.discover import ExpertsSite, find_experts
from core.hf.skeleton import meta_skeleton
from core.memory.codec.measure import random_expert
from core.memory.store import HostStore

FORMAT = "int4-g64"
QWEN = Sizes("qwen3-30b-a3b", 2048, 48, 128, 8, 768, heads=32, kv_heads=4, head_dim=128, vocab=151936)
OLMOE = Sizes("olmoe-7b-a1b", 2048, 16, 64, 8, 1024, heads=16, kv_heads=16, head_dim=128, vocab=50304)
TOY = Sizes("toy", 64, 3, 16, 2, 64, heads=4, kv_heads=2, head_dim=16)
DIFFERENT = Sizes("different", 256, 8, 64, 8, 512, heads=4, kv_heads=2)  # whose bits are compared
GIB = 1 << 30
NEEDS = {QWEN.name: (10 * GIB, 28 * GIB), OLMOE.name: (5 * GIB, 12 * GIB)}  # free device and host memory


@dataclass(frozen=True, slots=True)
class Subject:
    """What a check is made of, and where it may write."""

    folder: Path
    sizes: Sizes  # a large model
    different: Sizes  # a small one of different experts
    device: torch.device
    small: bool = False
    until_s: float = math.inf  # by time.monotonic: when the check is to be over

    def report(self, within: str = "") -> Report:
        """For the figures of a check, or those within one of them."""
        return Report(self.until_s, within)


def subject(folder: Path, small: bool, device: torch.device | None = None, limit_s: float = math.inf) -> Subject:
    """The largest model that fits, or a toy; for a check that is to take no longer than `limit_s`, from now on."""
    device, until_s = device or torch.device("cuda"), time.monotonic() + limit_s
    if small:
        return Subject(folder, TOY, TOY, device, small, until_s)
    free, host = free_bytes(device)[0], free_bytes(torch.device("cpu"))[0]
    fit = (sizes for sizes in (QWEN, OLMOE) if free >= NEEDS[sizes.name][0] and host >= NEEDS[sizes.name][1])
    return Subject(folder, next(fit, DIFFERENT), DIFFERENT, device, until_s=until_s)


def dense_only(folder: Path, sizes: Sizes) -> Path:
    """Writes a checkpoint of everything but the experts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(sizes)), encoding="utf-8")
    for name in TOKENIZER:
        shutil.copyfile(DEMO / name, folder / name)
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, folder / "model.safetensors")  # makes the folder a model
    random = torch.Generator().manual_seed(0)
    meta = meta_skeleton(folder)
    experts = {f"{site.name}.{part}" for site in find_experts(meta) for part in site.parts}

    def drawn(shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.03, generator=random)

    weights = {name: drawn(p.shape) for name, p in meta.named_parameters() if name not in experts}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def one_expert(sizes: Sizes) -> Iterator[None]:
    """Inside, loading a checkpoint takes one random expert for all of them."""
    parts = {name: part.to(torch.bfloat16) for name, part in random_expert(sizes.hidden, sizes.width).items()}

    class Reader:
        """In the place of core.hf.checkpoint.CheckpointReader."""

        def __init__(self, model: Any, files: object) -> None:
            self.sites: list[ExpertsSite] = find_experts(model)

        def read(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
            return parts

        def content_hash(self) -> str:
            return "drawn"

        def __enter__(self) -> Reader:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    class Repeated(HostStore):
        """Encodes the first expert, and copies it."""

        def fill(
            self,
            experts: Iterator[dict[str, torch.Tensor]],
            progress: Callable[[float], None],
            cancel: threading.Event | None,
        ) -> None:
            blob = self.codecs[0].encode(next(experts))
            self.fill_raw((blob for _ in self._rows), progress, cancel)

    with patch.multiple(loading, CheckpointReader=Reader, HostStore=Repeated):
        yield
