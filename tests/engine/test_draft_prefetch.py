"""What guesses are foretold to need is fetched while earlier layers are computed: no bit of an answer depends on it,
whatever comes in between, and it goes on only where such passes are faster."""

import random
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.engine.draft_prefetch import DraftPrefetch
from core.engine.draft_trace import Foretold
from core.engine.pass_price import Load
from core.policy.predict import Prediction
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids, ModelShape
from tests.checkpoints import make_checkpoint
from tests.engine.drafted import HOW, Answer
from tests.loaded import loaded
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

native = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
PASSAGE = [5, 9, 200, 31, 77, 7, 8, 120, 14, 61, 3, 90, 45]
TEXT = [one + (3 if n % 17 == 16 else 0) for n, one in enumerate(PASSAGE * 5)]  # which nearly repeats
BEGUN = 2 * len(PASSAGE)
EXPERTS = {"num_hidden_layers": 4, "num_experts_per_tok": 2, "num_experts": 16, "num_local_experts": 16}


def fetching(engine: Engine, count: int | None) -> None:
    """Guess so many tokens always, with prefetches; None: nothing."""
    drafter = engine.parts.drafter
    engine.change({"drafts": "off" if count is None else "lookup"})
    drafter.gate.fixed, drafter.prefetch.fixed = count, True


class Written:
    """The text, written after so many of its tokens: the logits of each token, and the passes."""

    def __init__(self, engine: Engine, begun: int = BEGUN, **how: Any) -> None:
        seen = list[torch.Tensor]()

        def draw(ids: Sequence[int], given: torch.Tensor) -> int:
            seen.append(given[0].clone())
            return TEXT[len(ids)]

        sampling = Sampling(max_new_tokens=len(TEXT) - begun)
        self.answer = Answer(engine, sampling, Ids(TEXT[:begun]), draw=draw, **how)
        self.logits, self.steps = torch.stack(seen), self.answer.decode


@pytest.fixture(scope="module", params=layered(["qwen3_moe", "gpt_oss"], quick=lambda arch: arch == "qwen3_moe"))
def waiting(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = save_tokenizer(make_checkpoint(request.param, tmp_path_factory.mktemp("model"), **EXPERTS))
    with loaded(model, {"budget": "50%", "miss_placement": "wait"}, **HOW) as engine:
        engine.prompt.ends = set()
        yield engine


@native
@pytest.mark.parametrize(
    "changes",
    [{}, {"bypass": True, "prefetch_guard": False, "budget": "75%"}, {"predictor": "gate"}, {"budget": "70%"}],
)
def test_no_bit_depends_on_it(waiting: Engine, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other prefetch lands before the pass goes on."""
    prefetcher, cache = waiting.wiring.answering.step.prefetcher, waiting.expert_cache
    assert prefetcher is not None
    fetch = prefetcher.fetch_for_draft

    def landed(predictions: Sequence[Prediction]) -> None:
        fetch(predictions)
        assert all(one.done.wait(60) for one in [*cache.prefetch_queue.fresh.values()][::2])

    monkeypatch.setattr(prefetcher, "fetch_for_draft", landed)
    before = {name: waiting.spec.settings[name] for name in changes}
    waiting.change(changes)
    wanted = Written(waiting).logits
    begun = used = wasted = 0
    for count in (1, 4, 8):
        fetching(waiting, count)
        waiting.expert_cache.start_over()
        found = Written(waiting)
        assert torch.equal(found.logits, wanted)
        steps = found.steps
        begun += sum(step.draft_prefetch_issued for step in steps)
        used += sum(step.draft_prefetch_hits for step in steps)
        wasted += sum(step.draft_prefetch_wasted for step in steps)
        assert all(step.drafted for step in steps if step.draft_prefetch_issued)
        assert all(step.draft_prefetch_issued <= step.prefetch_issued for step in steps)
    assert begun == used + wasted > 0
    assert used or changes
    fetching(waiting, None)
    waiting.change(before)


@native
def test_random_histories(waiting: Engine) -> None:
    draw = random.Random(4)
    fetching(waiting, None)
    wanted, recorder, layer = Written(waiting, 1).logits, waiting.parts.recorder, waiting.parts.recorder.layer
    for _ in range(8):
        fetching(waiting, draw.choice([1, 4, 8]))
        begun, cancel, at, ran = draw.choice([BEGUN, BEGUN + 7]), threading.Event(), draw.randrange(5, 300), [0]
        seen = list[torch.Tensor]()

        def counted(*about: Any, ran: list[int] = ran, at: int = at, cancel: threading.Event = cancel) -> None:
            layer(*about)
            ran[0] += 1
            if ran[0] == at:
                cancel.set()

        def drawn(ids: Sequence[int], given: torch.Tensor, seen: list[torch.Tensor] = seen) -> int:
            seen.append(given[0].clone())
            return TEXT[len(ids)]

        recorder.layer = counted  # type: ignore[method-assign]
        how, reuse = Sampling(max_new_tokens=len(TEXT) - begun), draw.random() < 0.7
        try:
            for piece in waiting.generate(Ids(TEXT[:begun]), how, cancel, draw=drawn, reuse=reuse):
                if piece.token is not None and draw.random() < 0.2:
                    fetching(waiting, draw.choice([None, 1, 4, 8]))
                    waiting.change(
                        {
                            "budget": draw.choice(["70%", "85%", "100%"]),
                            "predictor": draw.choice(["none", "gate"]),
                            "eviction": draw.choice(["lru", "lfu"]),
                            "bypass": draw.choice([True, False]),
                        }
                    )
        finally:
            del recorder.layer  # type: ignore[method-assign]
        assert len(seen) == len(TEXT) - begun or cancel.is_set()
        if seen:
            assert torch.equal(torch.stack(seen), wanted[begun - 1 :][: len(seen)])
        waiting.expert_cache.check_integrity()
    waiting.change({"budget": "50%", "predictor": "none", "eviction": "lru", "bypass": False})
    fetching(waiting, 4)
    assert torch.equal(Written(waiting, reuse=True).logits, wanted[BEGUN - 1 :])


@native
def test_not_where_misses_are_computed_in_place(waiting: Engine) -> None:
    fetching(waiting, 4)
    waiting.change({"miss_placement": "host"})
    waiting.expert_cache.start_over()
    steps = Written(waiting).steps
    assert any(step.drafted for step in steps) and any(step.host_computed for step in steps if step.drafted)
    assert not any(step.draft_prefetch_issued for step in steps)
    waiting.change({"miss_placement": "wait"})


SHAPE = ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_bytes=100)
FORETOLD = Foretold([[1, 2, 9, 10], [2, 3, 9, 11]], [Load(4, 2), Load(6, 3)], [3, 9, 10])


class Passes:
    """Passes over one guess, which prefetching changes by a factor. Without it they wait for so many milliseconds."""

    def __init__(self, factor: float, in_place: bool = False, waits_ms: float = 4.0) -> None:
        self._waits_ms = waits_ms
        self.named, self._factor, self._draw = list[Sequence[Any]](), factor, random.Random(1)
        counts = SimpleNamespace(draft_prefetch_hits=3, draft_prefetch_wasted=0)
        parts: Any = (
            SimpleNamespace(fetch_for_draft=self.named.append),
            SimpleNamespace(used=True, takes_rows=in_place),
            SimpleNamespace(latest=SimpleNamespace(counts=counts)),
        )
        self.prefetch = DraftPrefetch(SHAPE, *parts)

    def fetched(self, count: int, usual_ms: float = 8.0, foretold: Foretold = FORETOLD) -> int:
        """In how many of so many passes."""
        before = len(self.named)
        for _ in range(count):
            had = len(self.named)
            self.prefetch.fetch(foretold, 1, usual_ms)
            factor = self._factor if len(self.named) > had else 1.0
            self.prefetch.passed(usual_ms * factor * self._draw.uniform(0.9, 1.1), usual_ms, self._waits_ms)
        return len(self.named) - before


def test_it_goes_on_where_passes_are_faster() -> None:
    faster, slower, alike = Passes(0.7), Passes(1.4), Passes(1.0)
    for one in (faster, slower, alike):
        assert 4 <= one.fetched(150) <= 150
    assert faster.fetched(90) == 90
    assert not slower.fetched(90)
    assert not alike.fetched(60)
    experts = [(one.layer, one.expert) for one in faster.named[-1]]
    assert experts == [(0, 1), (0, 2), (1, 1), (1, 2), (0, 3), (1, 3)], "residents, too, which are not to make room"
    assert faster.named[-1][0].score > 0.95, "as often as it was right"
    faster.prefetch.restart()
    assert not faster.fetched(5), "compared anew"


def test_where_nothing_can_be_saved_it_is_not_tried() -> None:
    assert not Passes(0.7, in_place=True).fetched(100)
    assert not Passes(0.7, waits_ms=0.2).fetched(100)
    slow = Passes(0.7, waits_ms=2.0)
    slow.prefetch._own_ms = 3.0
    assert not slow.fetched(100)
    assert not Passes(0.7).fetched(100, foretold=Foretold(FORETOLD.rows, FORETOLD.loads, []))
    never = Passes(0.7)
    never.prefetch.fixed = False
    assert not never.fetched(100)
