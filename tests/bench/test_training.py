"""bench training: more tokens, other recalls; the whole of it on the demo model, with tiny profiles."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import training
from core.settings.registry import variants


def test_more_is_better_only_if_it_always_is() -> None:
    def at(path: float, maps: float) -> dict[str, Any]:
        rates = {"gate": 0.5, "routing_path": path, "maps": maps}
        return {title: {"recall_at_k": rate} for title, rate in rates.items()}

    said = training.orderings({"500": at(0.1, 0.3), "1000": at(0.2, 0.2), "2000": at(0.4, 0.6)})
    assert [(one["claim"], one["holds"]) for one in said] == [
        ("routing_path: the more tokens, the better", "yes"),
        ("maps: the more tokens, the better", "no"),
    ]


@pytest.mark.long(0.3)
def test_all_of_it_on_the_demo_model() -> None:
    result: Any = json.loads(json.dumps(training.run(small=True, say=lambda text: None)))
    few, many = result["recall"].values()
    assert [*result["recall"]] == sorted(result["recall"], key=int)
    assert few.keys() == many.keys() >= {v.name for v in variants("predictor") if v.needs}
    assert few["gate"] == many["gate"] and few != many  # it reads no profile
    assert all(len(one["recall_by_layer"]) == result["layers"] for one in few.values())
    text = training.table(result)
    assert all(title in text for title in few)
    assert many[training.PATH] != many[training.READ_PATH]  # other texts
    assert result["orderings"][-1]["claim"] == "routing_path: generated texts above those read"
