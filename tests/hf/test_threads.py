"""Models are looked at from several threads: an estimate follows a slider while a model loads or is imported."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from core.hf import load_skeleton, meta_skeleton, outline
from tests.checkpoints import make_checkpoint


@pytest.mark.long(0.1)
def test_looking_at_models_in_parallel_mixes_nothing_up(tmp_path: Path) -> None:
    """transformers sets the number type of new tensors for the whole process while it builds a model."""
    dtypes = (torch.float32, torch.bfloat16)
    paths = [make_checkpoint("mixtral", tmp_path / str(dtype), dtype=dtype) for dtype in dtypes]

    def look(turn: int) -> None:
        path, dtype = paths[turn % 2], dtypes[turn % 2]
        meta = meta_skeleton(path) if turn % 5 else load_skeleton(path)
        assert {p.dtype for p in meta.parameters()} == {dtype}
        if turn % 5:
            assert {part.dtype for site in outline(meta).sites for part in site.parts.values()} == {dtype}

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(look, range(40)))
    assert torch.get_default_dtype() == torch.float32
