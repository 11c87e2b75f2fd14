"""Kernels compiled in another process than the one in which they are interpreted. It imports little."""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from core.memory.codec.kernels import build as building
from core.memory.codec.kernels.build import Binary, Kinds

CAPABILITY = 80


def compile_here(name: str, constants: dict[str, Any], kinds: Kinds) -> tuple[Binary, str, str]:
    from core.memory.codec.kernels import dequantize, gemv

    kernel = next(vars(module)[name[1:]] for module in (dequantize, gemv) if name[1:] in vars(module))
    made = building.compiled(kernel, constants, kinds, CAPABILITY)
    return building.binary_of(made, kinds), made.asm["ptx"], made.asm["ttir"]


@contextmanager
def compiling() -> Iterator[ProcessPoolExecutor]:
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with patch.dict(os.environ, TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache):
            pool.submit(os.getpid).result()  # it has started, and keeps what it found
        yield pool
