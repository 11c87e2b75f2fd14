"""Many prompts answered together: each answer is the one it has alone; sequences join and leave; what ends one ends no
other; the budget holds."""

import threading
from pathlib import Path

import pytest

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.errors import BusyError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.engine.batches import GREEDY, TEXTS, Answers, alone, together
from tests.loaded import unloading
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture
def engine(of_four: Engine) -> Engine:
    return of_four


DRAWN = Sampling(max_new_tokens=7, temperature=0.9, top_p=0.9, seed=5)


@pytest.mark.long(0.1)
def test_each_answer_is_the_one_it_has_alone(engine: Engine) -> None:
    wanted = {(n, s.seed): alone(engine, text, s) for n, text in enumerate(TEXTS) for s in (GREEDY, DRAWN)}
    requests = [BatchRequest((n, s.seed), text, s) for n, text in enumerate(TEXTS) for s in (GREEDY, DRAWN)]
    for limit in (1, 4, 16):
        found = together(engine, requests, limit)
        assert found.tokens == wanted and not found.errors, limit
        assert {key: stats.new_tokens for key, stats in found.stats.items()} == {k: len(v) for k, v in wanted.items()}
        assert 1 + (limit > 1) <= max(len(step.rows) for step in found.steps.values()) <= limit


def test_records_say_whose_rows_they_are(engine: Engine) -> None:
    found = together(engine, [BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS[:3])], 3)
    decode = [step for step in found.steps.values() if step.phase == "decode"]
    assert [len(step.rows) for step in decode] == [3] * 8, "9 tokens each, the first with the prompts"
    shape = engine.shape
    for step in decode:
        assert step.tokens == 3 and step.ids.shape == (shape.layers, 3, shape.top_k)
        assert len({request for request, _ in step.rows}) == 3 and {count for _, count in step.rows} == {1}
        for layer in range(shape.layers):
            assert len(step.expert[step.layer == layer]) == len({*step.ids[layer].reshape(-1).tolist()}), "each once"


def test_a_prompt_that_does_not_fit_is_told_and_the_others_are_answered(engine: Engine) -> None:
    wanted = alone(engine, TEXTS[0], GREEDY)
    requests = [
        BatchRequest("long", "very long " * 200, GREEDY),
        BatchRequest("good", TEXTS[0], GREEDY),
        BatchRequest("empty", "", GREEDY),
    ]
    found = together(engine, requests, 4)
    assert found.tokens == {"good": wanted} and {*found.errors} == {"long", "empty"}
    assert "context" in found.errors["long"]


@pytest.mark.long(0.1)
def test_memory_is_given_back_and_the_kept_chat_goes_on(engine: Engine) -> None:
    engine.change({"kv_chats": 2})
    list(engine.generate(TEXTS[0], GREEDY, reuse=True))
    together(engine, [BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS)], 4)
    assert engine.wiring.pool.bytes == 0, "nothing is held when no one has a sequence"
    again = list(engine.generate(TEXTS[0], GREEDY, reuse=True))
    assert again[-1].stats is not None and again[-1].stats.cached_tokens > 0, "it waited in host memory"


CARRIED = layered(
    ("qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v32", "exaone_moe", "lfm2_moe", "inkling_text", "nemotron_h"),
    quick=lambda arch: arch == "gpt_oss",
)


@pytest.mark.long(0.1)
@pytest.mark.parametrize("arch", CARRIED)
def test_chats_beside_each_other_go_on_from_their_own_kv(arch: str, tmp_path: Path) -> None:
    """Attention, a window, states, selected positions; each of three by turns in the chats' own memory."""
    path = save_tokenizer(make_checkpoint(arch, tmp_path / arch))
    spec = LoadSpec.checked(str(path), Settings({"budget": "50%"}), context=128, dtype="float32", sequences=3)
    with unloading(Engine.load(spec)) as engine:
        engine.prompt.ends.clear()
        asked = Sampling(max_new_tokens=6, temperature=0.0)
        texts, held = [[3 + (7 * n + i * i) % 240 for i in range(14 + 5 * n)] for n in range(3)], [0, 0, 0]
        for turn in range(3):
            wanted = {n: alone(engine, Ids(text), asked) for n, text in enumerate(texts)}
            order = [(turn + n) % 3 for n in range(3)]
            found = together(engine, [BatchRequest(n, Ids(texts[n]), asked, reuse=True) for n in order], 3)
            # where positions are selected, the last bits of what was computed in other pieces may select another one
            assert found.tokens == wanted or arch == "deepseek_v32"
            assert max(len(step.rows) for step in found.steps.values()) == 3
            assert [found.stats[n].cached_tokens for n in range(3)] == held, f"turn {turn}"
            held = [len(text) + 5 for text in texts]  # the last token was drawn, and not computed
            texts = [[*text, *found.tokens[n], 9, 30 + turn] for n, text in enumerate(texts)]
        assert engine.wiring.pool.bytes == engine.wiring.pool.chat.bytes, "only the chats' own memory is held"
        assert engine.memory().kept > 0


@pytest.mark.long(0.1)
def test_no_more_join_than_their_kv_has_room_for(engine: Engine) -> None:
    """Four texts of the whole context of 128; each of these takes it all."""
    requests = [BatchRequest(n, text, Sampling(max_new_tokens=128, temperature=0.0)) for n, text in enumerate(TEXTS)]
    found = together(engine, requests, 6)
    assert {*found.stats} == {*range(6)} and max(len(step.rows) for step in found.steps.values()) == 4
    assert all(stats.reason == "context" for stats in found.stats.values())


def test_cancelling_ends_all_within_a_layer(engine: Engine) -> None:
    cancel, seen = threading.Event(), Answers()
    for one in engine.generate_many([BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS)], 4, cancel):
        seen.take(one)
        if sum(map(len, seen.tokens.values())) >= 10:
            cancel.set()
    assert {*seen.stats} == {0, 1, 2, 3} and all(one.reason == "cancelled" for one in seen.stats.values())
    engine.expert_cache.check_integrity()
    assert alone(engine, TEXTS[0], GREEDY), "the model is free again"


def test_the_model_is_busy_meanwhile_and_free_after_an_abandoned_batch(engine: Engine) -> None:
    pieces = engine.generate_many([BatchRequest(0, TEXTS[0], GREEDY)])
    next(pieces)
    with pytest.raises(BusyError, match="batch"):
        next(engine.generate_many([BatchRequest(1, TEXTS[1], GREEDY)]))
    pieces.close()  # type: ignore[attr-defined]
    assert engine.wiring.pool.bytes == 0 and alone(engine, TEXTS[1], GREEDY)


def test_settings_change_between_passes(engine: Engine) -> None:
    """Budget, policy, scope and predictor move while sequences join and leave; answers stay what they are."""
    wanted = {n: alone(engine, text, GREEDY) for n, text in enumerate(TEXTS)}
    turns = [
        {"budget": "100%"},
        {"predictor": "gate", "budget": "60%"},
        {"scope": "global", "eviction": "lfu"},
        {"predictor": "previous_token"},
        {"budget": "50%", "scope": "layer"},
        {"predictor": "all_next"},
    ]
    found = Answers()
    for count, one in enumerate(engine.generate_many([BatchRequest(n, t, GREEDY) for n, t in enumerate(TEXTS)], 3)):
        found.take(one)
        engine.change(turns[count % len(turns)])
    engine.expert_cache.check_integrity()
    assert found.tokens == wanted


@pytest.mark.long(0.1)
def test_what_was_computed_lossily_is_computed_again_for_each(engine: Engine) -> None:
    """Lossy options are turned off in the middle: every answer still goes on, exactly from there, and ends."""
    engine.change({"miss": "drop"})
    found = Answers()
    for one in engine.generate_many([BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS[:3])], 3):
        found.take(one)
        if sum(map(len, found.tokens.values())) == 9:
            engine.change({"miss": "wait"})
    assert {key: stats.new_tokens for key, stats in found.stats.items()} == {0: 9, 1: 9, 2: 9}
    assert max(found.steps.items())[1].exact and not all(step.lossless for step in found.steps.values())
    assert engine.wiring.pool.bytes == 0


@pytest.mark.long(0.1)
def test_prompts_are_read_together_beyond_the_context_of_one(engine: Engine) -> None:
    """A pass holds as many tokens as the sequences that there is KV memory for may have."""
    text = "caches keep what is hot. " * 4
    assert engine.sizes.chunk == 4 * engine.context
    short = Sampling(max_new_tokens=2, temperature=0.0)
    found = together(engine, [BatchRequest(n, f"{n} {text}", short) for n in range(4)], 4)
    first = next(iter(found.steps.values()))
    assert len(first.rows) == 4 and first.tokens > engine.context
