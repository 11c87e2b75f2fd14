"""bench substitution runs, for every substitute, and asks what it says it asks."""

from __future__ import annotations

import json

from bench import substitution
from core.choices import Action
from core.policy.substitute import batch
from core.settings.registry import variants


def test_every_substitute_is_timed() -> None:
    said: list[str] = []
    result = substitution.run(small=True, say=said.append)
    assert json.loads(json.dumps(result)) == result
    names = [v.name for v in variants("substitute")]
    found = result["us"]["cpu"]  # type: ignore[index]
    assert list(found) == names and [text.split()[0] for text in said[: len(names)]] == names
    assert all(us > 0 for one in found.values() for us in one.values())
    assert all(name in substitution.table(result) for name in names)


def test_half_is_missing_and_all_of_it_is_replaced() -> None:
    one, many = (substitution.question(tokens, substitution.CPU) for tokens in (1, substitution.PROMPT))
    assert int(one.missing[one.ids].sum()) == 4 and 0.4 < float(many.missing[many.ids].float().mean()) < 0.6
    found = batch.select(many, substitution.OPEN, many.logits[:, None].expand(-1, 8, -1))  # type: ignore[index]
    assert int((found.action == int(Action.WAIT)).sum()) == 0
    assert not substitution.there(one).missing.any()
