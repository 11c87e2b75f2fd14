"""Whatever is guessed, by whom, and however many are answered together: tokens, texts, log probabilities and logits of
answers are those without, bit for bit, also where settings are changed in the middle, and answers are ended there."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.engine.request_factory import RequestFactory
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.loaded import loaded
from tests.mtp_checkpoint import dense, predictable
from tests.selection import layered

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
SOURCES = "lookup", "mtp", "model", "auto"
TOGETHER, END = 4, 255
NOISE = {  # of models with heads, what makes guesses wrong now and then
    "glm4_moe": 0.5,
    "deepseek_v3": 0.5,
    "qwen3_next": 0.5,
    "qwen3_5_moe_text": 0.5,
    "mimo_v2_flash": 1.0,
}
FORMS = [{"grammar": "start: /[a-z ,.]+/"}] if find_spec("llguidance") else []
CHANGES = {"budget": ["50%", "60%", "100%"], "predictor": ["none", "gate"], "scope": ["layer", "global"]}


@dataclass
class Said:
    """What came of a request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[object] = field(default_factory=list)
    drafted: float = 0.0


Asked = dict[int, tuple[Ids, Sampling]]
Logits = dict[int, list[torch.Tensor]]


@pytest.fixture(scope="module", params=layered(NOISE, quick=lambda arch: arch == "glm4_moe", minutes=3))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = predictable(request.param, tmp_path_factory.mktemp("model"), NOISE[request.param])
    small = dense(tmp_path_factory.mktemp("dense"))
    how: dict[str, Any] = dict(arithmetic="fast", context=256, sequences=TOGETHER)
    with loaded(model, {"budget": "50%", "drafts": "auto"}, draft=small, **how) as engine:
        engine.prompt.ends = {END}
        yield engine


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """What each token was drawn from, by the seeds of the requests."""
    found: Logits = {}
    plain = RequestFactory.draw

    def noting(self: RequestFactory, ids: list[int], sampling: Sampling, begun: int = 0) -> Any:
        draw, rows = plain(self, ids, sampling, begun), found.setdefault(sampling.seed, [])

        def drawn(ids: Any, row: torch.Tensor) -> int:
            rows.append(row[0].clone())
            return draw(ids, row)

        return drawn

    monkeypatch.setattr(RequestFactory, "draw", noting)
    return found


def guessing(engine: Engine, source: str, count: int = 0) -> None:
    """So many tokens always, or 0: as the gates say."""
    engine.change({"drafts": source})
    drafter = engine.parts.drafter
    drafter.gate.fixed = drafter.head_gate.fixed = drafter.model_gate.fixed = count or None


def asked(draw: random.Random, seed: int) -> tuple[Ids, Sampling]:
    """A prompt that repeats itself now and then, and how it is answered."""
    some = [draw.randrange(256) for _ in range(draw.randrange(2, 20))]
    how: dict[str, Any] = draw.choice(
        [{}, {}, {"logprobs": 2}, {"stop": (draw.choice("etaoin "),)}, {"top_p": 0.9}, *FORMS]
    )
    how |= draw.choice([{}, {}, {"repetition_penalty": 1.05}, {"frequency_penalty": 0.1}])
    sampling = Sampling(max_new_tokens=draw.randrange(4, 60), temperature=draw.choice([0.0, 0.8]), seed=seed, **how)
    return Ids((some * 9)[: draw.randrange(2, 150)]), sampling


def answered(engine: Engine, requests: Asked, at_a_time: int, reuse: bool = False) -> dict[int, Said]:
    """Several together, or one after the other."""
    found = {seed: Said() for seed in requests}
    if at_a_time == 1:
        for seed, (prompt, sampling) in requests.items():
            for piece in engine.generate(prompt, sampling, reuse=reuse):
                _take(found[seed], piece)
        return found
    batch = [BatchRequest(seed, *one, reuse=reuse) for seed, one in requests.items()]
    for one in engine.batching.run(iter(batch), at_a_time, threading.Event()):
        assert not one.error
        if one.piece is not None:
            assert isinstance(one.key, int)
            _take(found[one.key], one.piece)
    return found


def _take(said: Said, piece: Any) -> None:
    said.text += piece.text
    if piece.token is not None:
        said.tokens.append(piece.token)
        said.logprobs.append(piece.logprob)
    if piece.stats is not None:
        said.drafted += piece.stats.more["drafted"]


def compare(engine: Engine, logits: Logits, draw: random.Random, first: int) -> tuple[int, dict[str, float]]:
    """The same few requests without guesses, and with each source of them -> answers, and guesses by source."""
    requests = {seed: asked(draw, seed) for seed in range(first, first + TOGETHER)}
    guessing(engine, "off")
    wanted, rows = answered(engine, requests, 1), dict(logits)
    guessed = dict.fromkeys(SOURCES, 0.0)
    for source in SOURCES:
        at_a_time = draw.choice([1, 1, TOGETHER])
        logits.clear()
        guessing(engine, source, draw.choice([0, 1, 2, 2, 5, 8]))
        found = answered(engine, requests, at_a_time, reuse=draw.random() < 0.3)
        for seed, said in found.items():
            one = wanted[seed]
            assert (said.tokens, said.text, said.logprobs) == (one.tokens, one.text, one.logprobs), (source, at_a_time)
            bits = logits[seed][: len(rows[seed])]  # a pass draws on after a text that ends the answer
            assert torch.equal(torch.stack(bits), torch.stack(rows[seed])), (source, at_a_time)
            guessed[source] += said.drafted
    logits.clear()
    return TOGETHER * len(SOURCES), guessed


@pytest.mark.parametrize("count", layered([16, 334], quick=lambda count: count == 16, minutes=3))
def test_answers_are_those_without(engine: Engine, logits: Logits, count: int) -> None:
    draw, answers, guessed = random.Random(count), 0, dict.fromkeys(SOURCES, 0.0)
    while answers < count:
        more, found = compare(engine, logits, draw, first=answers)
        answers += more
        guessed = {source: number + found[source] for source, number in guessed.items()}
    assert min(guessed.values()) > 0 and sum(guessed.values()) > 2 * count


@pytest.mark.parametrize("seed", layered(range(12), quick=lambda seed: seed < 1))
def test_random_histories(engine: Engine, logits: Logits, seed: int) -> None:
    """Settings are changed between any two tokens, and answers are cancelled or closed there: what is said then, and
    what is said after it from the same KV, is what is said without."""
    draw = random.Random(seed)
    guessing(engine, "off")
    for number in range(6):
        prompt, sampling = asked(draw, number)
        engine.parts.memory.prefix_cache.clear()
        guessing(engine, "off")
        (wanted,) = answered(engine, {number: (prompt, sampling)}, 1).values()
        rows, end = logits.pop(number), draw.choice([None, None, draw.randrange(1, 30)])
        cancel, said = threading.Event(), Said()
        answer = engine.generate(prompt, sampling, cancel, reuse=True)
        for piece in answer:
            _take(said, piece)
            if piece.token is not None and draw.random() < 0.4:
                guessing(engine, draw.choice(["off", *SOURCES]), draw.choice([0, 1, 3, 8]))
                name = draw.choice([*CHANGES])
                engine.change({name: draw.choice(CHANGES[name])})
            if end is not None and len(said.tokens) == end:
                cancel.set()
                if draw.random() < 0.5:
                    answer.close()  # type: ignore[attr-defined]
                    break
        assert said.tokens == wanted.tokens[: len(said.tokens)] and (end is not None or said.text == wanted.text)
        assert all(torch.equal(one, other) for one, other in zip(logits.pop(number), rows, strict=False))
        engine.expert_cache.check_integrity()
        assert engine.frame().memory.used <= engine.frame().memory.budget
        longer = Ids([*prompt.ids, *said.tokens, draw.randrange(256)])
        more = {number: (longer, Sampling(max_new_tokens=9, seed=number))}
        found = [answered(engine, more, 1, reuse=reuse)[number].tokens for reuse in (True, False)]
        assert found[0] == found[1]
        half, both = len(logits[number]) // 2, torch.stack(logits.pop(number))
        assert torch.equal(both[:half], both[half:])
    engine.change({"budget": "50%", "predictor": "none", "scope": "layer"})
