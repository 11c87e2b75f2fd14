"""Many prompts answered together: each answer is the one it has alone; sequences join and leave; what ends one ends no
other; the budget holds."""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.errors import BusyError
from core.policy.batching import NoScheduler, RandomScheduler, Scheduler, TokenScheduler
from core.policy.batching.scheduler import Groups
from core.policy.batching.unions import Paths
from core.policy.predict import Prediction
from core.policy.predict.path_reader import PathReader
from core.policy.predict.worker import InlineWorker
from core.runtime.prediction.view import EngineView
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.engine.batches import GREEDY, TEXTS, Answers, alone, together
from tests.engine.profiles import drawn_profile
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
    texts = {"long": "very long " * 200, "good": TEXTS[0], "empty": ""}
    requests = [BatchRequest(name, text, GREEDY) for name, text in texts.items()]
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


CARRIED = "qwen3_moe gpt_oss qwen3_next deepseek_v32 exaone_moe lfm2_moe inkling_text nemotron_h".split()


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
    text = "caches keep what is hot. " * 4
    assert engine.sizes.chunk == 4 * engine.context
    short = Sampling(max_new_tokens=2, temperature=0.0)
    found = together(engine, [BatchRequest(n, f"{n} {text}", short) for n in range(4)], 4)
    first = next(iter(found.steps.values()))
    assert len(first.rows) == 4 and first.tokens > engine.context


SCHEDULERS = layered(
    [NoScheduler(), RandomScheduler(2), TokenScheduler()], quick=lambda one: isinstance(one, TokenScheduler)
)


@pytest.mark.long(0.1)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_two_units_are_divided_in_turn_beside_the_computation(engine: Engine, scheduler: Scheduler) -> None:
    """Four batches are at work; answers are those of each alone, and only the first division is waited for."""
    threads: list[str] = []
    regroup = scheduler.regroup

    class Where:
        def regroup(self, paths: Paths, size: int) -> Groups:
            threads.append(threading.current_thread().name)
            return regroup(paths, size)

    texts = [f"{text} {n}" for n in range(2) for text in TEXTS]
    wanted = {n: alone(engine, text, GREEDY) for n, text in enumerate(texts)}
    found, requests = Answers(), [BatchRequest(n, text, GREEDY) for n, text in enumerate(texts)]
    for one in engine.generate_many(requests, 2, scheduler=Where(), pipelined=True):
        found.take(one)
    assert found.tokens == wanted
    sizes = [len(step.rows) for step in found.steps.values() if step.phase == "decode"]
    assert max(sizes) <= 2 and sizes.count(2) >= 8
    beside = [name for name in threads if name.startswith("moestro-schedule")]
    assert len(beside) >= 8 and len(threads) - len(beside) <= 2, threads
    assert not [one for one in threading.enumerate() if one.name.startswith("moestro-schedule")], "its thread has ended"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scheduled_answers_are_those_of_each_alone(engine: Engine, scheduler: Scheduler) -> None:
    wanted = {n: alone(engine, text, GREEDY) for n, text in enumerate(TEXTS)}
    found = together(engine, [BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS)], 3, scheduler)
    assert found.tokens == wanted
    sizes = [len(step.rows) for step in found.steps.values() if step.phase == "decode"]
    assert max(sizes) <= 3 and sizes.count(3) >= 8, "two batches of three"
    assert len(engine.batching.regrouped) >= 8


class Told(NoScheduler):
    def __init__(self) -> None:
        self.seen: list[Paths] = []

    def regroup(self, paths: Paths, size: int) -> Groups:
        self.seen.append(paths)
        return super().regroup(paths, size)


@pytest.mark.long(0.1)
def test_the_path_network_follows_every_sequence_of_a_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is told what it says of each one's next token, and the pass prefetches what any of them needs."""
    engine.use_profile(drawn_profile(engine))
    wanted = {n: alone(engine, text, GREEDY) for n, text in enumerate(TEXTS[:4])}
    engine.change({"predictor": "routing_path", "eviction": "plec", "scope": "global", "prefetch_guard": False})
    host, shape = engine.predictor_host, engine.shape
    predictor: Any = host.predictor
    predictor.close()
    predictor.worker = InlineWorker(PathReader(predictor.task(EngineView(host, -1, (), None, None))))
    first: list[set[tuple[int, int]]] = []
    predict_first = host.predict_first

    def named() -> Sequence[Prediction]:
        predictions = predict_first()
        first.append({(one.layer, one.expert) for one in predictions})
        return predictions

    monkeypatch.setattr(host, "predict_first", named)
    scheduler = Told()
    pieces = together(engine, [BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS[:4])], 2, scheduler)
    assert pieces.tokens == wanted
    followed: dict[int, PathReader] = {}
    steps = list(pieces.steps.values())
    assert len(first) == len(steps)
    prompts = [engine.prompt.encode(text, engine.context) for text in TEXTS[:4]]
    expected: dict[int, np.ndarray] = {}
    turns = iter(scheduler.seen)
    decodes, done = 0, Counter[int]()
    for step, said in zip(steps, first, strict=True):
        if step.phase == "decode" and decodes % 2 == 0:
            told = next(turns).reshape(-1, shape.layers, shape.experts)
        decodes += step.phase == "decode"
        need = np.zeros((shape.layers, shape.experts), bool)
        for request, count in step.rows:
            one = request - steps[0].rows[0][0]
            if step.phase == "prefill":
                followed[one] = PathReader(predictor.task(EngineView(host, -1, (), None, None)))
                tokens = prompts[one]
            else:
                tokens = [wanted[one][done[one]]]
                done[one] += 1
            chances = followed[one].follow(tokens)
            most = min(shape.top_k * count, shape.experts)
            own = np.zeros_like(need)
            np.put_along_axis(own, np.argsort(-chances, 1, "stable")[:, :most], True, 1)
            need |= own
            if step.phase == "decode":
                expected[one] = own
                assert np.array_equal(told[one], own), "what the scheduler was told of it"
        assert said == set(zip(*map(list, np.nonzero(need)), strict=True)), "what the pass is said to need"
    assert decodes >= 8


@pytest.mark.long(0.1)
def test_the_token_scheduler_regroups_by_what_sequences_needed_last(engine: Engine) -> None:
    scheduler = Told()
    found = together(engine, [BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS[:4])], 2, scheduler)
    shape, newest = engine.shape, dict[int, np.ndarray]()
    decoded = [step for step in found.steps.values() if step.phase == "decode"]
    for first, second, told in zip(decoded[0::2], decoded[1::2], scheduler.seen[1:], strict=False):
        for step in (first, second):
            for row, (request, _) in enumerate(step.rows):
                newest[request] = step.ids[:, row]
        for at, request in enumerate(sorted(newest)):
            experts = told.reshape(-1, shape.layers, shape.experts)[at]
            wanted = [sorted({*one}) for one in newest[request].tolist()]
            assert [sorted(np.flatnonzero(one)) for one in experts] == wanted
