"""Tokens that are one CUDA graph, on the fake GPU, which calls again what was captured: the tokens and routing of those
led by the host, and what must not be captured is not."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.cache.address_table import AddressTable
from core.engine import Engine
from core.runtime import lead, token_graph
from core.runtime.token_graph import TokenGraphs
from core.settings.sampling import Sampling
from tests.checkpoints import make_checkpoint
from tests.cuda.conftest import engine_on
from tests.cuda.test_device_decode import CASES, Case, waits_of
from tests.decoded import PROMPT, answer
from tests.fake_cuda import FakeCuda, installed
from tests.logged import Logged
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

SETTINGS = Case("lru").settings("graph")


def graphs_of(engine: Engine) -> TokenGraphs:
    graphs = engine.parts.device_decode.graphs
    assert graphs is not None
    return graphs


@pytest.mark.long(0.1)
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: "-".join(map(str, case)))
def test_the_same_tokens_and_cache_as_led_by_the_host(
    case: Case, model: Path, pack: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through several lengths of graphs, while budgets and policies change."""
    monkeypatch.setattr(token_graph, "SHORTEST", 16)
    runs = []
    for decode in ("host", "graph"):
        with engine_on(pack if case.packed else model, case.settings(decode)) as engine:
            runs.append([answer(engine, 24, seed) for seed in (0, 1)])
            if decode == "graph":
                assert graphs_of(engine).reason == "" and graphs_of(engine).replays > 40
                assert len(graphs_of(engine)._graphs) == 2
    for host, graph in zip(*runs, strict=True):
        assert float((host.logits - graph.logits).abs().max()) < 1e-5 * float(host.logits.abs().max())
        assert graph.resident == host.resident
        for one, other in zip(host.steps, graph.steps, strict=True):
            assert np.array_equal(one.ids, other.ids) and one.requests == other.requests


@pytest.mark.long(0.1)
def test_by_default_both_ways_are_timed_and_compute_the_same(
    model: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "FIRST", 4)
    monkeypatch.setattr(lead, "OFTEN", 4)
    runs = []
    for decode in ("host", "auto"):
        with engine_on(model, {**SETTINGS, "gpu_decode": decode}) as engine:
            logits: list[torch.Tensor] = []

            def greedy(ids: Any, row: torch.Tensor, logits: list[torch.Tensor] = logits) -> int:
                logits.append(row[0].clone())
                return int(row.argmax())

            list(engine.generate(PROMPT, Sampling(max_new_tokens=30), draw=greedy))
            engine.expert_cache.check_integrity()
            runs.append(torch.stack(logits))
            if decode == "auto":
                timed = engine.parts.device_decode._lead._times
                assert timed[True] and timed[False] and graphs_of(engine).replays > 0
    assert float((runs[0] - runs[1]).abs().max()) < 1e-5 * float(runs[0].abs().max())


def test_the_host_waits_once_a_token_and_launches_one_graph(model: Path, fake_kernels: FakeCuda) -> None:
    with engine_on(model, SETTINGS) as engine:
        list(engine.generate(PROMPT, Sampling(max_new_tokens=8)))
        before = graphs_of(engine).replays
        assert waits_of(engine, fake_kernels) == {1}
        assert graphs_of(engine).replays - before == 7  # the first of 8 tokens comes from the prompt
    assert fake_kernels.memory.reserved == 0 and fake_kernels.pinned.used == 0


@pytest.mark.long(0.1)
def test_a_chat_goes_on_from_tokens_that_graphs_wrote(model: Path, fake_kernels: FakeCuda) -> None:
    def turns(decode: str) -> list[list[int]]:
        with engine_on(model, Case("lru").settings(decode)) as engine:
            said, text = list[list[int]](), PROMPT
            for _ in range(3):
                steps, tokens = [], list[int]()

                def greedy(ids: Any, row: torch.Tensor, tokens: list[int] = tokens) -> int:
                    tokens.append(int(row.argmax()))
                    return tokens[-1]

                for piece in engine.generate(text, Sampling(max_new_tokens=8), draw=greedy, reuse=True):
                    text += piece.text
                    steps += [piece.step] if piece.step is not None else []
                said.append([*tokens, sum(step.cached_tokens for step in steps)])
                text += " and so on"
            if decode == "graph":
                assert graphs_of(engine).replays > 8
            return said

    assert turns("graph") == turns("host")


@pytest.mark.long(0.1)
def test_windows_are_not_captured(fake_kernels: FakeCuda, tmp_path: Path, caplog: Logged) -> None:
    path = save_tokenizer(make_checkpoint("gpt_oss", tmp_path))
    found = []
    for decode in ("host", "graph"):
        with engine_on(path, {"budget": "60%", "predictor": "none", "eviction": "lru", "gpu_decode": decode}) as engine:
            found.append(answer(engine, 8).logits)
            if decode == "graph":
                assert engine.parts.device_decode.reason == "" and graphs_of(engine).replays == 0
                assert "keep more, or less" in graphs_of(engine).reason and graphs_of(engine).reason in caplog.text
                assert any("as device does" in text for _, text in engine.parts.telemetry.marks)
    assert torch.equal(*found)


def waits_within(patch: pytest.MonkeyPatch) -> None:
    """A model that reads a number back."""
    real = TokenGraphs._pass
    patch.setattr(TokenGraphs, "_pass", lambda self, *args: real(self, *args) + 0 * float(self._position))


def asks_for_its_length(patch: pytest.MonkeyPatch) -> None:
    """A model whose pass depends on what the host knows."""
    real = TokenGraphs._pass

    def asks(self: TokenGraphs, kv: Any, length: int) -> torch.Tensor:
        return real(self, kv, length) + 0 * kv.cache.get_seq_length()

    patch.setattr(TokenGraphs, "_pass", asks)


def captures_a_number(patch: pytest.MonkeyPatch) -> None:
    """A number of the host's is captured: right for one token, wrong for the next."""
    real = TokenGraphs._pass

    def numbered(self: TokenGraphs, kv: Any, length: int) -> torch.Tensor:
        return real(self, kv, length) + 10.0 * (self._position - kv.length)

    patch.setattr(TokenGraphs, "_pass", numbered)


def no_room(patch: pytest.MonkeyPatch) -> None:
    real = TokenGraphs.__init__
    patch.setattr(TokenGraphs, "__init__", lambda self, *args: real(self, *args[:3], lambda: False, *args[4:]))


@pytest.fixture(scope="module")
def led(model: Path) -> torch.Tensor:
    """Logits of tokens that no graph computed."""
    with installed(FakeCuda(), kernels=True), engine_on(model, Case("lru").settings("device")) as engine:
        return answer(engine, 8).logits.cpu()


@pytest.mark.parametrize(
    ("fault", "why"),
    layered(
        [
            (waits_within, "not permitted when stream is capturing"),
            (asks_for_its_length, "uses the number of its tokens"),
            (captures_a_number, "differed from an ordinary pass"),
            (no_room, "more memory than the budget leaves"),
        ],
        quick=lambda case: False,  # test_capture_failures.py goes on without graphs
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_a_graph_is_computed_without(
    fault: Callable[[pytest.MonkeyPatch], None],
    why: str,
    model: Path,
    led: torch.Tensor,
    fake_kernels: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with engine_on(model, SETTINGS) as engine:
        assert torch.equal(answer(engine, 8).logits.cpu(), led)
        assert graphs_of(engine).replays == 0 and why in graphs_of(engine).reason


@pytest.mark.long(0.1)
def test_an_answer_can_be_stopped(model: Path, fake_kernels: FakeCuda) -> None:
    with engine_on(model, SETTINGS) as engine:
        answer(engine, 8)
        for _ in range(2):
            before, cancel, tokens = graphs_of(engine).replays, threading.Event(), 0
            for piece in engine.generate(PROMPT, Sampling(max_new_tokens=40), cancel):
                tokens += piece.kind == "token"
                if tokens == 5:
                    cancel.set()
            assert tokens == 5 and graphs_of(engine).replays - before == 4
            engine.expert_cache.check_integrity()


@pytest.mark.long(0.1)
def test_it_is_tried_again_when_settings_change(model: Path, fake_kernels: FakeCuda, caplog: Logged) -> None:
    with engine_on(model, SETTINGS) as engine:
        with pytest.MonkeyPatch.context() as patch:
            waits_within(patch)
            for budget in ("45%", "50%"):
                engine.change({"budget": budget})
                answer(engine, 4)
                assert graphs_of(engine).reason
        assert caplog.text.count("cannot be captured") == 1, "said once"
        engine.change({"budget": "60%"})
        answer(engine, 8)
        assert graphs_of(engine).reason == "" and graphs_of(engine).replays > 2


@pytest.mark.long(0.1)
def test_a_graph_with_an_old_table_is_found(model: Path) -> None:
    """Kernels of a replay read slots that others are copied into meanwhile."""
    with installed(FakeCuda(), kernels=True) as fake, engine_on(model, SETTINGS) as engine:
        list(engine.generate(PROMPT, Sampling(max_new_tokens=6)))
        assert graphs_of(engine).replays and not fake.races.found
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AddressTable, "_update", lambda self, landed: None)
            list(engine.generate(PROMPT[::-1], Sampling(max_new_tokens=16)))
    assert fake.races.found
