"""bench regret runs both ways, and reports what it measured."""

from __future__ import annotations

import pytest

from app.services.regret import Regret
from bench import regret


@pytest.mark.long(0.2)
def test_the_comparison_is_measured_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "BEGIN", 33)
    monkeypatch.setattr(regret, "SCOPES", ("layer",))
    said: list[str] = []
    result = regret.run(Regret, rounds=1, tokens=8, say=said.append)
    scopes = result["scopes"]
    assert isinstance(scopes, dict)
    assert tuple(scopes) == ("layer",)
    for scope in scopes.values():
        assert scope["ratio"] == scope["on_ms"] / scope["off_ms"] > 0
        assert scope["told"]["state"] == "ready"
        assert 0 < scope["told"]["alone"] <= scope["told"]["belady"] <= 1
    assert result["ratio"] == max(scope["ratio"] for scope in scopes.values())
    assert "layer: round 1 of 1" in said[1]
    text = regret.table(result)
    assert all(word in text for word in ("each layer", "goal"))
