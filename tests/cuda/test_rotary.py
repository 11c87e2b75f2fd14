"""Rotary embeddings in one launch, on the fake GPU, with the kernel's reference in the place of the kernel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.hf import fused_rotary, rotary
from core.hf.rotary import tried
from core.hf.rotary_form import Form, rotated
from tests.cuda.conftest import engine_on
from tests.cuda.test_host_waits import GREEDY, waits_of
from tests.cuda.test_token_graph import SETTINGS, graphs_of
from tests.decoded import answer
from tests.fake_cuda import FakeCuda
from tests.selection import layered


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """The device of each launch so far."""
    found: list[torch.device] = []

    def launch(grid: Any, given: Any, parameters: dict[str, Any]) -> None:
        q, k, cos, sin, q_out, k_out, *_ = given
        assert grid == (q.shape[1] + k.shape[1], q.shape[2])
        form = Form(*(parameters[name] for name in ("WIDTH", "GIVEN", "PUT", "TABLE", "ROUNDS")))
        for x, out in ((q, q_out), (k, k_out)):
            out.copy_(rotated(form, x, cos, sin))
        found.append(q.device)

    monkeypatch.setattr(rotary, "_tried", {})
    monkeypatch.setattr(rotary, "tried", tried)
    monkeypatch.setattr(fused_rotary, "available", lambda device: device.type == "cuda")
    monkeypatch.setattr(fused_rotary, "launch", launch)
    return found


@pytest.mark.parametrize("decode", layered(["host", "graph"], quick=lambda decode: False))
def test_the_same_logits_in_one_launch_a_layer(
    decode: str, model: Path, fake_kernels: FakeCuda, launches: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token led by the host launches one kernel a layer; a graph has captured them, and launches none. That the
    host launches any is also seen below."""
    settings, runs = {**SETTINGS, "gpu_decode": decode}, []
    for replaced in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(rotary, "_tried", {})
            if not replaced:
                patch.setattr(rotary, "tried", lambda own, states, tables: None)
            with engine_on(model, settings) as engine:
                runs.append(answer(engine, 12))
                assert bool(launches) == replaced
                list(engine.generate("hello", GREEDY))  # whose prompt is short: another layout, which is tried
                before, replays = len(launches), 0
                if decode == "graph":
                    assert graphs_of(engine).reason == "" and (replays := graphs_of(engine).replays) > 8
                tokens = sum(piece.kind == "token" for piece in engine.generate("hello", GREEDY))
                if decode == "graph":
                    assert graphs_of(engine).replays - replays == tokens - 1
                elif replaced:
                    layers = engine.wiring.loaded.model.config.num_hidden_layers
                    assert len(launches) - before in (layers * (tokens - 1), layers * tokens)  # with a short prompt's
    assert torch.equal(runs[0].logits, runs[1].logits)
    assert {device.type for device in launches} == {"cuda"}


@pytest.mark.long(0.1)
def test_nobody_waits_for_it(model: Path, fake_kernels: FakeCuda, launches: list[torch.device]) -> None:
    with engine_on(model, {**SETTINGS, "gpu_decode": "host"}) as engine:
        layers = engine.shape.layers
        assert all(found.total() <= layers + 2 for found in waits_of(engine, fake_kernels)) and launches
    with engine_on(model, SETTINGS) as engine:
        assert waits_of(engine, fake_kernels) and graphs_of(engine).replays


def test_what_was_not_tried_before_a_capture_is_not_tried_in_it(
    fake_kernels: FakeCuda, launches: list[torch.device]
) -> None:
    from tests.hf.rotary_cases import FUNCTIONS, Sizes, drawn

    function = FUNCTIONS["qwen3_moe"]
    rotation, states = rotary.Rotation(function.own), drawn(function, Sizes(2, 1, 16), torch.float32, "cuda")
    with torch.inference_mode():
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            rotation(*states)
        assert not rotation._tried and not launches
        rotation(*states)
        assert [*rotation._tried.values()] != [None] and launches
