"""The table of docs/gpu.md: its arithmetic by hand, and that the page has what the model prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu_model import Card, Model, expected, table

DOCS = Path(__file__).parents[2] / "docs"
CARD = Card("", memory=5.0, memory_gbps=100, link_gbps=10)
MODEL = Model("", layers=10, experts=100, top_k=4, expert=16 / 4.5, dense=1000)  # 2 MB an expert, 2 GB of the rest


def test_the_arithmetic() -> None:
    found = expected(CARD, MODEL)
    assert found is not None and found.share == pytest.approx(1.0)  # (5 - 1 - 2) GB / 2 MB = 1,000 slots
    assert found.hit == (1.0, 1.0)
    assert found.tok_s == (pytest.approx(1 / 0.0208), pytest.approx(1 / 0.0208))  # 2.08 GB at 100 GB/s; host 3.8 ms
    half = expected(CARD._replace(memory=4.0), MODEL)
    assert half is not None and half.share == pytest.approx(0.5, abs=0.002)
    assert half.hit == (pytest.approx(0.5, abs=0.002), pytest.approx(0.96, abs=0.001))
    assert half.tok_s[0] == pytest.approx(1 / (0.0208 + 0.004), rel=0.01)  # 40 of 80 MB at 10 GB/s
    assert half.tok_s[1] == pytest.approx(1 / 0.0208)


def test_what_does_not_fit_has_no_speed() -> None:
    assert expected(CARD._replace(memory=3.05), MODEL) is None  # 25 slots; a token takes 40
    assert expected(CARD._replace(memory=3.081), MODEL) is not None


def test_the_page_has_it() -> None:
    assert table() in (DOCS / "gpu.md").read_text("utf-8")
