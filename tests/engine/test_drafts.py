"""Guessed tokens are verified several in a pass, whatever guesses them (the text before, the model's own head, a dense
model): answers are the ones without, token by token and bit for bit, and what is recorded counts only what was kept."""

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.importing import import_model
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.engine.drafted import HOW, IDS, PROMPT, TOKENS, Answer, bits, first_tokens, guessing
from tests.loaded import loaded
from tests.mtp_checkpoint import counting, predictable, with_head
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
GREEDY = Sampling(max_new_tokens=TOKENS)
SOURCES = pytest.mark.parametrize(
    ("drafting", "source"), [("demo", "lookup"), ("glm4_moe", "mtp"), ("glm4_moe", "model")], indirect=["drafting"]
)
LOOKUP = pytest.mark.parametrize("drafting", ["demo"], indirect=True)
ARCHS = [
    *(("lookup", arch) for arch in ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")),
    *(("mtp", arch) for arch in ("glm4_moe", "qwen3_next", "deepseek_v3", "qwen3_5_moe_text", "mimo_v2_flash")),
    *(("model", arch) for arch in ("qwen3_moe", "mixtral", "gpt_oss")),
]


def checkpoint(source: str, arch: str, path: Path) -> Path:
    if source == "mtp":
        return predictable(arch, path, 1.0 if arch == "mimo_v2_flash" else 0.5)  # guesses are wrong now and then
    made = save_tokenizer(make_checkpoint(arch, path))
    return made if source == "lookup" else counting(made, 0.5)


@pytest.fixture(scope="module")
def drafting(request: Any, tmp_path_factory: pytest.TempPathFactory, small: Path) -> Iterator[Engine]:
    if request.param == "demo":
        model, settings, how = "demo", {"budget": "50%", "link": "own"}, {}
    else:
        model = predictable(request.param, tmp_path_factory.mktemp("model"), 0.5)
        settings, how = {"budget": "50%", "drafts": "auto"}, {"draft": small}
    with loaded(model, settings, sequences=3, **HOW, **how) as engine:
        yield engine


@pytest.fixture
def engine(drafting: Engine) -> Iterator[Engine]:
    guessing(drafting, None)
    yield drafting
    guessing(drafting, None)


def prompt_of(engine: Engine) -> Ids:
    return Ids(engine.prompt.encode(PROMPT, 256)) if engine.model_name == "demo" else IDS


@pytest.mark.parametrize(
    ("source", "arch"),
    layered(
        ARCHS,
        quick=lambda case: case in [*ARCHS[:2], ("mtp", "glm4_moe"), ("mtp", "qwen3_next"), ("model", "qwen3_moe")],
    ),
)
def test_no_bit_depends_on_drafts(source: str, arch: str, small: Path, tmp_path: Path) -> None:
    """Also past a window, whose memory the refused tokens were written to as well."""
    model, prompt = checkpoint(source, arch, tmp_path / "model"), PROMPT if source == "lookup" else IDS
    with loaded(model, {"budget": "50%"}, **HOW) as engine:
        assert engine.loaded.head is None
        wanted, logits = bits(engine, prompt)
    pack = import_model(str(model), tmp_path / "pack")
    for path in {"lookup": [model], "mtp": [model, pack], "model": [pack]}[source]:
        how = {"draft": small} if source == "model" else {}
        with loaded(path, {"budget": "50%", "drafts": source}, **HOW, **how) as engine:
            assert (engine.loaded.head is not None) == (source == "mtp")
            for count in (0, 1, 3, 8):
                guessing(engine, count, source)
                tokens, found = bits(engine, prompt)
                assert tokens == wanted and torch.equal(found, logits)
            more = Answer(engine, GREEDY, prompt).stats.more
            often = source != "lookup" and (source, arch) != ("model", "gpt_oss")  # whose experts add biases
            assert often * TOKENS // 4 < more["accepted"] <= more["drafted"] - often, "often right, and not always"


@pytest.mark.parametrize("source", layered(["mtp", "model"], quick=lambda source: source == "mtp"))
def test_with_rounded_layers(source: str, small: Path, tmp_path: Path) -> None:
    """Of which the output layer is the head's, too; those of a dense model are rounded as the model's are."""
    model, how = checkpoint(source, "glm4_moe", tmp_path), HOW | {"dense": "int8", "dtype": "bfloat16"}
    with loaded(model, {"budget": "50%"}, **how) as engine:
        wanted = Answer(engine, GREEDY, IDS).tokens
    with loaded(model, {"budget": "50%", "drafts": source}, draft=small if source == "model" else "", **how) as engine:
        guessing(engine, 3, source)
        found = Answer(engine, GREEDY, IDS)
        assert found.tokens == wanted and found.stats.more["accepted"] > 0
        if source == "mtp":
            assert engine.loaded.head.model.lm_head is engine.model.lm_head
        else:
            assert any(type(one).__name__ == "QuantizedLinear" for one in engine.loaded.draft.modules())


@pytest.mark.parametrize(("source", "arch"), layered(ARCHS[:-2], quick=lambda case: False, minutes=0.5))
def test_many_answers(source: str, arch: str, small: Path, tmp_path: Path) -> None:
    draw, kept = random.Random(7), {"drafted": 0, "accepted": 0}
    count, longest, drafted, accepted = {"lookup": (334, 12, 1000, -1), "mtp": (100, 70, 500, 400)}.get(
        source, (50, 150, 300, 200)
    )
    how = {"draft": small} if source == "model" else {}
    with loaded(checkpoint(source, arch, tmp_path), {"budget": "50%", "drafts": source}, **HOW, **how) as engine:
        size = engine.model.config.vocab_size if source == "lookup" else 256
        for number in range(count):
            some = [draw.randrange(size) for _ in range(draw.randrange(2, longest))]
            prompt = Ids((some * 9)[: draw.randrange(8, 70)] if source == "lookup" else some)
            sampling = Sampling(max_new_tokens=40, temperature=draw.choice([0.0, 0.8]), seed=number)
            guessing(engine, None)
            wanted = Answer(engine, sampling, prompt)
            guessing(engine, draw.choice([0, 1, 2, 5, 8]), draw.choice([source, "auto"]))
            found = Answer(engine, sampling, prompt, reuse=draw.random() < 0.5)
            assert found.tokens == wanted.tokens
            kept = {name: count + found.stats.more[name] for name, count in kept.items()}
    assert kept["drafted"] > drafted and kept["accepted"] > accepted


@SOURCES
@pytest.mark.parametrize(
    ("count", "how"),
    [
        (8, {"temperature": 0.0}),
        (2, {"temperature": 0.5, "seed": 11}),
        (8, {"temperature": 0.4, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.05, "frequency_penalty": 0.1}),
        (2, {"temperature": 0.0, "logprobs": 2}),
    ],
)
def test_draws_are_those_without(engine: Engine, count: int, how: dict[str, Any], source: str) -> None:
    sampling, prompt = Sampling(max_new_tokens=TOKENS, **how), prompt_of(engine)
    wanted = Answer(engine, sampling, prompt)
    guessing(engine, count, source)
    found = Answer(engine, sampling, prompt)
    assert (found.tokens, found.text, found.logprobs) == (wanted.tokens, wanted.text, wanted.logprobs)
    assert found.stats.more["drafted" if source == "lookup" else "accepted"] > 0 and len(found.tokens) == TOKENS


@SOURCES
def test_it_ends_where_it_would(engine: Engine, source: str) -> None:
    """At a text within the tokens of a pass, a limit, or when it is cancelled or closed; and the chat goes on from
    there."""
    prompt = prompt_of(engine)
    whole = Answer(engine, GREEDY, prompt)
    for cut in range(3, len(whole.text) - 3, len(whole.text) // 5):
        stop = whole.text[cut : cut + 3]
        guessing(engine, 8, source)
        found = Answer(engine, Sampling(max_new_tokens=TOKENS, stop=(stop,)), prompt, reuse=True)
        assert found.text == whole.text[: whole.text.index(stop)] and found.stats.reason == "stop"
        longer = Ids([*prompt.ids, *found.tokens, 5, 6])
        after = Answer(engine, Sampling(max_new_tokens=9), longer, reuse=True)
        assert after.stats.cached_tokens > 0
        guessing(engine, None)
        assert after.tokens == Answer(engine, Sampling(max_new_tokens=9), longer).tokens
        engine.parts.memory.prefix_cache.clear()
    for most in (1, 2, 3, 8, 20):
        guessing(engine, 8, source)
        assert Answer(engine, Sampling(max_new_tokens=most), prompt).tokens == whole.tokens[:most]
        cancel = threading.Event()
        assert (
            first_tokens(engine.generate(prompt, GREEDY, cancel, reuse=True), most, cancel.set) == (whole.tokens[:most])
        )
        closed: Any = engine.generate(prompt, GREEDY, reuse=True)
        while next(closed).token is None:
            pass
        closed.close()
    assert Answer(engine, GREEDY, prompt, reuse=True).tokens == whole.tokens


@SOURCES
def test_changes_in_the_middle(engine: Engine, source: str) -> None:
    draw, prompt = random.Random(3), prompt_of(engine)
    _, logits = bits(engine, prompt)
    for _ in range(4):
        seen = list[torch.Tensor]()

        def drawn(_: Sequence[int], given: torch.Tensor, seen: list[torch.Tensor] = seen) -> int:
            seen.append(given[0].clone())
            return int(given[0].argmax())

        for piece in engine.generate(prompt, GREEDY, draw=drawn):
            if piece.token is not None and draw.random() < 0.5:
                guessing(engine, draw.choice([None, 0, 1, 4, 8]), draw.choice([source, "auto"]))
                budget, scope = draw.choice(["50%", "60%", "100%"]), draw.choice(["layer", "global"])
                engine.change({"budget": budget, "scope": scope, "predictor": draw.choice(["none", "gate"])})
                memory = engine.frame().memory
                assert memory.used <= memory.budget
        assert torch.equal(torch.stack(seen), logits)
        engine.expert_cache.check_integrity()
    engine.change({"budget": "50%", "scope": "layer", "predictor": "none"})


@LOOKUP
def test_without_a_prefetcher_nothing_is_compared_that_drafts_would_wait_for(engine: Engine) -> None:
    """Auto, with prefetching switched off by hand."""
    guessing(engine, 3)
    engine.change({"predictor": "none", "prefetch_auto": True})
    try:
        assert Answer(engine, GREEDY).stats.more["drafted"] > 0
    finally:
        engine.change({"prefetch_auto": False})


@LOOKUP
def test_what_is_counted_is_what_was_kept(engine: Engine) -> None:
    wanted = Answer(engine, GREEDY)
    guessing(engine, 4)
    found = Answer(engine, GREEDY)
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


@LOOKUP
@pytest.mark.parametrize("several", [1, 3])
def test_in_batches(engine: Engine, several: int) -> None:
    """A sequence alone in its passes verifies guesses; together with others it does not."""
    wanted = Answer(engine, GREEDY)
    guessing(engine, 4)
    asked = [BatchRequest(n, PROMPT, GREEDY) for n in range(several)]
    said: dict[object, list[int]] = {n: [] for n in range(several)}
    drafted = dict[int, int]()
    for one in engine.batching.run(iter(asked), several, threading.Event()):
        assert not one.error
        if one.piece is not None and one.piece.token is not None:
            said[one.key].append(one.piece.token)
        if one.piece is not None and one.piece.step is not None:
            drafted[one.piece.step.index] = one.piece.step.drafted
    assert all(tokens == wanted.tokens for tokens in said.values())
    assert bool(sum(drafted.values())) == (several == 1)


@LOOKUP
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
    assert Answer(engine, GREEDY).stats.more["drafted"]


@LOOKUP
def test_what_passes_took_is_kept_until_something_else_is_changed(engine: Engine) -> None:
    for count in (0, 4):  # what a token takes alone is known first
        guessing(engine, count)
        Answer(engine, GREEDY)
    gate = engine.parts.drafter.gate
    gate.fixed = None
    assert gate.took_ms(5) is not None
    for drafts in ("off", "lookup"):
        engine.change({"drafts": drafts})
    assert gate.took_ms(5) is not None
    engine.change({"eviction": "lfu"})
    assert gate.took_ms(5) is None
    engine.change({"eviction": engine.spec.settings["eviction"]})


@pytest.mark.parametrize(
    ("source", "arithmetic", "why"),
    [("lookup", "reference", "fast arith"), ("mtp", "fast", "without a head"), ("model", "fast", "no draft model")],
)
def test_where_it_cannot_it_says_why(source: str, arithmetic: str, why: str, tmp_path: Path) -> None:
    models = [save_tokenizer(make_checkpoint("glm4_moe", tmp_path / "none"))]
    for model in [*models, *([with_head("glm4_moe", tmp_path / "head")] if source == "mtp" else [])]:
        with loaded(model, {"budget": "50%"}, **HOW | {"arithmetic": arithmetic}) as engine:
            guessing(engine, 4, source)
            assert not Answer(engine, Sampling(max_new_tokens=9), IDS).stats.more["drafted"]
            said = [text for _, text in engine.frame().marks]
            assert any(f"drafts {source} is not used" in text and why in text for text in said)
