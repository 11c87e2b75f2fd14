"""What our own code does for a token does not grow with the number of experts: counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bench.dispatch import _passes, _stubbed, _through
from bench.generate import Sizes, checkpoint
from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec

CORE = str(Path(__file__).parents[2] / "core")
FEW, MANY, LAYERS = 8, 64, 3


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Inside, the interpreter's instructions in functions of core, by function."""
    found = Counter[str]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(CORE):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            found[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(before)


def instructions(path: Path, experts: int) -> Counter[str]:
    """Of three tokens, each computed without a MoE step, with one, and with one and recorded; of experts nothing is
    computed, as how depends on times measured at the load."""
    sizes = Sizes(f"of{experts}", 32, LAYERS, experts, 4, 16, 2, 1, head_dim=16)
    folder = checkpoint(path, sizes, say=lambda text: None)
    settings = Settings({"budget": "all", "link": "own", "predictor": "none"})
    engine = Engine.load(LoadSpec.checked(str(folder), settings, context=64))
    try:
        pipelines = [_through(engine.wiring), engine.wiring.measuring, engine.wiring.answering]
        with _stubbed(engine.wiring.math):
            for layer in range(LAYERS):  # each expert's first request finds that it is at rest
                engine.expert_cache.release(engine.expert_cache.acquire(layer, range(experts)))
            _passes(engine.wiring, pipelines, 2)
            with counted() as found:
                _passes(engine.wiring, pipelines, 3)
    finally:
        engine.unload()
    return found


@pytest.mark.long(0.2)
def test_a_token_of_residents_takes_as_many_instructions_with_eight_times_the_experts(tmp_path: Path) -> None:
    few, many = (instructions(tmp_path, experts) for experts in (FEW, MANY))
    assert few["moe_step.MoEStep.__call__"] > 0 < few["recorder.Recorder.end"]
    assert {name: (few[name], many[name]) for name in few | many if few[name] != many[name]} == {}
