"""Guessed tokens are verified several in a pass: answers are the ones without, token by token and bit for bit, and what
is recorded counts only what was kept."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.engine.drafted import PROMPT, TOKENS, Answer, bits
from tests.loaded import loaded
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
KINDS: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "gpt_oss": {}, "deepseek_v3": {}, "mixtral": {}}


def engine_of(arch: str, path: Path, **settings: object) -> Any:
    model = save_tokenizer(make_checkpoint(arch, path, **KINDS.get(arch, {})))
    how: dict[str, Any] = dict(arithmetic="fast", context=256, sequences=3)
    return loaded(model, {"budget": "50%", **settings}, **how)


@pytest.fixture(scope="module")
def drafting() -> Iterator[Engine]:
    how: dict[str, Any] = dict(arithmetic="fast", context=256, sequences=3)
    with loaded("demo", {"budget": "50%", "link": "own"}, **how) as engine:
        yield engine


@pytest.fixture
def engine(drafting: Engine) -> Iterator[Engine]:
    yield drafting
    drafting.parts.drafter.gate.fixed = None
    drafting.change({"drafts": "off"})


def guessing(engine: Engine, count: int | None) -> None:
    """As many tokens always, or as the gate says, or None: none at all."""
    engine.change({"drafts": "off" if count is None else "lookup"})
    engine.parts.drafter.gate.fixed = count or None


@pytest.mark.parametrize("arch", layered(list(KINDS), quick=lambda arch: arch in ("qwen3_moe", "gpt_oss")))
def test_no_bit_depends_on_drafts(arch: str, tmp_path: Path) -> None:
    """Also past a window, whose memory the refused tokens were written to as well."""
    with engine_of(arch, tmp_path) as engine:
        wanted, logits = bits(engine)
        for count in (1, 3, 8):
            guessing(engine, count)
            tokens, found = bits(engine)
            assert tokens == wanted
            assert torch.equal(found, logits)
            assert Answer(engine, Sampling(max_new_tokens=TOKENS)).stats.more["accepted"] > 0


def test_without_a_prefetcher_nothing_is_compared_that_drafts_would_wait_for(engine: Engine) -> None:
    """Auto, with prefetching switched off by hand."""
    guessing(engine, 3)
    engine.change({"predictor": "none", "prefetch_auto": True})
    try:
        assert Answer(engine, Sampling(max_new_tokens=TOKENS)).stats.more["drafted"] > 0
    finally:
        engine.change({"prefetch_auto": False})


@pytest.mark.parametrize("arch", layered(["qwen3_moe", "gpt_oss", "deepseek_v3"], quick=lambda arch: False))
def test_a_thousand_answers(arch: str, tmp_path: Path) -> None:
    draw, guessed = random.Random(7), 0
    with engine_of(arch, tmp_path) as engine:
        size = engine.model.config.vocab_size
        for number in range(334):
            some = [draw.randrange(size) for _ in range(draw.randrange(2, 12))]
            prompt = Ids((some * 9)[: draw.randrange(8, 70)])
            how = Sampling(max_new_tokens=40, temperature=draw.choice([0.0, 0.8]), seed=number)
            guessing(engine, None)
            wanted = Answer(engine, how, prompt)
            guessing(engine, draw.choice([0, 1, 2, 5, 8]))
            found = Answer(engine, how, prompt)
            assert found.tokens == wanted.tokens
            guessed += found.stats.more["drafted"]
    assert guessed > 1000


@pytest.mark.parametrize(
    ("count", "how"),
    [
        (8, {"temperature": 0.0}),
        (2, {"temperature": 0.5, "seed": 11}),
        (8, {"temperature": 0.4, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.05, "frequency_penalty": 0.1}),
        (2, {"temperature": 0.0, "logprobs": 2}),
    ],
)
def test_draws_are_those_without(engine: Engine, count: int, how: dict[str, Any]) -> None:
    sampling = Sampling(max_new_tokens=TOKENS, **how)
    wanted = Answer(engine, sampling)
    guessing(engine, count)
    found = Answer(engine, sampling)
    assert (found.tokens, found.text, found.logprobs) == (wanted.tokens, wanted.text, wanted.logprobs)
    assert found.stats.more["drafted"] > 0
    assert len(found.tokens) == TOKENS


def test_what_is_counted_is_what_was_kept(engine: Engine) -> None:
    wanted = Answer(engine, Sampling(max_new_tokens=TOKENS))
    guessing(engine, 4)
    found = Answer(engine, Sampling(max_new_tokens=TOKENS))
    drafted = [step for step in found.decode if step.drafted]
    assert any(step.accepted for step in drafted)
    assert any(step.accepted < step.drafted for step in drafted)
    assert all(step.tokens == 1 + step.accepted == step.rows[0][1] for step in found.decode)
    assert sum(step.tokens for step in found.decode) == TOKENS - 1 == len(wanted.decode)
    routed = [torch.as_tensor(step.ids) for step in found.decode]
    assert torch.equal(torch.cat(routed, 1), torch.cat([torch.as_tensor(step.ids) for step in wanted.decode], 1))
    assert len({step.index for step in found.steps}) == len(found.steps)  # each is sent once
    spent = sum(step.total_ms for step in found.decode)
    assert found.stats.tpot_ms == pytest.approx(spent / (TOKENS - 1))
    assert found.stats.more["accepted"] == sum(step.accepted for step in drafted)


def test_it_ends_where_it_would(engine: Engine) -> None:
    """At a text within the tokens of a pass, or a limit, and the KV cache goes on from there."""
    whole = Answer(engine, Sampling(max_new_tokens=TOKENS))
    guessing(engine, 8)
    for cut in range(len(whole.text) // 3, len(whole.text) - 3, len(whole.text) // 6):
        stop = whole.text[cut : cut + 3]
        guessing(engine, None)
        wanted = Answer(engine, Sampling(max_new_tokens=TOKENS, stop=(stop,)), reuse=True)
        engine.parts.memory.prefix_cache.clear()
        guessing(engine, 8)
        found = Answer(engine, Sampling(max_new_tokens=TOKENS, stop=(stop,)), reuse=True)
        assert (found.text, found.tokens, found.stats.reason) == (wanted.text, wanted.tokens, wanted.stats.reason)
        longer = Ids([*engine.prompt.encode(PROMPT, 256), *found.tokens, 5, 6])
        after = Answer(engine, Sampling(max_new_tokens=9), longer, reuse=True)
        assert after.stats.cached_tokens > 0
        engine.parts.memory.prefix_cache.clear()
        guessing(engine, None)
        assert after.tokens == Answer(engine, Sampling(max_new_tokens=9), longer).tokens
    for most in (1, 2, 3):
        guessing(engine, 8)
        assert Answer(engine, Sampling(max_new_tokens=most)).tokens == whole.tokens[:most]


def test_a_cancelled_answer_keeps_what_was_said(engine: Engine) -> None:
    guessing(engine, 8)
    whole = Answer(engine, Sampling(max_new_tokens=TOKENS))
    for at in (1, 2, 3, 8, 20):
        cancel, said = threading.Event(), list[int]()
        for piece in engine.generate(PROMPT, Sampling(max_new_tokens=TOKENS), cancel, reuse=True):
            if piece.token is not None:
                said.append(piece.token)
                if len(said) == at:
                    cancel.set()
        assert said == whole.tokens[:at]
        closed = engine.generate(PROMPT, Sampling(max_new_tokens=TOKENS), reuse=True)
        for piece in closed:
            if piece.token is not None:
                break
        closed.close()  # type: ignore[attr-defined]
    assert Answer(engine, Sampling(max_new_tokens=TOKENS), reuse=True).tokens == whole.tokens


def test_changes_in_the_middle(engine: Engine) -> None:
    wanted, draw = bits(engine), random.Random(3)
    for _ in range(3):
        seen = list[torch.Tensor]()

        def drawn(_: Sequence[int], given: torch.Tensor, seen: list[torch.Tensor] = seen) -> int:
            seen.append(given[0].clone())
            return int(given[0].argmax())

        for piece in engine.generate(PROMPT, Sampling(max_new_tokens=TOKENS), draw=drawn):
            if piece.token is not None and draw.random() < 0.3:
                guessing(engine, draw.choice([None, 0, 1, 4, 8]))
                engine.change(
                    {"budget": draw.choice(["50%", "60%", "100%"]), "predictor": draw.choice(["none", "gate"])}
                )
        assert torch.equal(torch.stack(seen), wanted[1])
        engine.expert_cache.check_integrity()
    engine.change({"budget": "50%", "predictor": "none"})


@pytest.mark.parametrize("several", [1, 3])
def test_in_batches(engine: Engine, several: int) -> None:
    """A sequence alone in its passes verifies guesses; together with others it does not."""
    sampling, cancel = Sampling(max_new_tokens=TOKENS), threading.Event()
    wanted = Answer(engine, sampling)
    guessing(engine, 4)
    asked = [BatchRequest(n, PROMPT, sampling) for n in range(several)]
    said: dict[object, list[int]] = {n: [] for n in range(several)}
    drafted = dict[int, int]()
    for one in engine.batching.run(iter(asked), several, cancel):
        assert not one.error
        if one.piece is not None and one.piece.token is not None:
            said[one.key].append(one.piece.token)
        if one.piece is not None and one.piece.step is not None:
            drafted[one.piece.step.index] = one.piece.step.drafted
    assert all(tokens == wanted.tokens for tokens in said.values())
    assert bool(sum(drafted.values())) == (several == 1)


def test_where_it_would_blur_what_is_recorded_it_rests(engine: Engine) -> None:
    guessing(engine, 4)
    sampling = Sampling(max_new_tokens=12)
    engine.keep(probs=False, ranks=False, tokens=True)
    try:
        assert not Answer(engine, sampling).stats.more["drafted"]
    finally:
        engine.keep(probs=False, ranks=False, tokens=False)
    engine.change({"miss": "drop"})
    assert not Answer(engine, sampling).stats.more["drafted"]
    engine.change({"miss": "wait"})
    assert Answer(engine, Sampling(max_new_tokens=TOKENS)).stats.more["drafted"]


def test_what_passes_took_is_kept_until_something_else_is_changed(engine: Engine) -> None:
    for count in (0, 4):  # what a token takes alone is known first
        guessing(engine, count)
        Answer(engine, Sampling(max_new_tokens=TOKENS))
    gate = engine.parts.drafter.gate
    gate.fixed = None
    assert gate.took_ms(5) is not None
    for drafts in ("off", "lookup"):
        engine.change({"drafts": drafts})
    assert gate.took_ms(5) is not None
    engine.change({"eviction": "lfu"})
    assert gate.took_ms(5) is None
    engine.change({"eviction": engine.spec.settings["eviction"]})


def test_where_it_cannot_it_says_why(tmp_path: Path) -> None:
    model, why = save_tokenizer(make_checkpoint("mixtral", tmp_path)), "fast arithmetic"
    with loaded(model, {"budget": "50%"}, arithmetic="reference", context=128) as engine:
        guessing(engine, 4)
        assert not Answer(engine, Sampling(max_new_tokens=9)).stats.more["drafted"]
        assert any("drafts lookup is not used" in text and why in text for _, text in engine.frame().marks)


# ---------------------------------------------------------------------- guesses
