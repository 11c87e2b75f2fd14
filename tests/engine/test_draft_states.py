"""Guesses verified by models with gated delta nets, whose states cannot be cut: they are brought to what they are after
the tokens that were accepted, and nothing else."""

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.engine.draft_lookup import Guess, Lookup
from core.runtime.batch import Batch, Share
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.engine.drafted import HOW, IDS, TOKENS, Answer, bits, first_tokens
from tests.equality.fast import read
from tests.loaded import loaded
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
TEXT = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(1)).tolist()
GREEDY = Sampling(max_new_tokens=TOKENS)


class Guessing:
    """Guesses what an answer without guesses has, of each token with a chance."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine, self._draw, self._text = engine, random.Random(1), list[int]()
        monkeypatch.setattr(Lookup, "guess", lambda _, ids, most: self._guess(ids, most))

    def _guess(self, ids: Sequence[int], most: int) -> Guess | None:
        tokens = self._text[len(ids) : len(ids) + most]
        return Guess([one if self._draw.random() < 0.7 else 3 for one in tokens], 4) if tokens else None

    def so_many(self, count: int, text: Sequence[int] = ()) -> None:
        """In each pass of an answer that is expected to be `text`, with its prompt."""
        self._text = [*text]
        self._engine.change({"drafts": "lookup" if count else "off"})
        self._engine.parts.drafter.gate.fixed = count or None


@pytest.fixture(
    scope="module", params=layered(["qwen3_next", "qwen3_5_moe_text"], quick=lambda arch: arch == "qwen3_next")
)
def drafting(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = save_tokenizer(make_checkpoint(request.param, tmp_path_factory.mktemp("model")))
    with loaded(path, {"budget": "50%"}, sequences=3, **HOW) as engine:
        engine.prompt.ends = set()
        yield engine


@pytest.fixture
def guessing(drafting: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guessing]:
    guessing = Guessing(drafting, monkeypatch)
    yield guessing
    guessing.so_many(0)
    drafting.parts.memory.prefix_cache.clear()


def test_no_bit_depends_on_drafts(drafting: Engine, guessing: Guessing) -> None:
    wanted, logits = bits(drafting, IDS)
    for count in (1, 3, 8):
        guessing.so_many(count, [*IDS.ids, *wanted])
        tokens, found = bits(drafting, IDS)
        assert tokens == wanted
        assert torch.equal(found, logits)
        more = Answer(drafting, GREEDY, IDS).stats.more
        assert TOKENS // 4 < more["accepted"] < more["drafted"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draws_are_those_without(temperature: float, drafting: Engine, guessing: Guessing) -> None:
    how = Sampling(max_new_tokens=TOKENS, temperature=temperature, seed=7, logprobs=2)
    wanted = Answer(drafting, how, IDS)
    guessing.so_many(4, [*IDS.ids, *wanted.tokens])
    found = Answer(drafting, how, IDS)
    assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
    assert found.stats.more["accepted"] > 0


def test_a_chat_goes_on_from_where_an_answer_ended(drafting: Engine, guessing: Guessing) -> None:
    whole = Answer(drafting, GREEDY, IDS)
    text, draw = [*IDS.ids, *whole.tokens], random.Random(5)
    for end in ("stop", "limit", "cancel") * 3:
        guessing.so_many(8, text)
        at = draw.randrange(3, TOKENS - 9)
        if end == "cancel":
            cancel = threading.Event()
            said = first_tokens(drafting.generate(IDS, GREEDY, cancel, reuse=True), at, cancel.set)
        else:
            begin = draw.randrange(len(whole.text) - 3)
            how = {"stop": (whole.text[begin : begin + 3],)} if end == "stop" else {"max_new_tokens": at}
            said = Answer(drafting, Sampling(**{"max_new_tokens": TOKENS, **how}), IDS, reuse=True).tokens
        assert said == whole.tokens[: len(said)]
        if draw.random() < 0.5:
            drafting.fresh_cache()  # takes the memory
        longer = Ids([*IDS.ids, *said, 5, 6])
        after = Answer(drafting, Sampling(max_new_tokens=9), longer, reuse=True)
        assert after.stats.cached_tokens >= len(longer.ids) - 3, "all that was computed"
        drafting.parts.memory.prefix_cache.clear()
        guessing.so_many(0)
        assert after.tokens == Answer(drafting, Sampling(max_new_tokens=9), longer).tokens


@pytest.mark.parametrize("where", ["in a layer", "while tokens are drawn"])
def test_a_chat_goes_on_after_a_pass_that_broke_off(where: str, drafting: Engine, guessing: Guessing) -> None:
    whole, site = Answer(drafting, GREEDY, IDS), drafting.loaded.sites[-1].module
    longer = Ids([*IDS.ids, *whole.tokens[:9], 5, 6])
    wanted = Answer(drafting, GREEDY, longer).tokens
    guessing.so_many(3, [*IDS.ids, *whole.tokens])
    drawn = list[int]()

    def fail(*_: object) -> None:
        if len(drawn) > 5:
            raise ZeroDivisionError

    def draw(ids: Sequence[int], given: torch.Tensor) -> int:
        drawn.append(int(given[0].argmax()))
        if where != "in a layer":
            fail()
        return drawn[-1]

    hook = fail if where == "in a layer" else lambda *_: None
    with site.register_forward_pre_hook(hook), pytest.raises(ZeroDivisionError):
        list(drafting.generate(IDS, GREEDY, draw=draw, reuse=True))
    assert Answer(drafting, GREEDY, longer, reuse=True).tokens == wanted
    drafting.expert_cache.check_integrity()


def test_others_are_computed_before_it_is_known_how_many_stay(drafting: Engine) -> None:
    """By the steps of the same pass, on other memory; and memory that is given back is not written any more."""
    pipeline, pool = drafting.wiring.measuring, drafting.wiring.pool
    wanted = read(pipeline, pool.chat.fresh(), TEXT)
    one, other = pool.take(64), pool.take(64)
    assert one is not None and other is not None
    for kv in (one, other):
        read(pipeline, kv, TEXT[:20])
    for kv, refused in ((one, 2), (other, 1)):
        pipeline.forward(Batch("decode", (Share([*TEXT[20 : 23 - refused], 9, 9][:3], kv),)), 3)
        kv.memory.take_back(kv, refused)
        assert kv.memory.unsettled
    for kv in (one, other):
        checkpoint = kv.memory.checkpoint(kv)
        assert checkpoint is not None and checkpoint.length == kv.length and not kv.memory.unsettled
        assert torch.equal(read(pipeline, kv, TEXT[kv.length :]), wanted)
    pipeline.forward(Batch("decode", (Share([7, 8], one),)), 2)
    assert one.memory.unsettled
    pool.give_back(one)
    assert not one.memory.unsettled
    pool.give_back(other)
    pipeline.end()
