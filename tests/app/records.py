"""A step record with something in every field, and the load that it belongs to."""

from typing import Any

import numpy as np

from app.store import Store
from core.types import ModelShape, StepRecord, Transfer

SHAPE = ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_bytes=100)
STATS: dict[str, Any] = {"prompt_tokens": 3, "new_tokens": 7, "ttft_ms": 800.0, "tpot_ms": 9, "tok_s": 12.5}
STATS |= {"hit_rate": 0.75, "compute_ms": 60.0, "stall_ms": 30.0, "idle_ms": 10.0}
STATS |= {"exact": True, "emulated": False, "reason": "stop"}


def a_step(index: int = 0, tokens: int = 1) -> StepRecord:
    ids = np.arange(2 * tokens * 2).reshape(2, tokens, 2).astype(np.int16) % 8
    return StepRecord(  # a hit, a miss from host memory, one from disk, and one whose copy was late
        index=index,
        phase="decode" if tokens == 1 else "prefill",
        tokens=tokens,
        started_s=1.5,
        total_ms=4.0,
        compute_ms=2.5,
        stall_ms=1.0,
        idle_ms=0.5,
        copy_ms=1.25,
        ids=ids,
        layer=np.array([0, 0, 1, 1], np.int16),
        expert=np.array([1, 2, 3, 7], np.int16),
        outcome=np.array([0, 3, 4, 2], np.uint8),
        slots=5,
        exact=False,
        disk_bytes=4096,
        prefetch_evicted=1,
        late_bytes=7,
        evicted_bytes=5,
        predict_ms=0.25,
        net_ms=-0.5,
        transfers=(
            Transfer(1, 7, 2**33, True, 1.0, 1.25, 1.5, "decode"),
            Transfer(0, 2, 5, False, 1.0, 1.0, 2.0, "prefill"),
            Transfer(1, 3, 5, True, 1.0, 1.5, 2.0, "decode", "disk"),
            Transfer(1, 4, 5, False, 1.0, 1.75, 2.0, "decode", "disk"),
        ),
    )


def load_of(store: Store) -> int:
    return store.steps.add_load("demo", {"model": "demo"}, {"budget": "50%"}, SHAPE, {"device": "cpu"})
