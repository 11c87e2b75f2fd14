"""Live settings and sampling: refused, recorded, remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from app.services.host import Host
from app.store import Store
from core.errors import BudgetError
from tests.app.conftest import WAIT_S, GatedEngine, ended, follow, open_host
from tests.fakes import FakeEngine


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("budgets", "50%", "no setting called 'budgets'"),
        ("budget", "150%", "between 0 % and 100 %"),
        ("eviction", "psychic", "Choose one of"),
        ("link_gbps", "fast", "must be a number"),
        ("link_gbps", float("nan"), "must lie between"),
    ],
)
def test_a_bad_setting_is_told_and_changes_nothing(host: Host, name: str, value: object, told: str) -> None:
    before = dict(host.settings)
    assert told in host.change(name, value)
    assert told in host.change_many({"link_latency_us": 77.0, name: value})
    assert dict(host.settings) == before


def test_a_bad_sampling_value_is_told_and_changes_nothing(host: Host) -> None:
    before = host.sampling
    assert "must lie between" in host.set_sampling(top_k=5, temperature=9)
    assert "no sampling setting" in host.set_sampling(heat=1)
    assert host.sampling == before
    assert host.set_sampling(temperature=0.5) == ""
    assert host.sampling == replace(before, temperature=0.5)


def test_an_engine_that_refuses_or_fails_a_change_is_told(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: FakeEngine, changes: Mapping[str, object]) -> None:
        raise BudgetError("The device has only 3 GB free.")

    def fail(self: FakeEngine, changes: Mapping[str, object]) -> None:
        raise RuntimeError("CUDA error 700")

    monkeypatch.setattr(FakeEngine, "change", refuse)
    assert host.change("budget", "100%") == "The device has only 3 GB free."
    monkeypatch.setattr(FakeEngine, "change", fail)
    assert "error inside Moestro" in host.change("budget", "100%")
    assert "CUDA error 700" in caplog.text
    assert str(host.settings["budget"]) == "50%"


def test_settings_move_while_tokens_stream_and_are_recorded(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chat(None, "one")
    gated.gate.release(2)
    follow(answer, lambda a: a.n_tokens == 2)
    assert gated_host.change("budget", "25%") == ""
    assert str(gated_host.settings["budget"]) == "25%"
    gated.gate.release(100)
    ended(answer)
    rows = gated_host.store.db.rows("SELECT * FROM changes")
    assert [(r["step"], r["name"], r["old"], r["new"]) for r in rows] == [(3, "budget", "50%", "25%")]
    steps = list(gated_host.store.steps.records(chat=answer.chat_id))
    assert steps[2].slots == 2 * steps[3].slots


def test_with_telemetry_off_only_the_change_itself_is_recorded(host: Host) -> None:
    assert host.change("telemetry", False) == ""
    answer = ended(host.chat(None, "one"))
    assert answer.n_tokens == 12
    assert len(list(host.store.steps.records(chat=answer.chat_id))) == 1
    assert [r["name"] for r in host.store.db.rows("SELECT name FROM changes")] == ["telemetry"]


def test_settings_sampling_and_model_are_remembered(tmp_path: Path) -> None:
    host = open_host(tmp_path, loaded=False)
    assert host.last_spec() is None
    assert host.change("budget", "75%") == ""
    assert host.plan("demo").settings["budget"] == "75%"
    loading = host.load(host.plan("demo", context=320, format="int8"))
    assert loading.join(WAIT_S)
    assert (host.model, host.context, host.settings["budget"]) == ("demo", 320, "75%")
    assert host.change("eviction", "lfu") == ""
    host.set_sampling(temperature=0.7)
    host.close()

    host = open_host(tmp_path, loaded=False)
    spec = host.last_spec()
    assert spec is not None
    assert (spec.model, spec.context, spec.format) == ("demo", 320, "int8")
    assert (spec.settings["budget"], spec.settings["eviction"]) == ("75%", "lfu")
    assert host.sampling.temperature == 0.7
    host.close()


def test_forgotten_names_of_an_earlier_version_do_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    store.db.put("settings", {"budget": "75%", "gone": 1, "eviction": "gone"})
    store.db.put("sampling", {"top_k": 4, "gone": 1})
    store.db.put("spec", {"model": "demo", "gone": 1, "format": "gone", "context": 320})
    store.close()
    host = open_host(tmp_path, loaded=False)
    assert (host.settings["budget"], host.sampling.top_k) == ("75%", 4)
    spec = host.last_spec()
    assert spec is not None
    assert (spec.model, spec.format, spec.context) == ("demo", "checkpoint", 320)
    assert caplog.text.count("earlier version") == 4
    host.close()
