"""What is said before a load and under an answer: the verdict with its tiers and ranges, disk misses apart, names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.store import Message
from app.ui.tabs.messages import statistics
from app.ui.text import fit_card, span
from app.wording import name_of
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.system.wording import format_bytes
from core.types import Fit
from tests.fake_models import fake_estimate, fake_pack

STATS: dict[str, Any] = {
    "tok_s": 12.5,
    "new_tokens": 7,
    "ttft_ms": 800.0,
    "hit_rate": 0.75,
    "compute_ms": 60.0,
    "stall_ms": 30.0,
    "idle_ms": 10.0,
    "reason": "stop",
    "exact": True,
    "emulated": False,
}


def fit(model: str = "demo", budget: str = "50%", **changes: Any) -> Fit:
    return replace(fake_estimate(LoadSpec(model, settings=Settings({"budget": budget}))), **changes)


def test_the_tiers_of_a_pack_and_of_a_checkpoint(tmp_path: Path) -> None:
    pack = fit_card(fit(str(fake_pack(tmp_path / "pack"))))
    assert "<b>3.2 MB</b> of 900 MB free" in pack
    assert "6.4 MB of experts are read from it, bypassing the page cache" in pack
    assert "not needed once loaded" in fit_card(fit())


def test_the_expected_speed_says_what_it_rests_on() -> None:
    card = fit_card(fit(hit_low=0.62, hit_high=0.9, tok_s_low=3.21, tok_s_high=8.9, basis='copies "over" the link'))
    assert "<b>3.2–8.9</b> tok/s, hit rate <b>62–90&nbsp;%</b>" in card
    assert 'title="copies &quot;over&quot; the link"' in card
    assert "Copies &quot;over&quot; the link.</p>" in card
    assert "Expected" not in fit_card(fit(basis="", problem="Too small."))


@pytest.mark.parametrize(
    ("low", "high", "digits", "text"),
    [(3.2, 8.9, 1, "3.2–8.9"), (100, 100, 0, "100"), (12.4, 12.2, 0, "12"), (9, 21, 0, "9–21")],
)
def test_ranges(low: float, high: float, digits: int, text: str) -> None:
    assert span(low, high, digits) == text


def test_a_suggestion_is_made_only_where_it_differs() -> None:
    assert 'data-budget="62%"' in fit_card(fit(), "50%")
    assert "data-budget" not in fit_card(fit(), "62%")
    assert "data-budget" not in fit_card(fit(suggested=""), "50%")


def test_a_warning_may_be_overridden_and_a_problem_may_not() -> None:
    tight = fit_card(fit(budget="95%"))
    assert "Tight fit" in tight
    assert "load it anyway" in tight
    bad = fit_card(fit(budget="10%"))
    assert "Does not fit" in bad
    assert "all the same" not in bad


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        ({}, "12.5 tok/s · 7 tokens · TTFT 800 ms · hit rate 75.0 % · stall 30 % · finished · EXACT"),
        (
            {"disk_misses": 1, "disk_bytes": 4096},
            "12.5 tok/s · 7 tokens · TTFT 800 ms · hit rate 75.0 % · 1 miss from disk "
            "(4.1 kB) · stall 30 % · finished · EXACT",
        ),
        (
            {"disk_misses": 0, "disk_bytes": 0},
            "12.5 tok/s · 7 tokens · TTFT 800 ms · hit rate 75.0 % · stall 30 % · finished · EXACT",
        ),
    ],
)
def test_the_line_under_an_answer_names_the_disk_only_where_one_was_read(stats: dict[str, Any], line: str) -> None:
    message = Message(id=1, role="assistant", text="x", state="done", stats=STATS | stats, error="", created=0.0)
    assert statistics(message) == line


def test_names_and_sizes() -> None:
    cached = Path("hub") / "models--org--Big-MoE" / "snapshots" / "abc"
    assert name_of("demo") == "Demo model (bundled)"
    assert name_of(str(Path("models") / "Mixtral")) == "Mixtral"
    assert name_of(str(cached)) == "org/Big-MoE"
    assert name_of(str(cached / "x-Q4_K_M.gguf")) == "org/Big-MoE/x-Q4_K_M.gguf"
    assert [format_bytes(n) for n in (12, 4096, 9_990_000, 123_456_789, 18_500_000_000)] == [
        "12 B",
        "4.1 kB",
        "9.99 MB",
        "123 MB",
        "18.5 GB",
    ]


def test_what_is_not_loaded_is_said() -> None:
    said = "Text only: visual of this model is not loaded."
    assert said in fit_card(fit(note=said))
    assert "Text only" not in fit_card(fit())
