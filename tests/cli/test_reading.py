"""The line of the terminal that says how far a prompt is read."""

from __future__ import annotations

import pytest

from app.cli import terminal
from core.types import Piece


def test_it_is_written_over_and_wiped_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "FIRST_S", 0.0)
    monkeypatch.setattr(terminal, "AGAIN_S", 0.0)
    line = terminal.Reading()
    line(Piece("prefill", done=300, total=1200))
    line(Piece("prefill", done=1199, total=1200))
    line.end()
    line.end()
    lines = capsys.readouterr().err.split("\r")
    assert lines[1].startswith("Reading the prompt: 25% of 1200 tokens, ") and lines[1].endswith(" s left")
    assert lines[2].startswith("Reading the prompt: 100% of 1200 tokens, ") and len(lines[2]) >= len(lines[1])
    assert lines[3].strip() == "" and len(lines[3]) >= len(lines[2].rstrip())
    assert lines[4:] == [""]


def test_a_short_prompt_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    line = terminal.Reading()
    line(Piece("prefill", done=1, total=10))
    line.end()
    assert capsys.readouterr().err == ""


def test_speed_is_that_of_what_was_read_now() -> None:
    assert terminal.describe_reading(Piece("prefill", done=600, total=1000, cached=200), 4.0) == (
        "Reading the prompt: 60% of 1000 tokens, 100 tok/s, 4 s left"
    )
    assert terminal.describe_reading(Piece("prefill", done=200, total=1000, cached=200), 4.0) == (
        "Reading the prompt: 20% of 1000 tokens"
    )
