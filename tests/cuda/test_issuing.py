"""What the computing thread issues itself, in which order; and misses that the host computes beside it."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from app.wording import lossy
from core.cache.lease import LeasedSegment
from core.engine import Engine
from core.errors import HostError
from core.memory.codec.fast import background
from core.memory.transfer import TransferEngine
from core.runtime.moe_step import MoEStep
from core.runtime.prefetcher import Prefetcher
from core.runtime.rows import ExpertRows
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Outcome
from tests.cuda.conftest import engine_on
from tests.cuda.test_out_of_memory import GPU, ticket
from tests.decoded import PROMPT, answer
from tests.fake_cuda import FakeCuda
from tests.selection import covering


def test_a_demand_in_pinned_memory_waits_for_no_other_thread(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the computing thread holds Python's lock, no worker comes."""
    monkeypatch.setattr(TransferEngine, "_serve", lambda self: None)
    issued: list[tuple[int, object]] = []

    def fetch(eid: int, slots: Sequence[torch.Tensor], first: int) -> int:
        issued.append((eid, threading.current_thread()))
        return 0

    link, me = TransferEngine(GPU, fetch, is_pinned=lambda eid: eid < 10), threading.current_thread()
    one = link.submit(ticket(3))
    assert one.done.is_set() and issued == [(3, me)]
    assert not link.submit(ticket(11)).done.is_set(), "what has to be read is the worker's"
    ahead = link.submit(ticket(4, demand=False))
    assert not ahead.done.is_set(), "a prefetch can wait, and be cancelled"
    assert link.promote(ahead) and ahead.done.is_set() and issued[1:] == [(4, me)]
    link.wait(one)
    link.close()


def layers_of(
    monkeypatch: pytest.MonkeyPatch, model: Path, **settings: object
) -> list[list[tuple[str, Sequence[LeasedSegment]]]]:
    """What an answer's decoded tokens do, layer by layer: "compute" some segments, or "ask" for later layers'."""
    layers: list[list[tuple[str, Sequence[LeasedSegment]]]] = []
    step, compute, look = MoEStep.__call__, ExpertRows.compute, Prefetcher.look_ahead

    def begun(self: MoEStep, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        if len(ids) == 1:
            layers.append([])
        return step(self, layer, hidden, ids, weights)

    def computed(self: ExpertRows, some: Sequence[LeasedSegment]) -> None:
        if self._triples.tokens == 1:
            layers[-1].append(("compute", some))
        compute(self, some)

    def asked(self: Prefetcher, layer: int, chosen: Sequence[Sequence[int]], weights: Any) -> None:
        if len(chosen) == 1:
            layers[-1].append(("ask", ()))
        look(self, layer, chosen, weights)

    with engine_on(model, settings) as engine:
        monkeypatch.setattr(MoEStep, "__call__", begun)
        monkeypatch.setattr(ExpertRows, "compute", computed)
        monkeypatch.setattr(Prefetcher, "look_ahead", asked)
        for _ in engine.generate("hello there, how are you?", Sampling(max_new_tokens=12)):
            pass
        monkeypatch.undo()
    return layers


@pytest.mark.long(0.1)
def test_residents_are_launched_before_looking_ahead_and_the_missing_ones_together(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    layers, orders = layers_of(monkeypatch, model, budget="45%", predictor="gate"), set[tuple[str, ...]]()
    for layer in layers:
        kinds = tuple(
            what if what == "ask" else "missing" if some[0].ticket is not None else "resident" for what, some in layer
        )
        orders.add(kinds)
        for what, some in layer:
            assert what == "ask" or len({one.ticket is None for one in some}) == 1
    assert orders <= {("resident", "ask", "missing"), ("resident", "ask"), ("ask", "missing")}, orders
    assert ("resident", "ask", "missing") in orders
    assert any(len(some) > 1 and some[0].ticket is not None for layer in layers for _, some in layer if some)


@pytest.mark.long(0.1)
def test_a_pass_waits_for_its_own_stream_alone(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """Prefetches under way may go on: no pass waits for all of the device."""

    def refused(*_: object) -> None:
        raise AssertionError("the whole device was waited for")

    with engine_on(model, {"budget": "45%", "predictor": "gate"}) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", refused)
            text = "".join(piece.text for piece in engine.generate("hello", Sampling(max_new_tokens=12)))
        assert text


@pytest.mark.long(0.1)
def test_asking_routers_ends_where_it_costs_more_than_it_saves(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """A copy of these experts takes next to nothing, and asking a router waits for the GPU and for Python: after some
    tokens prefetching is paused, which is said, and with it the second wait of each layer."""
    settings: dict[str, object] = {"budget": "45%", "eviction": "lru", "predictor": "gate", "prefetch_auto": True}
    for name, value in {"LEARNING": 0, "BLOCK": 4, "MOST": 4}.items():
        monkeypatch.setattr(f"core.policy.comparison.{name}", value)
    with engine_on(model, settings) as engine, fake_cuda.noting_waits() as waits:
        layers, tokens = engine.shape.layers, list[tuple[bool, int]]()
        for piece in engine.generate("hello there, how are you?", Sampling(temperature=0.0, max_new_tokens=60)):
            if piece.kind == "token":
                asked = sum(one.place == "prediction/view.py:ask" for one in waits)
                tokens.append((engine.parts.prediction.throttle.paused, asked))
            waits.clear()
        said = [text for _, text in engine.frame().marks if "prefetching paused" in text]
    assert said and "ms a token with it" in said[0]
    passes = [(paused, asked) for (paused, _), (_, asked) in itertools.pairwise(tokens)]  # as decided before each
    assert {*passes} == {(True, 0), (False, layers - 1)}, "asked only in the blocks with prefetching"
    assert passes[-1] == (True, 0)


kernels = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
BASE = {"budget": "45%", "predictor": "none", "gpu_decode": "auto"}
TOKENS = 6
CLOSE = 0.05  # of the largest logit


@kernels
@pytest.mark.parametrize(
    ("placement", "threads", "packed"), covering(["host", "measured"], [0, 1], [False, True], together=1)
)
def test_the_host_computes_what_the_gpu_would(
    placement: str, threads: int, packed: bool, model: Path, pack: Path, fake_kernels: FakeCuda
) -> None:
    with engine_on(pack if packed else model, BASE) as engine:
        alone = answer(engine, TOKENS, 0)
        engine.expert_cache.start_over()
        engine.change({"miss_placement": placement, "host_threads": threads})
        assert engine.parts.device_decode.step_for is not None and "miss_placement" in engine.parts.device_decode.reason
        beside = answer(engine, TOKENS, 0)
        decoded = [step for step in beside.steps if step.phase == "decode"]
        hosted = sum(step.host_computed for step in decoded)
        missed = sum(int((step.outcome == Outcome.MISS).sum()) for step in decoded)
        assert missed > 0 and (hosted == missed if placement == "host" else hosted <= missed)
        same = next(
            (n for n, (a, b) in enumerate(zip(alone.logits, beside.logits, strict=True)) if a.argmax() != b.argmax()),
            TOKENS,
        )
        off = (alone.logits[:same] - beside.logits[:same]).abs().max()
        assert off < CLOSE * alone.logits.abs().max()
        assert all(step.device_bytes <= step.budget_bytes for step in decoded)
        engine.expert_cache.check_integrity()
        engine.change({"miss_placement": "wait"})
        assert not engine.parts.device_decode.reason


@kernels
def test_the_badge_names_two_processors(model: Path, fake_kernels: FakeCuda) -> None:
    with engine_on(model, {**BASE, "miss_placement": "host"}) as engine:
        *_, end = engine.generate(PROMPT, Sampling(temperature=0.0, max_new_tokens=8))
        assert end.stats is not None and end.stats.closeness
        assert lossy(end.stats.as_dict()) == "EXACT UP TO ROUNDING, two processors"


@kernels
def test_a_thread_that_is_never_done_ends_the_answer(
    model: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "TIMEOUT_S", 0.2)
    with engine_on(model, {**BASE, "miss_placement": "host"}) as engine:
        team = engine.parts.host.team
        if team is None:
            pytest.skip("this machine leaves the host no processor")

        def never(at: int, patience: int = 0) -> None:
            if team._state.value == background.code.POSTED:
                team._state.value = background.code.TAKEN

        team._serve, team._recall = never, never  # type: ignore[assignment]
        with pytest.raises(HostError, match="did not finish"):
            _all(engine)
        _all(engine)  # waits for copies
        engine.expert_cache.check_integrity()


def _all(engine: Engine) -> torch.Tensor:
    return answer(engine, 6, 1).logits
