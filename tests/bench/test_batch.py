"""bench batch: the smoke run, and what its table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.batch import run, table


@pytest.mark.long(1)
def test_it_runs_and_its_figures_fit_together(tmp_path: Path) -> None:
    found = run(tmp_path, small=True, say=lambda text: None)
    for place in ("link", "disk"):
        for share, rows in found[place].items():  # type: ignore[attr-defined]
            assert rows["1"]["tokens_per_expert"] == 1.0 and rows["4"]["union"] > rows["1"]["union"]
            assert (rows["1"]["bytes_per_token"] > 0) == (share != "100%")
            assert all(row["least_bytes_per_token"] <= row["bytes_per_token"] for row in rows.values())
    named = {"one batch", "none", "random", "similarity", "none, network", "similarity, network"}
    assert {*found["schedulers"]} == named  # type: ignore[misc]
    for rows in found["accuracy"].values():  # type: ignore[attr-defined]
        assert all(0 <= row["accuracy"] <= 1 for row in rows.values()) and rows["TLP"]["accuracy"] > 0.3
    assert 0 < found["gain_frugal"] <= found["gain_bound"]  # type: ignore[operator]
    said = table(found)
    assert "16 at a time over one" in said and "two batches of 2" in said
