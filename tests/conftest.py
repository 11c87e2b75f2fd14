"""What all tests share: one thread, quiet transformers, tiny checkpoints built once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tests.checkpoints import make_checkpoint

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint("mixtral")` is the directory of a tiny random checkpoint; never write into it, copy it."""
    made: dict[str, Path] = {}

    def get(arch: str) -> Path:
        if arch not in made:
            made[arch] = make_checkpoint(arch, tmp_path_factory.mktemp("checkpoints") / arch)
        return made[arch]

    return get
