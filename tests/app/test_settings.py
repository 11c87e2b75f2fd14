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
    before = dict(host.models.settings)
    assert told in host.models.change(name, value)
    assert told in host.models.change_many({"link_latency_us": 77.0, name: value})
    assert dict(host.models.settings) == before


def test_a_bad_sampling_value_is_told_and_changes_nothing(host: Host) -> None:
    before = host.chats.sampling
    assert "must lie between" in host.chats.set_sampling(top_k=5, temperature=9)
    assert "no sampling setting" in host.chats.set_sampling(heat=1)
    assert host.chats.sampling == before
    assert host.chats.set_sampling(temperature=0.5) == ""
    assert host.chats.sampling == replace(before, temperature=0.5)


def test_an_engine_that_refuses_or_fails_a_change_is_told(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: FakeEngine, changes: Mapping[str, object]) -> None:
        raise BudgetError("The device has only 3 GB free.")

    def fail(self: FakeEngine, changes: Mapping[str, object]) -> None:
        raise RuntimeError("CUDA error 700")

    monkeypatch.setattr(FakeEngine, "change", refuse)
    assert host.models.change("budget", "100%") == "The device has only 3 GB free."
    monkeypatch.setattr(FakeEngine, "change", fail)
    assert "error inside Moestro" in host.models.change("budget", "100%")
    assert "CUDA error 700" in caplog.text
    assert str(host.models.settings["budget"]) == "50%"


def test_settings_move_while_tokens_stream_and_are_recorded(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chats.ask(None, "one")
    gated.gate.release(2)
    follow(answer, lambda a: a.n_tokens == 2)
    assert gated_host.models.change("budget", "25%") == ""
    assert str(gated_host.models.settings["budget"]) == "25%"
    gated.gate.release(100)
    ended(answer)
    rows = gated_host.store.db.rows("SELECT * FROM changes")
    assert [(r["step"], r["name"], r["old"], r["new"]) for r in rows] == [(3, "budget", "50%", "25%")]
    steps = list(gated_host.store.steps.records(chat=answer.chat_id))
    assert steps[2].slots == 2 * steps[3].slots


def test_with_telemetry_off_only_the_change_itself_is_recorded(host: Host) -> None:
    assert host.models.change("telemetry", False) == ""
    answer = ended(host.chats.ask(None, "one"))
    assert answer.n_tokens == 12
    assert len(list(host.store.steps.records(chat=answer.chat_id))) == 1
    assert [r["name"] for r in host.store.db.rows("SELECT name FROM changes")] == ["telemetry"]


def test_settings_sampling_and_model_are_remembered(tmp_path: Path) -> None:
    host = open_host(tmp_path, loaded=False)
    assert host.loader.last_spec() is None
    assert host.models.change("budget", "75%") == ""
    assert host.loader.plan("demo").settings["budget"] == "75%"
    loading = host.loader.load(host.loader.plan("demo", context=320, format="int8"))
    assert loading.join(WAIT_S)
    assert (host.models.model, host.models.context, host.models.settings["budget"]) == ("demo", 320, "75%")
    assert host.models.change("eviction", "lfu") == ""
    host.chats.set_sampling(temperature=0.7)
    host.close()

    host = open_host(tmp_path, loaded=False)
    spec = host.loader.last_spec()
    assert spec is not None
    assert (spec.model, spec.context, spec.format) == ("demo", 320, "int8")
    assert (spec.settings["budget"], spec.settings["eviction"]) == ("75%", "lfu")
    assert host.chats.sampling.temperature == 0.7
    host.close()


def test_forgotten_names_of_an_earlier_version_do_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    seeds = {"eviction.random.seed": 7, "substitute.random.seed": 7}  # settings until they became constants
    store.db.put("settings", {"budget": "75%", "gone": 1, "eviction": "gone", **seeds})
    store.db.put("sampling", {"top_k": 4, "gone": 1})
    store.db.put("spec", {"model": "demo", "gone": 1, "format": "gone", "context": 320})
    store.close()
    host = open_host(tmp_path, loaded=False)
    assert (host.models.settings["budget"], host.chats.sampling.top_k) == ("75%", 4)
    spec = host.loader.last_spec()
    assert spec is not None
    assert (spec.model, spec.format, spec.context) == ("demo", "checkpoint", 320)
    assert caplog.text.count("earlier version") == 4 + len(seeds)
    host.close()
