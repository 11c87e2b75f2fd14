"""bench super_experts: what it holds against the paper, and all of it on the demo model, too small to mean anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import super_experts
from core.policy.substitute.super_experts import SuperExpert
from core.settings.config import Settings


def test_protection_is_the_setting_where_there_are_super_experts_else_by_name() -> None:
    one = SuperExpert(1, 6, 300.0, 200.0)
    without, protected = (mode.over(Settings()).lossy for mode in super_experts.modes_of("drop", [(1, 6)], [one]))
    assert not without.protect_super and protected.protect_super and not str(protected.protect)
    without, protected = (mode.over(Settings()).lossy for mode in super_experts.modes_of("buddy", [(1, 6)], []))
    assert without.substitutes and not str(without.protect) and str(protected.protect) == "1:6"
    assert not protected.protect_super and protected.rho == without.rho


def test_claims_are_held_against_the_rows() -> None:
    def out(*random: float) -> list[dict[str, Any]]:
        return [{"name": "asked", "kl": 0.5}, *({"name": "random", "kl": kl} for kl in random)]

    def rows(*better: bool) -> list[dict[str, Any]]:
        pairs = zip(super_experts.WAYS, better, strict=True)
        return [
            {"mode": name, "kl": kl}
            for way, good in pairs
            for name, kl in ((way, 0.2), (f"{way}_protected", 0.1 if good else 0.3))
        ]

    held = [one["holds"] for one in super_experts.orderings(out(0.1, 0.2), rows(True, True, True))]
    assert held == ["yes", "yes"]
    held = [one["holds"] for one in super_experts.orderings(out(0.1, 0.7), rows(False, False, False))]
    assert held == ["in part", "no"]


@pytest.mark.long(0.3)
def test_the_whole_of_it() -> None:
    said = list[str]()
    result: Any = json.loads(json.dumps(super_experts.run(small=True, say=said.append)))
    assert [row["name"] for row in result["left_out"]] == ["nobody", "asked", "busiest", "random"]
    nobody, asked, *_ = result["left_out"]
    assert nobody["kl"] == pytest.approx(0.0, abs=1e-6) and nobody["agreement"] == 1.0 and asked["kl"] > 0
    assert len(result["rows"]) == 2 * len(super_experts.WAYS) and not any(row["problem"] for row in result["rows"])
    expected = [[one["layer"], one["expert"]] for one in result["super_experts"] or [result["outstanding"]]]
    assert asked["experts"] == expected
    text = super_experts.table(result)
    assert "Super experts: " in text and "drop, " in text and "busiest" in text
