"""`TRITON_INTERPRET=1 python -m tests.memory.interpret interpreted_invariance`: as `bench invariance`, on the emulated
GPU.

A small model of random weights in the fast arithmetic, whose kernels Triton's interpreter runs. Who leads a token, who
computes its missing experts, how many have slots, pieces and the number of texts in a pass are combined; the logits of
two texts are compared with those of this CPU, each read alone, whole, with everything resident. Nothing of it has run
on a GPU, and no time is measured."""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from core import __version__
from core.engine import Engine
from core.runtime.batch import Batch, Share
from core.runtime.device_step import DeviceStep
from core.runtime.program.gpu.rows import GpuMath, GpuRows
from tests.checkpoints import make_checkpoint
from tests.fake_cuda.graphs import FakeGraph
from tests.loaded import unloading
from tests.memory.interpreted_layer import differing
from tests.memory.interpreted_program import counted, emulated, load
from tests.tiny_tokenizer import save_tokenizer

SHAPE = dict(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, hidden_size=32)
HOW = {"format": "int4-g32", "dtype": "bfloat16"}
LENGTH = 7
TEXTS = torch.randint(3, 120, (2, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
LEADS: dict[str, dict[str, object]] = {
    "led by the host": {"gpu_decode": "host", "miss_placement": "wait"},
    "led by the host, misses computed there": {"gpu_decode": "host", "miss_placement": "host"},
    "led by the GPU": {"gpu_decode": "device", "miss_placement": "wait"},
    "led by the GPU, misses computed by the host": {"gpu_decode": "device", "miss_placement": "host"},
    "as a graph": {"gpu_decode": "graph", "miss_placement": "wait"},
    "as a graph, misses computed by the host": {"gpu_decode": "graph", "miss_placement": "host"},
}
FEW = "40%"
READ = ((1, 1), (3, 2), (LENGTH, 1), (1, 2))  # in pieces of so many tokens, so many texts at once
TAKEN: tuple[tuple[type, str], ...] = (  # what must have been called
    (GpuRows, "join"),
    (DeviceStep, "__call__"),
    (GpuMath, "with_host"),
    (FakeGraph, "replay"),
)


class Way(NamedTuple):
    lead: str
    budget: str
    pieces: int
    texts: int


def ways() -> Iterator[Way]:
    """Only single tokens of one text are led by the GPU."""
    for lead, how in LEADS.items():
        for pieces, texts in READ if how["gpu_decode"] == "host" else READ[:1]:
            yield Way(lead, FEW, pieces, texts)
        yield Way(lead, "100%", *READ[0])


def read(engine: Engine, pieces: int, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[LENGTH, V] of each text, read in such pieces together with the others."""
    pipeline, pool = engine.wiring.answering, engine.wiring.pool
    kvs = [kv for _ in texts if (kv := pool.take(LENGTH + 1)) is not None]
    assert len(kvs) == len(texts), "the load has room for both"
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    try:
        for at in range(0, LENGTH, pieces):
            of = enumerate(zip(texts, kvs, strict=True), 1)
            shares = tuple([Share(text[at : at + pieces], kv, number) for number, (text, kv) in of])
            rows = len(shares[0].tokens)
            batch = Batch("decode" if rows == 1 else "prefill", shares)
            pipeline.begin(batch)
            for own, logits in zip(found, pipeline.forward(batch, rows).cpu().split(rows), strict=True):
                own.append(logits)
    finally:
        pipeline.end()
        pool.clear()
    return [torch.cat(rows) for rows in found]


def found(_: str) -> dict[str, Any]:
    """Runs, logits, and those that differ, in all and by what was varied."""
    runs, of, total = 0, dict[str, list[int]](), [0, 0]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        calls = {name: counted(patch, kind, name) for kind, name in TAKEN}
        path = save_tokenizer(make_checkpoint("qwen3_moe", Path(folder), **SHAPE))
        with unloading(load(path, "100%", "cpu", HOW)) as engine:
            wanted = [one for text in TEXTS for one in read(engine, LENGTH, [text])]
        with emulated(), unloading(load(path, "100%", "cuda", {**HOW, "sequences": 2})) as engine:
            assert engine.arithmetic.name == "fast" and engine.wiring.answering.hooked.program is not None
            for way in ways():
                engine.change({"budget": way.budget, "eviction": "lru", **LEADS[way.lead]})
                engine.wiring.controller.apply(engine.parts)
                reason = engine.parts.device_decode.reason
                assert not reason, reason
                off = sum(map(differing, read(engine, way.pieces, TEXTS[: way.texts]), wanted))
                runs, count = runs + 1, way.texts * wanted[0].numel()
                varied = [f"{name} {value}" for name, value in way._asdict().items()]
                for one in (total, *(of.setdefault(name, [0, 0]) for name in varied)):
                    one[0] += count
                    one[1] += off
                print(f"{way}: {off} of {count} logits differ", file=sys.stderr, flush=True)
        taken = {name: len(found) for name, found in calls.items()}
    assert all(taken.values()), f"a way was not taken: {taken}"
    facts = {"device": "an emulated GPU, Triton's interpreter", "model": "qwen3_moe of random weights", **SHAPE, **HOW}
    versions = {"moestro": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "suite": "invariance on the emulated GPU",
        "facts": facts,
        "versions": versions,
        "runs": runs,
        "logits": total[0],
        "differing": total[1],
        "of": of,
        "calls": taken,
    }
