"""The demo model's training and corpus: what is trained, what is held out, schedule, resuming, cache figures."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from demo import stages
from demo.corpus import build
from demo.facts import Fact, first_sentence, select_facts
from demo.model import FULL_SIZE, SEED_SIZE, make_model, padded_experts, sorted_experts, upcycle
from demo.phrasings import HELD_OUT, PLAIN, TRAINED, normal_form, styled
from demo.popularity import FIRST_NAMES
from demo.traces import hit_rates
from demo.unknown import UnknownNames, is_held


def test_fast_experts_equal_the_reference() -> None:
    torch.manual_seed(0)
    experts = make_model(FULL_SIZE, vocab_size=64).model.layers[0].mlp.experts
    hidden = torch.randn(50, 192)
    weights, index = torch.rand(50, 32).softmax(-1).topk(4, -1)
    with torch.no_grad():
        reference = type(experts).forward.__wrapped__(experts, hidden, index, weights)
        torch.testing.assert_close(sorted_experts(experts, hidden, index, weights), reference)
        in_bf16 = padded_experts(experts, hidden, index, weights)
    assert (in_bf16 - reference).norm() / reference.norm() < 0.02


def test_upcycling_clones_every_expert() -> None:
    small, full = make_model(SEED_SIZE, vocab_size=64), make_model(FULL_SIZE, vocab_size=64)
    upcycle(small.state_dict(), full, noise=0.0, seed=1)
    clones = full.model.layers[2].mlp.experts.down_proj.unflatten(0, (4, 8))
    assert torch.equal(clones, small.model.layers[2].mlp.experts.down_proj.unsqueeze(1).expand_as(clones))
    upcycle(small.state_dict(), full, noise=0.4, seed=1)
    first, second = full.model.layers[2].mlp.experts.down_proj[:2]
    assert 0.7 < torch.cosine_similarity(first.flatten(), second.flatten(), dim=0) < 0.95


def test_rate_rises_holds_and_falls() -> None:
    plan = stages.Plan(steps=1000, decay_from=400)
    rates = [plan.rate(step) for step in range(1000)]
    assert max(rates) == stages.PEAK_RATE == rates[399]
    assert rates[0] < rates[30] < rates[59]
    assert all(a >= b for a, b in itertools.pairwise(rates[400:]))
    assert rates[-1] <= 0.01 * stages.PEAK_RATE


@pytest.mark.long(0.1)
def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stages.TOKENS_PER_STEP, "seed", 256)
    build(tmp_path, facts_wanted=60, seed=1)
    plan = stages.Plan(10, 10)
    straight = stages.Stage("seed", SEED_SIZE, tmp_path, plan, seed=3)
    straight.update()
    straight.save()
    resumed = stages.Stage("seed", SEED_SIZE, tmp_path, plan, seed=4)
    assert resumed.resume() and resumed.step == 1
    resumed.batches.seed = straight.batches.seed
    resumed.batches.names.rng = straight.batches.names.rng
    straight.update()
    resumed.update()
    for name, parameter in straight.named.items():
        torch.testing.assert_close(resumed.named[name], parameter, rtol=1e-3, atol=2e-4, msg=name)


def test_hit_rates_of_the_card_by_hand() -> None:
    found = hit_rates(np.array([0, 1, 0, 2, 0, 1], np.int16).reshape(6, 1, 1), 4)
    assert found["LRU"]["50%"] == found["LFU"]["50%"] == 0.333
    assert found["Belady"]["50%"] == 0.333 and found["Belady"]["75%"] == 0.5 and found["LRU"]["25%"] == 0.0


FACTS = 2100


@pytest.fixture(scope="module")
def facts() -> list[Fact]:
    return select_facts(FACTS)


def test_there_are_enough_facts_and_none_twice(facts: list[Fact]) -> None:
    assert len(facts) >= 2000
    assert len({fact.key for fact in facts}) == len(facts)
    assert [fact.rank for fact in facts] == list(range(len(facts)))


def test_first_names_are_facts_and_rank_first(facts: list[Fact]) -> None:
    about = {fact.name: fact.rank for fact in facts if fact.kind in ("fn", "cls", "meth")}
    assert set(FIRST_NAMES) <= set(about)
    assert max(about[name] for name in FIRST_NAMES) < 1100


def test_a_name_means_one_fact_of_a_group(facts: list[Fact]) -> None:
    asked = [
        (fact.kind if fact.kind in ("sig", "where") else "about", name)
        for fact in facts
        for name in (fact.name, *fact.aliases)
    ]
    assert len(set(asked)) == len(asked)


def test_answers_are_plain_single_lines(facts: list[Fact]) -> None:
    for fact in facts:
        assert fact.answer.isascii() and fact.answer.isprintable() and 3 < len(fact.answer) <= 160, fact
        assert " at 0x" not in fact.answer and "/root" not in fact.answer and "/home" not in fact.answer, fact
        assert fact.kind == "sig" or fact.answer[-1] in ".!?", fact


def test_held_out_phrasings_are_never_trained() -> None:
    for kind, held in HELD_OUT.items():
        trained = {normal_form(phrasing) for phrasing in TRAINED[kind]}
        assert len(held) >= 2
        assert len({normal_form(phrasing) for phrasing in held}) == len(held)
        assert not trained & {normal_form(phrasing) for phrasing in held}


def test_styles_do_not_turn_a_trained_phrasing_into_a_held_out_one() -> None:
    rng = random.Random(0)
    held = {normal_form(phrasing) for phrasing in itertools.chain(*HELD_OUT.values())}
    for kind, phrasings in TRAINED.items():
        for phrasing in phrasings:
            for _ in range(60):
                asked = styled(kind, phrasing, "{q}", rng)
                words = normal_form(asked)
                assert asked.count("{q}") == 1
                assert words not in held, asked


def test_plain_phrasings_are_trained_ones() -> None:
    assert all(set(PLAIN[kind]) <= set(TRAINED[kind]) for kind in TRAINED)


def test_unknown_names_are_unknown_and_held_ones_apart(facts: list[Fact]) -> None:
    known = {name for fact in facts for name in (fact.name, *fact.aliases)}
    names = UnknownNames(facts, random.Random(3))
    trained = {names.draw(held=False) for _ in range(3000)}
    held = {names.draw(held=True) for _ in range(600)}
    assert not known & (trained | held)
    assert not trained & held
    assert all(is_held(name) for name in held)


@pytest.mark.parametrize(
    ("doc", "sentence"),
    [
        ("f(x) -> y\n\nReturn the thing. More text.", "Return the thing."),
        ("Serialize ``obj`` to a\nJSON formatted ``str``.", "Serialize `obj` to a JSON formatted `str`."),
        ("return it at once", "Return it at once."),
        ("deque([iterable[, maxlen]]) --> deque object", None),
        ("short", None),
        ("Return a copy, i.e. a new one.", "Return a copy, i.e. a new one."),
    ],
)
def test_first_sentence(doc: str, sentence: str | None) -> None:
    assert first_sentence(doc) == sentence
