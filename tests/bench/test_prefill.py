"""bench prefill: its arithmetic, and all of it on the small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import prefill
from bench.prefill import Seen


def systems(**seconds: list[float]) -> prefill.Systems:
    """Three rounds of every system, of 2 s each unless given; at 50 %, 3 GB were missing and 3 GB read."""
    found: prefill.Systems = {}
    for name in ("transformers", *(f"{name} {budget}" for name in prefill.FORMATS for budget in prefill.BUDGETS)):
        took = seconds.get(name.replace(" ", "_").replace("%", ""), [2.0, 2.0, 2.0])
        missing = [3_000_000_000] * 3 if "50" in name else [0] * 3
        found[name] = {100: Seen(took, [0.0] * 3, missing, list(missing), [torch.tensor([1.0, 2.0])] * 3)}
    return found


def test_ratios_are_medians_of_the_rounds_own() -> None:
    found = prefill.result(systems(transformers=[1.0, 4.0, 9.0], bf16_100=[2.0, 2.0, 3.0]), 1.0)
    assert found["prefill_ratio"]["bf16"]["100%"]["100"] == 2.0  # of 0.5, 2 and 3
    assert found["int4_over_bf16"]["100%"]["100"] == 1.0  # of 1, 1 and 1.5
    assert found["tok_s"]["bf16 100%"]["100"] == 50.0
    assert found["over_bound"]["bf16"]["50%"]["100"] == pytest.approx(2 / 3)  # 3 s to read, whatever computing takes
    assert found["over_bound"]["bf16"]["100%"]["100"] == 1.0


def test_llama_cpp_stands_beside_where_it_is() -> None:
    seen = systems(bf16_100=[2.0, 2.0, 3.0])
    assert prefill.result(seen, 1.0)["over_llama"] == {"bf16": {}, "int4": {}}
    seen["llama.cpp bf16"] = {100: Seen([1.0, 4.0, 3.0])}
    found = prefill.result(seen, 1.0)
    assert found["over_llama"] == {"bf16": {"100": 1.0}, "int4": {}}  # of .5, 2 and 1
    assert found["tok_s"]["llama.cpp bf16"]["100"] == pytest.approx(100 / 3)


def test_what_is_read_twice_misses_its_goal() -> None:
    seen = systems()
    seen["int4 50%"][100].read_bytes = [6_000_000_000, 3_000_000_000, 6_000_000_000]
    found = prefill.result(seen, 1.0)
    assert found["read_over_missing"]["int4"]["50%"]["100"] == 2.0
    assert found["read_over_missing"]["bf16"]["50%"]["100"] == 1.0
    assert found["read_over_missing"]["bf16"]["100%"]["100"] is None  # nothing was missing
    assert [goal["kept"] for goal in found["goals"]] == [True, False, True]


def test_one_other_bit_is_told() -> None:
    seen = systems()
    seen["bf16 50%"][100].logits[1] = torch.nextafter(torch.tensor([1.0, 2.0]), torch.tensor([9.0, 9.0]))
    found = prefill.result(seen, 1.0)
    assert found["same_bits"] == {"100%": {"100": True}, "50%": {"100": False}}


def test_slower_than_transformers_at_one_length_misses_the_goal() -> None:
    seen = systems()
    for name in seen:
        seen[name][200] = Seen([1.0] * 3, [0.0] * 3, [0] * 3, [0] * 3, [])
    seen["int4 100%"][200].seconds = [1.5] * 3
    ratio, read, int4 = prefill.result(seen, 1.0)["goals"]
    assert (ratio["kept"], read["kept"], int4["kept"]) == (False, True, False)
    assert ratio["found"] == int4["found"] == pytest.approx(1 / 1.5)


@pytest.mark.long(0.3)
def test_all_of_it_on_the_small_model(tmp_path: Path) -> None:
    said: list[str] = []
    found: Any = json.loads(json.dumps(prefill.run(keep=tmp_path, small=True, say=said.append)))
    lengths = [str(length) for length in prefill.LENGTHS[True]]
    for name in prefill.FORMATS:
        for budget in prefill.BUDGETS:
            assert [*found["prefill_ratio"][name][budget]] == lengths
            assert all(ratio > 0 for ratio in found["prefill_ratio"][name][budget].values())
            assert found["pieces"][name][budget] >= prefill.LENGTHS[True][-1]
        assert set(found["missing_bytes"][name]["100%"].values()) == {0}
        assert set(found["read_over_missing"][name]["50%"].values()) <= {1.0, None}
        assert any(found["missing_bytes"][name]["50%"].values())
    assert all(same for by_length in found["same_bits"].values() for same in by_length.values())
    assert sum("importing" in text for text in said) == len(prefill.FORMATS)
    assert "the same" in prefill.table(found) and "DIFFERENT" not in prefill.table(found)
