"""Prompts answered together get the answers that each gets alone, whatever the model's code does between tokens: where
it cannot be divided among sequences, they are answered one at a time, and the engine says why."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.engine.batch_trial import TOGETHER, special_lengths
from core.hf import packed
from core.hf.cached_pass import cached_pass
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import AnswerStats, Ids
from tests.architectures.trial import random_model, save, transformers_own
from tests.decoded import greedy
from tests.equality.test_batches import CLOSE
from tests.loaded import unloading

DRAW = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(3, 250, (length,), generator=DRAW).tolist() for length in (24, 7, 1, 13)]
NEW = 5
WINDOW = 12  # of a tiny gpt-oss
DIVIDED = ("qwen4_exp_text", "glm_moe_dsa", "mistral_large4", "hy_v4", "hy_v4_vl", "qwen3_omni_moe_thinker")
"""Models whose layers hand on more than rows (positions, selected positions, keys), and one with a head of its own."""


class Answers:
    """Prompts answered by an engine: of each its tokens, the logits [V] before each token, and its statistics."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
        self.logits: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
        self.stats = dict[Any, AnswerStats]()
        monkeypatch.setattr(engine.batching._requests, "draw", lambda ids, *_: greedy(self.logits[PROMPTS.index(ids)]))
        sampling = Sampling(max_new_tokens=NEW)
        requests = [BatchRequest(at, Ids(prompt), sampling) for at, prompt in enumerate(PROMPTS)]
        for one in engine.generate_many(requests, at_once):
            assert not one.error
            if one.piece is not None and one.piece.stats is not None:
                self.stats[one.key] = one.piece.stats

    @property
    def closeness(self) -> set[float]:
        return {one.closeness for one in self.stats.values()}


@contextmanager
def loaded(path: Path) -> Iterator[Engine]:
    torch.set_num_threads(1)
    spec = LoadSpec.checked(str(path), Settings({"budget": "50%"}), dtype="float32", context=64, sequences=4)
    with unloading(Engine.load(spec)) as engine:
        yield engine


@torch.inference_mode()
def alone(path: Path) -> list[list[torch.Tensor]]:
    model, found = transformers_own(path, torch.float32), []
    for prompt in PROMPTS:
        cache, ids = DynamicCache(config=model.config), prompt
        found.append([])
        for _ in range(NEW):
            logits = cached_pass(model, torch.tensor([ids]), cache, logits_to_keep=1).logits[0, -1]
            found[-1].append(logits.clone())
            ids = [int(logits.argmax())]
    return found


def off(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> float:
    pairs = [pair for both in zip(ours, theirs, strict=True) for pair in zip(*both, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.long(0.1)
@pytest.mark.parametrize("model_type", DIVIDED)
def test_what_layers_hand_on_is_divided(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(random_model(model_type), tmp_path)
    with loaded(path) as engine:
        together = Answers(engine, monkeypatch, 4)
        assert off(together.logits, alone(path)) < CLOSE
        assert (together.closeness, engine.one_at_a_time) == ({TOGETHER}, "")


@pytest.mark.long(0.1)
def test_a_model_that_cannot_be_divided_answers_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(random_model("inkling2_text"), tmp_path)
    with loaded(path) as engine:
        found = Answers(engine, monkeypatch, 4)
        assert off(found.logits, alone(path)) == 0.0
        assert (found.closeness, engine.one_at_a_time) == (
            {0.0},
            "This model answers prompts one at a time: its code cannot compute several prompts in one pass.",
        )


def test_wrong_logits_are_found_before_an_answer_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With positions that begin anew in each pass nothing fails; the logits are others."""
    path, compute = save(random_model("qwen3_moe"), tmp_path), packed.Packing.compute

    def wrong(self: Any, tokens: Any, lengths: list[int], *rest: Any) -> torch.Tensor:
        return compute(self, tokens, [0] * len(lengths), *rest)

    with loaded(path) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(packed.Packing, "compute", wrong)
            found = Answers(engine, broken, 4)
        assert off(found.logits, alone(path)) == 0.0
        assert found.closeness == {0.0} and "its logits differ" in engine.one_at_a_time


@pytest.mark.long(0.1)
def test_what_is_wrong_from_a_length_on_keeps_longer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, compute = save(random_model("gpt_oss"), tmp_path), packed.Packing.compute

    def wrong(self: Any, tokens: Any, lengths: list[int], *rest: Any) -> torch.Tensor:
        logits = compute(self, tokens, lengths, *rest)
        return logits.flip(-1) if max(lengths) > WINDOW else logits

    with loaded(path) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(packed.Packing, "compute", wrong)
            found = Answers(engine, broken, 4)
        assert off(found.logits, alone(path)) < CLOSE
        assert engine.one_at_a_time.startswith(f"Prompts that may grow beyond {WINDOW} tokens with their answers are")
        assert [found.stats[at].closeness for at in range(len(PROMPTS))] == [0.0, TOGETHER, TOGETHER, 0.0]


def test_a_trial_that_is_stopped_decides_nothing(tmp_path: Path) -> None:
    with loaded(save(random_model("qwen3_moe"), tmp_path)) as engine:
        trial, stopped = engine.wiring.trial, threading.Event()
        stopped.set()
        assert not trial.allows(10, stopped.is_set) and trial.reason == ""
        assert trial.allows(10)
        engine.wiring.pool.clear()
        assert engine.wiring.pool.bytes == 0


@pytest.mark.long(0.1)
def test_a_trial_waits_for_memory(tmp_path: Path) -> None:
    with loaded(save(random_model("qwen3_moe"), tmp_path)) as engine:
        trial, pool = engine.wiring.trial, engine.wiring.pool
        taken = [kv for kv in (pool.take(engine.context) for _ in range(5)) if kv is not None]
        assert len(taken) == 4
        assert not trial.allows(10) and trial.waits and trial.reason == ""
        for kv in taken:
            pool.give_back(kv)
        assert trial.allows(10) and not trial.waits
        pool.clear()


@pytest.mark.long(0.1)
def test_what_watches_the_model_does_not_see_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(random_model("qwen3_moe"), tmp_path)
    with loaded(path) as engine:
        engine.change({"predictor": "gate", "telemetry": "lab"})
        found = Answers(engine, monkeypatch, 4)
        assert off(found.logits, alone(path)) < CLOSE
        assert TOGETHER in found.closeness


def test_lengths_of_a_config() -> None:
    config = random_model("gpt_oss").config
    assert special_lengths(config) == [WINDOW, config.rope_parameters["original_max_position_embeddings"]]
