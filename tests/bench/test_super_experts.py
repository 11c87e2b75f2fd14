"""bench super_experts: what it holds against the paper, and all of it on the demo model, too small to mean anything."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import super_experts
from core.engine import Engine
from core.evaluate.passages import reference
from core.policy.substitute.super_experts import SuperExpert
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import random_model
from tests.tiny_tokenizer import save_tokenizer


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


def test_an_expert_left_out_counts_nothing_and_afterwards_it_does_again(tmp_path: Path) -> None:
    random_model("qwen3_moe").save_pretrained(tmp_path)
    spec = LoadSpec.checked(str(save_tokenizer(tmp_path)), Settings({"budget": "50%"}), context=256)
    engine = Engine.load(spec)
    try:
        pieces = [[5, 9, 77, 130, 12, 44, 8, 201]]
        exact = reference(engine, pieces, threading.Event())
        without = super_experts.read_without(engine, [(1, 6), (1, 2)], pieces, exact)
        assert without.tokens == 7 and without.kl > 1e-6
        assert super_experts.read_without(engine, [], pieces, exact).kl == pytest.approx(0.0, abs=1e-6)
        with super_experts.left_out(engine, [(0, 1), (1, 6)]):
            hooked = [site.index for site in engine.loaded.sites if site.module._forward_pre_hooks]
            assert hooked == [0, 1]
        again = reference(engine, pieces, threading.Event())
        assert all(torch.equal(a, b) for a, b in zip(exact, again, strict=True))
    finally:
        engine.unload()
