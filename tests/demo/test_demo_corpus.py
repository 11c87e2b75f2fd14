"""The corpus of the demo model: what is trained, what is held out, and that they stay apart."""

from __future__ import annotations

import itertools
import random

import pytest

from demo.facts import Fact, first_sentence, select_facts
from demo.phrasings import HELD_OUT, PLAIN, TRAINED, normal_form, styled
from demo.popularity import FIRST_NAMES
from demo.unknown import UnknownNames, is_held

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
