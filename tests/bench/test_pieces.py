"""bench pieces: the smoke run, and what its table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import pieces


@pytest.mark.long(1)
def test_it_runs_and_borrowing_never_copies_more(tmp_path: Path) -> None:
    found: dict[str, Any] = pieces.run(keep=tmp_path, small=True, say=lambda text: None)
    assert {*found["found"]} == {
        f"{budget}, {link}, {length}"
        for budget in pieces.BUDGETS
        for link in ("own", "emulated")
        for length in pieces.LENGTHS[True]
    }
    for row in found["found"].values():
        assert row["borrowed"]["pieces"] <= row["usual"]["pieces"]
        assert row["borrowed"]["slots"] <= row["usual"]["slots"]
        assert row["bytes_ratio"] < 1 or row["borrowed"]["pieces"] == row["usual"]["pieces"]
        assert row["usual"]["bytes"] > 0
    said = pieces.table(found)
    assert "GB ratio" in said and len(said.splitlines()) == 4 + len(found["found"])
