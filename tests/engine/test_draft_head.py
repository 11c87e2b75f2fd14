"""Tokens that the model's own head guesses, or a dense model: answers are the ones without, token by token and bit for
bit; what the head's experts were asked for is counted apart; and its keys and values follow what was accepted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.capacity.plan import plan
from core.engine import Engine
from core.engine.draft_lookup import Guess, Lookup
from core.engine.drafter import HEAD_MATCHED
from core.importing import import_model
from core.runtime.draft_head import DraftHead
from core.runtime.head_passes import ModulePasses, ProgramPasses
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.engine.drafted import TOKENS, Answer, bits
from tests.loaded import loaded
from tests.mtp_checkpoint import dense, predictable, with_head
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
ARCHS = "glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text", "mimo_v2_flash"
NOISE = {"mimo_v2_flash": 1.0}  # what makes guesses wrong now and then
HOW: dict[str, Any] = dict(arithmetic="fast", context=256)
PROMPT = Ids([5, 9, 200, 31, 31, 7, 8, 9])


def engine_of(model: Path, **settings: object) -> Any:
    return loaded(model, {"budget": "50%", "drafts": "mtp", **settings}, **HOW)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = predictable("glm4_moe", tmp_path_factory.mktemp("model"), 0.5)
    small = dense(tmp_path_factory.mktemp("dense"))
    with loaded(model, {"budget": "50%", "drafts": "auto"}, sequences=3, draft=small, **HOW) as engine:
        yield engine


@pytest.fixture
def engine(drafting: Engine) -> Iterator[Engine]:
    yield drafting
    guessing(drafting, None)


def guessing(engine: Engine, count: int | None, source: str = "mtp") -> None:
    """As many tokens always, or as the gate says, or None: none at all."""
    engine.change({"drafts": "off" if count is None else source})
    engine.parts.drafter.head_gate.fixed = engine.parts.drafter.model_gate.fixed = count or None


SOURCES = pytest.mark.parametrize("source", ["mtp", "model"])


@pytest.mark.parametrize("arch", layered(ARCHS, quick=lambda arch: arch in ("glm4_moe", "qwen3_next")))
def test_no_bit_depends_on_the_head(arch: str, tmp_path: Path) -> None:
    model = predictable(arch, tmp_path / "model", NOISE.get(arch, 0.5))
    pack = import_model(str(model), tmp_path / "pack")
    with loaded(model, {"budget": "50%"}, **HOW) as engine:  # which is loaded without the head
        assert engine.loaded.head is None
        wanted, logits = bits(engine, PROMPT)
    for path in (model, pack):
        with engine_of(path) as engine:
            assert engine.loaded.head is not None
            assert isinstance(engine.parts.drafter.head.passes, ProgramPasses)
            for count in (None, 1, 3, 8):
                guessing(engine, count)
                tokens, found = bits(engine, PROMPT)
                assert tokens == wanted
                assert torch.equal(found, logits)
            more = Answer(engine, Sampling(max_new_tokens=TOKENS), PROMPT).stats.more
            assert more["drafted"] > TOKENS
            assert TOKENS // 4 < more["accepted"] < more["drafted"], "the head is often right, and not always"


def test_with_rounded_dense_layers(tmp_path: Path) -> None:
    """Of which the output layer is the head's, too."""
    how, found = HOW | {"dense": "int8", "dtype": "bfloat16"}, list[list[int]]()
    model = predictable("glm4_moe", tmp_path, 0.5)
    for drafts in ("off", "mtp"):
        with loaded(model, {"budget": "50%", "drafts": drafts}, **how) as engine:
            engine.parts.drafter.head_gate.fixed = 3
            answer = Answer(engine, Sampling(max_new_tokens=TOKENS), PROMPT)
            found.append(answer.tokens)
            head = engine.loaded.head
            assert head is None or head.model.lm_head is engine.model.lm_head
    assert found[0] == found[1]
    assert answer.stats.more["accepted"] > 0


@SOURCES
@pytest.mark.parametrize(
    ("count", "how"),
    [
        (8, {"temperature": 0.8, "seed": 11}),
        (3, {"temperature": 0.8, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.05, "frequency_penalty": 0.1}),
        (2, {"temperature": 0.0, "logprobs": 2}),
    ],
)
def test_draws_are_those_without(engine: Engine, count: int, how: dict[str, Any], source: str) -> None:
    sampling = Sampling(max_new_tokens=TOKENS, **how)
    guessing(engine, None)
    wanted = Answer(engine, sampling, PROMPT)
    guessing(engine, count, source)
    found = Answer(engine, sampling, PROMPT)
    assert (found.tokens, found.text, found.logprobs) == (wanted.tokens, wanted.text, wanted.logprobs)
    assert found.stats.more["accepted"] > 0


@SOURCES
def test_it_ends_where_it_would(engine: Engine, source: str) -> None:
    """At a text within the tokens of a pass, a limit, or when it is cancelled; and the chat goes on from there."""
    guessing(engine, None)
    whole = Answer(engine, Sampling(max_new_tokens=TOKENS), PROMPT)
    for cut in range(3, len(whole.text) - 3, len(whole.text) // 5):
        guessing(engine, 8, source)
        stop = Sampling(max_new_tokens=TOKENS, stop=(whole.text[cut : cut + 3],))
        found = Answer(engine, stop, PROMPT, reuse=True)
        assert found.text == whole.text[: whole.text.index(whole.text[cut : cut + 3])]
        longer = Ids([*PROMPT.ids, *found.tokens, 5, 6])
        after = Answer(engine, Sampling(max_new_tokens=9), longer, reuse=True)
        assert after.stats.cached_tokens > 0
        guessing(engine, None)
        assert after.tokens == Answer(engine, Sampling(max_new_tokens=9), longer).tokens
        engine.parts.memory.prefix_cache.clear()
    for most in (1, 2, 3):
        guessing(engine, 8, source)
        assert Answer(engine, Sampling(max_new_tokens=most), PROMPT).tokens == whole.tokens[:most]
        cancel, said = threading.Event(), list[int]()
        for piece in engine.generate(PROMPT, Sampling(max_new_tokens=TOKENS), cancel, reuse=True):
            if piece.token is not None:
                said.append(piece.token)
                if len(said) == 4 * most:
                    cancel.set()
        assert said == whole.tokens[: 4 * most]


@torch.inference_mode()
def test_native_steps_are_the_modules(engine: Engine) -> None:
    """Over a text whose beginning it does not see, in pieces, and after what was cut away."""
    head, own = engine.parts.drafter.head, engine.loaded.head
    assert isinstance(head, DraftHead) and own is not None
    draw, at, kept = torch.Generator().manual_seed(1), 5, 0
    modules, width = ModulePasses(own, 128), own.config.hidden_size
    head.forget()
    for rows, cut in ((9, 0), (1, 1), (1, 0), (40, 33), (2, 0), (1, 0)):
        hidden = torch.randn(rows, width, generator=draw)
        tokens = torch.randint(256, (rows,), generator=draw).tolist()
        steps, wanted = (head._computed(one, own.normed(hidden), tokens, at) for one in (head.passes, modules))
        for found, other in zip(steps, wanted, strict=True):
            torch.testing.assert_close(found, other, atol=2e-4, rtol=2e-4)
        at, kept = at + rows - cut, kept + rows - cut
        for one in (head.passes, modules):
            one.cut(kept)
    head.forget()


def test_its_experts_are_counted_apart(engine: Engine) -> None:
    """Records, heat map and hit rates are those of the model's own layers."""
    guessing(engine, 4)
    found = Answer(engine, Sampling(max_new_tokens=TOKENS), PROMPT)
    layers, shape = engine.shape.layers, engine.shape
    assert (shape.heads, shape.cached_layers, shape.total) == (1, layers + 1, (layers + 1) * shape.experts)
    assert all(step.layer.max() < layers for step in found.steps)
    assert all(copy.layer < layers for step in found.steps for copy in step.transfers)
    assert engine.frame().place.shape == (layers, shape.experts)
    for step in found.decode:
        assert step.draft_requests >= step.draft_hits
        assert step.draft_requests >= shape.top_k * min(1, step.drafted)
        assert 0 < step.draft_ms < step.total_ms or not step.drafted
    more = found.stats.more
    missed = more["draft_requests"] - more["draft_hits"]
    assert missed > 0 and more["draft_bytes"] == missed * engine.sizes.blob
    assert found.steps[0].phase == "prefill" and found.steps[0].draft_requests, "the prompt is read by the head, too"
    guessing(engine, None)
    plain = Answer(engine, Sampling(max_new_tokens=TOKENS), PROMPT)
    assert not any(plain.stats.more[name] for name in more if name.startswith("draft"))


def test_the_better_source_is_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are guesses of both kinds, and the gates say that one is worth more, it is asked."""
    drafter, prompt = engine.parts.drafter, Ids([7, 8, 9, 60, 61, 62] * 6)
    monkeypatch.setattr(Lookup, "guess", lambda self, ids, most: Guess([7, 8][:most], 4) if most > 0 else None)
    for ahead, other in ((drafter.gate, drafter.head_gate), (drafter.head_gate, drafter.gate)):
        engine.change({"drafts": "auto"})
        ahead.fixed, other.fixed, drafter.model_gate.fixed = 2, None, 0
        more = Answer(engine, Sampling(max_new_tokens=9), prompt).stats.more
        assert more["drafted"]
        guesses_of_head = more["draft_requests"] > 2 * engine.shape.experts + engine.shape.top_k
        assert guesses_of_head == (ahead is drafter.head_gate)
    drafter.gate.fixed = drafter.head_gate.fixed = None


def test_a_head_that_is_not_worth_it_rests(tmp_path: Path) -> None:
    with engine_of(with_head("glm4_moe", tmp_path)) as engine:  # of random weights
        gate = engine.parts.drafter.head_gate
        for _ in range(8):
            gate.judged(HEAD_MATCHED, 0, 1)
        for passes in range(40):
            gate.took(0, 0, 10.0 + passes % 2)
        assert gate.choose(HEAD_MATCHED, 8).guesses == 0
        Answer(engine, Sampling(max_new_tokens=4), PROMPT)
        for _ in range(600):  # another text may be guessed better
            gate.took(0, 0, 10.0)
        assert gate.choose(HEAD_MATCHED, 8).guesses > 0


def test_without_a_head_it_says_so(tmp_path: Path) -> None:
    """Also one that was left out when the model was loaded."""
    random_one = save_tokenizer(make_checkpoint("glm4_moe", tmp_path / "none"))
    for model in (random_one, with_head("glm4_moe", tmp_path / "head")):
        with loaded(model, {"budget": "50%"}, **HOW) as engine:
            assert engine.loaded.head is None
            engine.change({"drafts": "mtp"})
            Answer(engine, Sampling(max_new_tokens=2), PROMPT)
            said = [text for _, text in engine.frame().marks]
            assert any("drafts mtp is not used" in text and "without a head" in text for text in said)


@pytest.mark.parametrize(
    ("how", "heads"),
    [
        ({}, 1),
        ({"arch": "qwen3_next"}, 1),
        ({"arithmetic": "reference"}, 0),
        ({"blocks": 2}, 0),
        ({"drafts": "lookup"}, 0),
        ({"drafts": "auto"}, 1),
    ],
)
def test_what_a_load_is_planned_with(how: dict[str, Any], heads: int, tmp_path: Path) -> None:
    how = {"arch": "glm4_moe", "drafts": "mtp", **how}
    model, drafts = with_head(how.pop("arch"), tmp_path), how.pop("drafts")
    without, found = (
        plan(LoadSpec.checked(str(model), Settings({"budget": "50%", "drafts": one}), **HOW | how))
        for one in ("off", drafts)
    )
    assert found.outline.heads == found.sizes.shape.heads == heads
    assert ("head that predicts further tokens" in found.note) == bool(heads)
    assert found.sizes.dense - without.sizes.dense == found.outline.head_bytes
    assert found.tier.rows - without.tier.rows == heads * found.sizes.shape.experts
    assert (found.sizes.kv > without.sizes.kv) == bool(heads)


# ---------------------------------------------------------------------- what follows what
