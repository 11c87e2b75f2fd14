"""bench formats runs, and its figures are those of the formats."""

from __future__ import annotations

import pytest

from bench import formats
from core.settings.formats import FORMATS, LOADABLE


@pytest.mark.long(0.2)
def test_every_format_has_a_row_that_makes_sense() -> None:
    said: list[str] = []
    result = formats.run(rounds=2, small=True, say=said.append)
    rows = result["formats"]
    assert isinstance(rows, dict) and tuple(rows) == LOADABLE
    assert said[-1] == "round 2 of 2"
    for name, row in rows.items():
        bits = FORMATS[name].bits or 16
        assert bits <= row["blob_bits"] < bits + 1.2 and row["slot_bits"] <= 16
        assert min(row[key] for key in ("ffn_ms", "ffn_ratio", "place_ms", "place_ms_per_mb", "encode_ms")) > 0
    assert rows["checkpoint"]["ffn_ratio"] == 1
    order = ["checkpoint", "int8-g32", "int4-g32", "int4-g64", "int4-g128", "int3", "int2"]
    assert sorted(order, key=lambda name: rows[name]["weight_error"]) == order
    assert all(
        rows[name]["weight_error"] < rows[name]["output_error"] < 2.5 * rows[name]["weight_error"] + 0.01
        for name in LOADABLE
    )
    text = formats.table(result)
    assert len(text.splitlines()) == 3 + len(LOADABLE) and all(name in text for name in LOADABLE)
