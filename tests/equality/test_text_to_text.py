"""A Switch Transformer answers with transformers' own logits, alone and beside others."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.errors import SettingError
from core.hf.adapters.switch import UNLIMITED
from core.hf.packed_texts import TextPacking
from core.hf.text_to_text import empty_cache
from core.importing import import_model
from core.measure.calibrate.gather import calibrate
from core.policy.batching import NoScheduler, RandomScheduler, Scheduler, TokenScheduler
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids
from tests.switch import CAPACITY, generated, plain_switch, save_switch

TOKENS = 8
GREEDY = Sampling(max_new_tokens=TOKENS, temperature=0.0)
PROMPTS = [
    torch.randint(3, 250, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    for size in (30, 5, 17, 60, 9, 1, 33)
]
CLOSE = 1e-5  # of the largest logit: products of other numbers of rows
PREDICTORS = ("none", "gate", "previous_token", "recent", "transitions", "all_next", "random")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_switch(tmp_path_factory.mktemp("switch"))


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[tuple[list[int], torch.Tensor]]:
    model = plain_switch(path)
    return [generated(model, prompt, TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    engine = _load(path)
    yield engine
    engine.unload()


def _load(path: Path, dtype: str = "float32", **spec: Any) -> Engine:
    return Engine.load(LoadSpec.checked(str(path), Settings({"budget": "50%"}), dtype=dtype, **spec))


class Written:
    """Draws greedily, and keeps the logits."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logits: list[torch.Tensor] = []

    def __call__(self, ids: list[int], logits: torch.Tensor) -> int:
        self.logits.append(logits[0].clone())
        self.tokens.append(int(logits[0].argmax()))
        return self.tokens[-1]


def _write(engine: Engine, prompt: list[int]) -> Written:
    written = Written()
    for _ in engine.generate(Ids(prompt), GREEDY, draw=written):
        pass
    return written


@pytest.mark.skipif(UNLIMITED, reason="the installed transformers' experts take any number of tokens")
def test_the_experts_of_the_prompt_are_full(path: Path) -> None:
    """Or the limit would not be tried."""
    model, routed = plain_switch(path), []
    router = model.encoder.block[1].layer[-1].mlp.router
    router.register_forward_hook(lambda module, args, output: routed.append(output[0]))
    generated(model, PROMPTS[0], 1)
    chosen = routed[0].sum(-2)
    assert chosen.max() == CAPACITY, "an expert takes as many as it may"
    assert routed[0].sum() < len(PROMPTS[0]), "tokens go on without any"


def test_logits_are_transformers_own_bits(engine: Engine, wanted: list[tuple[list[int], torch.Tensor]]) -> None:
    chance = random.Random(0)
    for prompt, (tokens, logits) in zip(PROMPTS, wanted, strict=True):
        engine.change(
            {
                "predictor": chance.choice(PREDICTORS),
                "budget": chance.choice(("50%", "75%", "all", "25%")),
                "eviction": chance.choice(("lru", "lfu", "plec", "random")),
                "scope": chance.choice(("layer", "global")),
            }
        )
        written = _write(engine, prompt)
        engine.expert_cache.check_integrity()
        assert engine.memory().used <= engine.memory().budget
        assert written.tokens == tokens
        assert torch.equal(torch.stack(written.logits), logits)


@pytest.mark.long(0.1)
def test_bf16_out_of_a_pack(tmp_path: Path) -> None:
    path = save_switch(tmp_path / "model", torch.bfloat16)
    tokens, logits = generated(plain_switch(path, torch.bfloat16), PROMPTS[0], TOKENS)
    import_model(str(path), tmp_path / "pack")
    engine = _load(tmp_path / "pack", "auto", host="none")
    written = _write(engine, PROMPTS[0])
    engine.unload()
    assert written.tokens == tokens
    assert torch.equal(torch.stack(written.logits), logits)


def test_it_answers_the_last_message_alone(engine: Engine) -> None:
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "two"},
    ]
    assert engine.prompt.tokens(chat) == engine.prompt.tokens("two")
    assert engine.prompt.tokens("two")[-1] == 0, "the decoder begins"
    assert engine.text_to_text and engine.takes_chats and not engine.takes_tools


def test_a_layer_is_seen_in_passes_of_its_own(engine: Engine) -> None:
    engine.change({"predictor": "none", "budget": "50%"})
    steps = {p.step.index: p.step for p in engine.generate(Ids(PROMPTS[0]), GREEDY) if p.step is not None}
    first, *rest = steps.values()
    assert (first.tokens, set(first.layer.tolist())) == (len(PROMPTS[0]), {0, 1}), "the encoder's"
    assert all((one.tokens, set(one.layer.tolist())) == (1, {2, 3}) for one in rest), "the decoder's"


def test_cancelled_while_it_reads_and_asked_again(engine: Engine, wanted: list[tuple[list[int], torch.Tensor]]) -> None:
    cancel = threading.Event()
    *_, last = engine.generate(Ids(PROMPTS[3]), GREEDY, cancel, reading=lambda piece: cancel.set())
    assert last.stats is not None and last.stats.reason == "cancelled"
    assert torch.equal(torch.stack(_write(engine, PROMPTS[3]).logits), wanted[3][1])


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[str]:
    """The answer to each of the prompts."""
    return ["".join(piece.text for piece in engine.generate(Ids(prompt), GREEDY)) for prompt in PROMPTS]


@pytest.mark.long(0.1)
@pytest.mark.parametrize("scheduler", [None, NoScheduler(), RandomScheduler(), TokenScheduler()])
def test_many_at_once_are_what_each_is_alone(path: Path, alone: list[str], scheduler: Scheduler | None) -> None:
    engine = _load(path, sequences=6)
    requests = [BatchRequest(at, Ids(prompt), GREEDY) for at, prompt in enumerate(PROMPTS)]
    texts, passes = dict.fromkeys(range(len(PROMPTS)), ""), set()
    for one in engine.generate_many(requests, 3, scheduler=scheduler):
        assert one.piece is not None, one.error
        texts[int(str(one.key))] += one.piece.text
        if one.piece.step is not None:
            passes.add(len(one.piece.step.rows))
    engine.unload()
    assert max(passes) >= 3, "they were computed together"
    assert list(texts.values()) == alone and any(alone)


def test_several_sequences_in_a_pass_are_within_rounding(
    engine: Engine, wanted: list[tuple[list[int], torch.Tensor]]
) -> None:
    """Prompts that begin, answers that go on by one token and by several, in any order."""
    packing, cpu = TextPacking(engine.model), torch.device("cpu")
    caches = [empty_cache(engine.model.config) for _ in PROMPTS]
    chance, at = random.Random(1), [0] * len(PROMPTS)
    engine.change({"budget": "all", "predictor": "none"})
    answers = [[0, *tokens] for tokens, _ in wanted]
    with torch.inference_mode():
        for some in ([0, 3, 5], [1, 2, 4, 6]):
            packing.compute([PROMPTS[one] for one in some], [0] * len(some), [caches[one] for one in some], cpu, 1)
        for _ in range(6):
            some = [one for one in chance.sample(range(len(PROMPTS)), 4) if at[one] < TOKENS]
            tokens = [answers[one][at[one] : min(TOKENS, at[one] + chance.choice((1, 1, 3)))] for one in some]
            logits = packing.compute(tokens, at, [caches[one] for one in some], cpu, 1)
            for one, given, row in zip(some, tokens, logits, strict=True):
                at[one] += len(given)
                if len(given) == 1:  # of several the experts' limit counts, as it does in transformers
                    off = (row - wanted[one][1][at[one] - 1]).abs().max() / wanted[one][1].abs().max()
                    assert off < CLOSE


def test_substitution_acts_in_the_answer_and_is_scored(
    engine: Engine, wanted: list[tuple[list[int], torch.Tensor]]
) -> None:
    engine.change({"budget": "25%", "predictor": "none", "miss": "substitute", "substitute": "router_ranked"})
    try:
        steps = {p.step.index: p.step for p in engine.generate(Ids(PROMPTS[0]), GREEDY) if p.step is not None}
        assert all(one.changed == 0 for one in steps.values() if one.tokens > 1)
        assert sum(one.changed for one in steps.values()) > 0
        assert engine.unscored and engine.audit() is not None
        engine.change({"miss": "wait"})
        assert torch.equal(torch.stack(_write(engine, PROMPTS[0]).logits), wanted[0][1])
    finally:
        engine.change({"miss": "wait", "budget": "50%"})


@pytest.mark.long(0.1)
def test_turned_exact_in_the_middle_it_reads_anew(engine: Engine, wanted: list[tuple[list[int], torch.Tensor]]) -> None:
    """What was computed lossily is computed again: the prompt by the encoder, the answer by the decoder."""
    engine.change({"budget": "25%", "predictor": "none", "miss": "substitute", "substitute": "router_ranked"})
    try:
        written, tokens = Written(), wanted[0][0]

        def draw(ids: list[int], logits: torch.Tensor) -> int:
            if len(written.tokens) == TOKENS // 2:
                engine.change({"miss": "wait"})
            written(ids, logits)
            return tokens[len(written.tokens) - 1]

        for _ in engine.generate(Ids(PROMPTS[0]), GREEDY, draw=draw):
            pass
        after = TOKENS // 2 + 2
        got, want = torch.stack(written.logits[after:]), wanted[0][1][after:]
        assert len(got) and torch.equal(got, want)
    finally:
        engine.change({"miss": "wait", "budget": "50%"})


def test_what_it_cannot_do_is_said(engine: Engine) -> None:
    with pytest.raises(SettingError, match="text-to-text model cannot be calibrated"):
        calibrate(engine, ["A text."])
    with pytest.raises(SettingError, match="cannot execute predicted experts"):
        engine.change({"predictor": "gate", "execute": "always"})
    for asked in ({"predictor": "estimator"}, {"miss": "drop", "gate": "percentile"}, {"layer_slots": "moepic"}):
        with pytest.raises(SettingError, match="needs a profile, and a text-to-text model cannot be calibrated"):
            engine.change(asked)
