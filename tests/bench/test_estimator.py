"""bench estimator: what it compares and asks, and the whole of it on the demo model, far too small to mean anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import estimator
from core.settings.calibration import CalibrationSettings
from core.types import ModelShape


def test_the_estimator_of_before_comes_first_and_nothing_twice() -> None:
    found = estimator.cases(ModelShape(6, 32, 4, 192, 1))
    assert found[0] == estimator.case("hidden", 256, 8192) and all(found.count(one) == 1 for one in found)
    assert {one["estimator_input"] for one in found} == set(estimator.INPUTS)
    assert all(CalibrationSettings.checked(**one) for one in found)
    assert estimator.before(ModelShape(48, 128, 8, 2048, 1)) == 1285, "of Qwen3-30B-A3B"


def test_no_answer_asked_for_is_read() -> None:
    chats: list[Any] = [
        [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i % 200}"}]
        for i in range(600)
    ]
    held_out, known = estimator.divided(chats)
    assert len(held_out) == estimator.HELD_OUT and len(known) == 3 * (200 - estimator.HELD_OUT)
    assert not {str(chat[-1]) for chat in held_out} & {str(chat[-1]) for chat in known}
    held_out, known = estimator.divided(["a", "b", "c"])
    assert (held_out, known) == (["a"], ["b", "c"])


@pytest.mark.long(0.3)
def test_the_whole_of_it() -> None:
    said = list[str]()
    result: Any = json.loads(json.dumps(estimator.run(small=True, say=said.append)))
    assert [row["estimator_input"] for row in result["estimators"]] == ["hidden", "quasi"]
    for row in result["estimators"]:
        assert row["trained"] == 180 and row["parameters"] > 0 and 0 <= row["recall"] <= 1
        assert len(row["recall_by_layer"]) == result["layers"] == 6
    assert result["estimators"][1]["disk_bytes"] == result["estimators"][0]["disk_bytes"] + 200 * 5 * 24
    assert list(result["untrained"]) == ["gate", "default_vectors"]
    text = estimator.table(result)
    assert "quasi" in text and "default_vectors, untrained" in text and len(said) == 4
