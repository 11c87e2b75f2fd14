"""What is promised of exact answers holds in both arithmetics: no bit of a logit depends on the budget, the cache
policy, the prefetcher or the link; in the fast one, none on what an answer was continued from either."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from core.engine import Engine
from core.errors import MoestroError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.decoded import greedy
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

PROMPT = torch.randint(3, 250, (24,), generator=torch.Generator().manual_seed(1)).tolist()
RESIDENT: dict[str, object] = {"budget": "all", "scope": "layer", "eviction": "lru", "predictor": "none", "link": "own"}
BUDGETS: list[dict[str, object]] = [
    {"budget": "50%"},
    {"budget": "50%", "scope": "global"},
    {"budget": "75%", "link": "emulated", "link_gbps": 1.0, "link_latency_us": 5},
]
ROUNDING = 0.05  # of the largest logit: what rounding states to bf16 in another order may do to it


@pytest.fixture(scope="module", params=layered(["fast", "reference"], quick="fast".__eq__))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if request.param == "fast" and not supported():
        pytest.skip("no kernels for this CPU")
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("promises")))
    how = {"arithmetic": request.param, "format": "int8", "dtype": "bfloat16"}
    engine = Engine.load(LoadSpec.checked(str(path), Settings(RESIDENT), context=128, **how))
    assert engine.arithmetic.name == request.param
    yield engine
    engine.unload()


def logits(engine: Engine, ids: Sequence[int], tokens: int = 5, *, reuse: bool = False) -> torch.Tensor:
    """[tokens, V] before each token of a greedy answer."""
    seen: list[torch.Tensor] = []
    for _ in engine.generate(Ids(ids), Sampling(max_new_tokens=tokens), draw=greedy(seen), reuse=reuse):
        pass
    return torch.stack(seen)


def usable(engine: Engine, kind: str) -> list[str]:
    """The variants of a kind that need no profile."""
    found = []
    for name in (one.name for one in variants(kind)):
        try:
            engine.change({**RESIDENT, kind: name})
        except MoestroError:
            continue
        found.append(name)
    engine.change(RESIDENT)
    return found


def test_no_bit_depends_on_what_is_resident_or_fetched_ahead(engine: Engine) -> None:
    wanted = logits(engine, PROMPT)
    evictions, predictors = usable(engine, "eviction"), usable(engine, "predictor")
    assert len(evictions) > 5 and len(predictors) > 3
    for at in range(max(len(evictions), len(predictors))):
        way = {
            "eviction": evictions[at % len(evictions)],
            "predictor": predictors[at % len(predictors)],
            **BUDGETS[at % len(BUDGETS)],
        }
        engine.change({**RESIDENT, **way})
        assert torch.equal(logits(engine, PROMPT), wanted), way
        engine.expert_cache.check_integrity()
    engine.change(RESIDENT)


def test_what_an_answer_is_continued_from(engine: Engine) -> None:
    wanted = logits(engine, PROMPT)
    logits(engine, PROMPT[:17], reuse=True)
    *_, end = engine.generate(Ids(PROMPT), Sampling(max_new_tokens=1, temperature=0.0), reuse=True)
    assert end.stats is not None and end.stats.cached_tokens > 0
    found = logits(engine, PROMPT, reuse=True)
    if engine.arithmetic.fast:
        assert torch.equal(found, wanted)
    else:
        assert (found - wanted).abs().max() < ROUNDING * wanted.abs().max()
