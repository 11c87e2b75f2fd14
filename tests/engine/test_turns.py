"""Kept KV caches in an engine: what they report, when they are dropped, and what they leave alone."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.profile.trace import FileTrace, TraceHead, TraceWriter
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.types import AnswerStats, Ids, Piece
from tests.decoded import passes_of
from tests.engine.profiles import drawn_profile

FIRST = list(range(3, 33))
NEXT = [70, 71, 72, 73, 74]


def ask(engine: Engine, ids: Sequence[int], count: int = 5, *, reuse: bool = True) -> tuple[list[int], list[Piece]]:
    engine.prompt.ends = set()
    pieces = list(engine.generate(Ids(ids), Sampling(max_new_tokens=count, temperature=0.0), reuse=reuse))
    return [*ids, *(piece.token for piece in pieces if piece.token is not None)], pieces


def stats_of(pieces: Sequence[Piece]) -> AnswerStats:
    stats = pieces[-1].stats
    assert stats is not None
    return stats


def cached(engine: Engine, ids: Sequence[int], count: int = 5) -> int:
    return stats_of(ask(engine, ids, count)[1]).cached_tokens


def test_what_was_taken_over_is_told_while_reading_and_after(engine: Engine) -> None:
    text, pieces = ask(engine, FIRST)
    assert stats_of(pieces).cached_tokens == 0 and [p.cached for p in pieces if p.kind == "prefill"] == [0, 0]
    _, pieces = ask(engine, [*text, *NEXT])
    begun, read, *_ = pieces
    assert (begun.kind, begun.done, begun.cached, begun.total, begun.step) == ("prefill", 34, 34, 40, None)
    assert (read.kind, read.done, read.cached, read.total) == ("prefill", 40, 34, 40)
    steps = [piece.step for piece in pieces if piece.step is not None]
    assert [step.tokens for step in steps[:2]] == [6, 1] and [step.cached_tokens for step in steps[:2]] == [34, 0]
    stats = stats_of(pieces)
    assert (stats.prompt_tokens, stats.cached_tokens) == (40, 34) and stats.as_dict()["cached_tokens"] == 34


def test_without_asking_nothing_is_taken_over_or_kept(engine: Engine) -> None:
    text, _ = ask(engine, FIRST, reuse=False)
    assert cached(engine, [*text, *NEXT]) == 0
    _, pieces = ask(engine, [*text, *NEXT], reuse=False)
    assert stats_of(pieces).cached_tokens == 0
    assert [piece.step.tokens for piece in pieces if piece.kind == "prefill" and piece.step] == [40]


def test_the_setting_acts_and_off_keeps_nothing(engine: Engine) -> None:
    engine.change({"kv_chats": 0})
    text, _ = ask(engine, FIRST)
    assert cached(engine, [*text, *NEXT]) == 0
    engine.change({"kv_chats": 2})
    for start in (1, 2, 3):
        ask(engine, [start, *FIRST])
    assert cached(engine, [1, *FIRST, 9]) == 0, "the oldest was dropped"
    assert cached(engine, [3, *FIRST, 9]) == 31
    engine.change({"kv_chats": 0})
    assert cached(engine, [3, *FIRST, 9]) == 0


@pytest.mark.long(0.1)
def test_bytes_in_host_memory_are_counted(engine: Engine) -> None:
    assert engine.memory().kept == 0
    ask(engine, FIRST)
    assert engine.memory().kept == 0, "the text used last is in the memory of the KV cache"
    _, pieces = ask(engine, [1, *FIRST])
    per_token = engine.sizes.kv // engine.context
    assert engine.memory().kept == 34 * per_token == stats_of(pieces).kept_bytes
    assert engine.memory().kv == engine.sizes.kv and engine.memory().used <= engine.memory().budget


@pytest.mark.long(0.1)
def test_everything_is_dropped_with_the_profile(engine: Engine) -> None:
    text, _ = ask(engine, FIRST)
    engine.use_profile(drawn_profile(engine))
    assert len(engine.parts.memory.prefix_cache) == 0 and cached(engine, [*text, *NEXT]) == 0
    text, _ = ask(engine, FIRST)
    engine.use_profile(None)
    assert cached(engine, [*text, *NEXT]) == 0


def test_everything_is_dropped_on_unload(model: Path) -> None:
    engine = Engine.load(LoadSpec.checked(str(model), Settings({"budget": "50%"}), context=256))
    ask(engine, FIRST, 2)
    ask(engine, [1, *FIRST], 2)
    kept = engine.parts.memory.prefix_cache
    assert len(kept) == 2 and kept.bytes > 0
    engine.unload()
    assert len(kept) == 0 and kept.bytes == 0


def test_an_exact_answer_takes_over_no_lossy_token(engine: Engine) -> None:
    text, pieces = ask(engine, FIRST)
    plain = engine.parts.memory.prefix_cache._texts[-1].kv
    assert plain is not None and plain.exact
    engine.change({"miss": "drop", "budget": str(engine.sizes.bytes(12))})
    lossy, pieces = ask(engine, [*text, *NEXT], 8)
    stats = stats_of(pieces)
    assert stats.cached_tokens == len(text) - 1, "an exact beginning is as good as any"
    assert not stats.exact
    _, pieces = ask(engine, [*lossy, *NEXT])
    assert stats_of(pieces).cached_tokens == len(lossy) - 1, "the same lossy settings"
    engine.change({"rho": 1})
    _, pieces = ask(engine, [*lossy, *NEXT, 9])
    assert stats_of(pieces).cached_tokens < len(lossy) - 1, "others"
    engine.change({"miss": "wait"})
    _, pieces = ask(engine, [*lossy, *NEXT, 8])
    stats = stats_of(pieces)
    assert stats.exact and stats.cached_tokens < len(lossy) - 1
    assert all(piece.step.exact for piece in pieces if piece.step is not None)


@pytest.mark.long(0.1)
def test_lossy_turned_off_in_an_answer_keeps_the_exact_text(engine: Engine) -> None:
    engine.prompt.ends = set()
    engine.change({"miss": "drop", "budget": str(engine.sizes.bytes(12))})
    pieces = []
    for piece in engine.generate(Ids(FIRST), Sampling(max_new_tokens=8, temperature=0.0), reuse=True):
        pieces.append(piece)
        if piece.kind == "token" and len([p for p in pieces if p.kind == "token"]) == 3:
            engine.change({"miss": "wait"})
    text = [*FIRST, *(piece.token for piece in pieces if piece.token is not None)]
    _, after = ask(engine, [*text, *NEXT])
    assert stats_of(after).cached_tokens == len(text) - 1 and stats_of(after).exact


def test_stopped_while_the_prompt_is_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._generation._passes, "chunk", 8)
    engine.prompt.ends, cancel = set(), threading.Event()
    for piece in engine.generate(Ids(FIRST), Sampling(max_new_tokens=4), cancel, reuse=True):
        if piece.done == 16:
            cancel.set()
    assert cached(engine, FIRST) == 16


def test_an_answer_that_nobody_reads_on_is_kept_too(engine: Engine) -> None:
    engine.prompt.ends = set()
    answer = engine.generate(Ids(FIRST), Sampling(max_new_tokens=40), reuse=True)
    while next(answer).kind != "token":
        pass
    answer.close()  # type: ignore[attr-defined]
    assert cached(engine, [*FIRST, 9]) == len(FIRST)


@pytest.mark.long(0.1)
def test_a_draw_that_fails_takes_its_pass_along(engine: Engine) -> None:
    def draw(ids: Sequence[int], logits: torch.Tensor) -> int:
        if len(ids) > len(FIRST) + 2:
            raise ZeroDivisionError
        return 7

    with pytest.raises(ZeroDivisionError):
        list(engine.generate(Ids(FIRST), Sampling(max_new_tokens=9), draw=draw, reuse=True))
    assert cached(engine, [*FIRST, 7, 7, 7, 7]) == len(FIRST) + 2


@pytest.mark.long(0.1)
def test_measuring_changes_nothing_of_a_chat(engine: Engine) -> None:
    text, _ = ask(engine, FIRST)
    with engine.workbench("test") as bench:
        kv = bench.kv.fresh()
        assert kv.length == 0
        alone = bench.run(FIRST, kv).clone()
    _, pieces = ask(engine, [*text, *NEXT])
    assert stats_of(pieces).cached_tokens == len(text) - 1
    with engine.workbench("test") as bench:
        assert torch.equal(bench.run(FIRST, bench.kv.fresh()), alone)


PREDICTORS = [v.name for v in variants("predictor") if not getattr(v.make, "needs", ())]


@pytest.mark.long(0.1)
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_every_predictor_copes_with_a_request_that_begins_in_the_middle(engine: Engine, predictor: str) -> None:
    text, _ = ask(engine, FIRST)
    engine.change({"predictor": predictor})
    ask(engine, [1, *FIRST], 3)
    after, pieces = ask(engine, [*text, *NEXT])
    assert stats_of(pieces).cached_tokens == len(text) - 1 and len(after) == len(text) + len(NEXT) + 5


@pytest.mark.long(0.1)
def test_a_trace_has_the_tokens_that_were_computed(engine: Engine, tmp_path: Path) -> None:
    engine.keep(probs=False, ranks=False, tokens=True)
    text, first = ask(engine, FIRST)
    whole = [*text, *NEXT]
    after, second = ask(engine, whole)
    shape, steps = engine.shape, passes_of([*first, *second])
    with TraceWriter(tmp_path / "t", TraceHead(shape.layers, shape.experts, shape.top_k)) as writer:
        for step in steps:
            writer.add(step)
    chunks = list(FileTrace(tmp_path / "t").chunks())
    told = np.concatenate([chunk.tok for chunk in chunks if chunk.tok is not None]).tolist()
    assert told == after[:-1], "together the two requests computed each token of the chat once"
    assert sum(step.tokens for step in steps) == len(told)


def test_a_stop_in_the_middle_of_a_pass_leaves_the_tokens_before_it(engine: Engine) -> None:
    text, _ = ask(engine, FIRST)
    cancel, site = threading.Event(), engine.loaded.sites[0].module
    with site.register_forward_pre_hook(lambda *_: cancel.set()):  # seen before the next MoE layer
        pieces = list(engine.generate(Ids([*text, *NEXT]), Sampling(max_new_tokens=4), cancel, reuse=True))
    assert stats_of(pieces).reason == "cancelled" and stats_of(pieces).new_tokens == 0
    kept = engine.parts.memory.prefix_cache._texts[-1]
    assert kept.ids.tolist() == text[:-1] and kept.kv is not None and kept.kv.whole
    after, pieces = ask(engine, [*text, *NEXT])
    assert stats_of(pieces).cached_tokens == len(text) - 1
    engine.change({"kv_chats": 0})
    assert ask(engine, [*text, *NEXT])[0] == after
