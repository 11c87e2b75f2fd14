"""The workspace that the budget sets aside covers what passes really allocate."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

STATES = ["granitemoehybrid", "inkling_text", "jamba", "lfm2_moe", "nemotron_h", "qwen3_next"]  # not only keys, values


def peak_bytes(engine: Engine, prompt: str) -> int:
    """Most bytes that torch's CPU allocator had handed out at once during an answer, above what it had before."""
    list(engine.generate(prompt, Sampling(max_new_tokens=2)))  # the KV cache is allocated by then
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        list(engine.generate(prompt, Sampling(max_new_tokens=2)))
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


EVERY = [*sorted(ARCHITECTURES), *STATES]
QUICK = ("qwen3_moe",)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    layered(
        (
            *((arch, ("float32", "bfloat16")[i % 2]) for i, arch in enumerate(EVERY)),  # some in both
            *((arch, ("bfloat16", "float32")[i % 2]) for i, arch in enumerate(EVERY) if arch in ("qwen3_moe", "jamba")),
        ),
        quick=lambda case: case[0] in QUICK and case != ("qwen3_moe", "float32"),
    ),
)
def test_a_full_prefill_chunk_stays_within_the_workspace(arch: str, dtype: str, tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint(arch, tmp_path / arch, max_position_embeddings=1024))
    engine = Engine.load(LoadSpec.checked(str(path), Settings({"budget": "all"}), dtype=dtype, context=1000))
    try:
        used = peak_bytes(engine, "x" * 900)
        assert used <= engine.sizes.workspace
        assert used >= engine.sizes.workspace / 4, "the bound is so loose that it says nothing"
    finally:
        engine.unload()
