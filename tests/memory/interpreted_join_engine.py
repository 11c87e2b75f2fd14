"""`python -m tests.memory.interpret interpreted_join_engine`: tokens that the emulated GPU leads, of which the host
computes the experts that have no slot, through what may happen to them. Raises where something is wrong."""

import ctypes
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from core.engine import Engine
from core.errors import HostError
from core.runtime.device_step import DeviceStep
from core.runtime.host_join import HostJoin
from core.settings.sampling import Sampling
from core.types import Ids, Outcome, StepRecord
from tests.checkpoints import make_checkpoint
from tests.loaded import unloading
from tests.memory.interpreted_program import emulated, load
from tests.tiny_tokenizer import save_tokenizer

PROMPT, TOKENS, MANY = Ids([5, 9]), 2, 5
SHAPE = dict(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, hidden_size=32)
HOW = {"format": "int4-g32", "dtype": "bfloat16"}
BY_HOST: dict[str, object] = {"gpu_decode": "device", "miss_placement": "host", "eviction": "lru"}


def found(_: str) -> int:
    """Bytes that were not pinned where not all could be."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_tokenizer(make_checkpoint("qwen3_moe", Path(folder), **SHAPE))
        with emulated() as fake:
            with unloading(load(path, "50%", "cuda", HOW, BY_HOST)) as engine:
                for part in (counted, stopped, changed, lost):
                    part(engine)
            assert fake.pinned.used == 0
        with emulated() as fake:
            fake.pinned.limit = 40 << 10
            with unloading(load(path, "50%", "cuda", HOW, BY_HOST)) as engine:
                told = unpinned(engine)
                interrupted(engine)
            assert fake.pinned.used == 0
    return told


class Answer(NamedTuple):
    logits: torch.Tensor
    steps: list[StepRecord]


def answer(engine: Engine, tokens: int) -> Answer:
    drawn, logits = iter(range(17, 120, 13)), list[torch.Tensor]()

    def draw(ids: Sequence[int], row: torch.Tensor) -> int:
        logits.append(row[0].float().cpu())
        return next(drawn)

    pieces = list(engine.generate(PROMPT, Sampling(max_new_tokens=tokens + 1), draw=draw))
    steps = [piece.step for piece in pieces if piece.step is not None and piece.step.phase == "decode"]
    engine.expert_cache.check_integrity()
    return Answer(torch.stack(logits), steps)


def joined(engine: Engine) -> HostJoin:
    decode = engine.parts.device_decode
    assert decode.reason == "" and decode.step is not None and decode.step.join is not None, decode.reason
    return decode.step.join


def counted(engine: Engine) -> None:
    """Every miss is computed by the host, and what is admitted crosses the link once."""
    joined(engine)
    logits, steps = answer(engine, MANY)
    missed = [int((step.outcome == Outcome.MISS).sum()) for step in steps]
    assert sum(missed) > 0 and missed == [step.host_computed for step in steps], (
        missed,
        [step.host_computed for step in steps],
    )
    assert not any(step.demand_bytes for step in steps) and sum(step.host_ms for step in steps) > 0
    admitted = sum(step.host_admitted for step in steps)
    assert 0 < admitted <= sum(missed)
    assert sum(step.admitted_bytes for step in steps) == admitted * engine.sizes.blob
    engine.parts.device_decode.step.table.check()
    engine.change({"gpu_decode": "graph"})
    as_graphs = answer(engine, MANY)
    graphs = engine.parts.device_decode.graphs
    assert graphs is not None and graphs.reason == "" and graphs.replays >= 2
    assert any(step.host_computed for step in as_graphs.steps[-graphs.replays :])
    engine.change({"gpu_decode": "host", "miss_placement": "wait"})
    led = answer(engine, MANY).logits
    assert torch.equal(logits, led) and torch.equal(as_graphs.logits, led)
    engine.change(dict(BY_HOST))


def stopped(engine: Engine) -> None:
    """Between the layers of a token."""
    call, cancel, begun = DeviceStep.__call__, threading.Event(), list[int]()

    def stopping(self: DeviceStep, layer: int, *given: torch.Tensor) -> torch.Tensor:
        begun.append(layer)
        if len(begun) == 3:  # the first layer of the second token
            cancel.set()
        return call(self, layer, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStep, "__call__", stopping)
        pieces = list(engine.generate(PROMPT, Sampling(max_new_tokens=8), cancel))
    assert begun == [0, 1, 0] and pieces[-1].stats is not None and pieces[-1].stats.reason == "cancelled"
    engine.expert_cache.check_integrity()
    assert answer(engine, TOKENS).steps and not joined(engine).failed


def changed(engine: Engine) -> None:
    """Where misses are computed, and by how many threads."""
    before = joined(engine)
    engine.change({"miss_placement": "wait"})
    step = engine.parts.device_decode.step
    assert step is not None and step.join is None and engine.parts.device_decode.reason == ""
    steps = answer(engine, TOKENS).steps
    assert not any(one.host_computed for one in steps) and any(one.demand_bytes for one in steps)
    engine.change({"miss_placement": "host", "host_threads": 0})
    assert "no threads of its own" in engine.parts.device_decode.reason
    engine.change({"host_threads": 1})
    assert joined(engine) is not before
    engine.change({"miss_placement": "measured"})
    assert "layer by layer" in engine.parts.device_decode.reason
    engine.change({"miss_placement": "host", "budget": "75%"})
    assert joined(engine)
    engine.change({"budget": "50%"})


def lost(engine: Engine) -> None:
    """A thread that does nothing ends the answer in words, and the next one is read over the link."""
    join = joined(engine)
    nothing = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(lambda *given: None)
    join._function, join.mail = nothing, join.mail._replace(limit_ns=100_000_000)
    with pytest.raises(HostError, match="the GPU waited"):
        answer(engine, MANY)
    engine.expert_cache.check_integrity()
    steps = answer(engine, TOKENS).steps
    step, host = engine.parts.device_decode.step, engine.parts.host
    assert step is not None and step.join is None and not host.active and "the GPU waited" in host.failed
    assert any(one.demand_bytes for one in steps)


def unpinned(engine: Engine) -> int:
    """The GPU cannot read every expert, and need not -> how many bytes are not pinned."""
    left = engine.loaded.store.unpinned_bytes
    assert left > 0 and joined(engine)
    assert any(step.host_computed for step in answer(engine, TOKENS).steps)
    engine.change({"miss_placement": "wait"})
    assert "none has to be with miss_placement host" in engine.parts.device_decode.reason
    engine.change({"miss_placement": "host"})
    return left


def interrupted(engine: Engine) -> None:
    """An error within a token, after which the model is unloaded."""
    joined(engine)
    call, begun = DeviceStep.__call__, list[int]()

    def failing(self: DeviceStep, layer: int, *given: torch.Tensor) -> torch.Tensor:
        begun.append(layer)
        out = call(self, layer, *given)
        if len(begun) == 3:
            raise ArithmeticError("within a token")
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStep, "__call__", failing)
        with pytest.raises(ArithmeticError):
            answer(engine, TOKENS)
