"""Settings that are kept for a model: as it was set the last time, and the cache policy that Auto found better."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.services.host import Host
from app.services.remembered import KNOBS
from app.ui.event_data import BudgetPicked
from app.ui.sidebar import CacheSection
from app.ui.sidebar.model import CHOICES, ModelSection
from core.policy.throttle import Tried
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.presets import preset
from tests.app.conftest import WAIT_S, open_host, page
from tests.fakes import FakeEngine


def load(host: Host, model: str, **choices: object) -> None:
    assert host.loader.load(host.loader.plan(model, **choices)).join(WAIT_S)
    assert host.loader.loading is not None and host.loader.loading.error == ""


def now(host: Host) -> tuple[object, ...]:
    """The settings that tell the two models of these tests apart, and what Auto chooses."""
    settings = host.models.settings
    return str(settings["budget"]), settings["eviction"], sorted(host.remembered.auto), host.remembered.preset


OF_A = ("40%", "lfu", [], "auto")
OF_B = ("62%", "lfru", sorted(KNOBS), "auto")


@pytest.fixture
def two(tmp_path: Path) -> Host:
    """Model "a" was set by hand, "b" is loaded and left to Auto."""
    host = open_host(tmp_path, loaded=False)
    load(host, "a", context=512)
    assert host.models.change_many({"budget": "40%", "eviction": "lfu"}) == "" and now(host) == OF_A
    load(host, "b")
    assert now(host)[:2] == ("40%", "lfu"), "a new model begins with the current settings"
    assert host.models.change_many({"budget": "62%", "eviction": "lfru"}, preset="auto") == "" and now(host) == OF_B
    return host


def test_each_model_has_its_own_settings_and_loading_choices(two: Host) -> None:
    load(two, "a")
    assert now(two) == OF_A and two.models.spec is not None and two.models.spec.context == 512
    load(two, "b")
    assert now(two) == OF_B and two.models.spec.context == LoadSpec().context


def test_they_are_there_after_a_restart(tmp_path: Path, two: Host) -> None:
    two.close()
    with closing(open_host(tmp_path, loaded=False)) as host:
        assert now(host) == OF_B
        host.models.recall("never loaded")
        assert now(host) == OF_B
        host.models.recall("a")
        assert now(host) == OF_A
        assert host.models.change("eviction", "lru") == "", "without a model it is the next load's"
        load(host, "a")
        assert now(host) == ("40%", "lru", [], "auto")
        host.models.recall("b")
        assert now(host)[0] == "40%", "the loaded model keeps its own"
        load(host, "b")
        assert now(host) == OF_B


@pytest.mark.parametrize("other", [{}, {"eviction": "lfu"}, {"prefetch_auto": False}], ids=["same", "policy", "hand"])
def test_settings_newer_than_what_was_kept_are_as_in_the_preset(tmp_path: Path, other: dict[str, object]) -> None:
    """Kept by a version that knew neither drafts nor a place of missing experts."""
    known, joined = Settings({**preset("auto").values, **other}), ("drafts", "miss_placement")
    older = {name: value for name, value in known.items() if name not in joined}
    with closing(open_host(tmp_path, loaded=False)) as host:
        host.remembered.put("settings", older)
        host.remembered.put("model a", {"settings": older, "auto": [], "spec": {"model": "a"}, "preset": "auto"})
    with closing(open_host(tmp_path, loaded=False)) as host:
        start = host.remembered.of("a")
        assert start is not None
        for found in (host.remembered.settings(), start.spec.settings):
            assert all(found[name] == value for name, value in older.items())
            assert [found[name] for name in joined] == (
                ["off", "wait"] if "prefetch_auto" in other else ["auto", "auto"]
            )


def test_one_that_is_damaged_or_of_another_version_is_forgotten(two: Host) -> None:
    for kept in ({"spec": {}}, {"settings": 5}, {"settings": {}, "auto": 1, "spec": {"model": "a"}}):
        two.remembered.put("model a", kept)
        assert two.remembered.of("a") is None
    kept = {"settings": {"budget": "30%", "gone": 1}, "auto": ["other"], "spec": {"model": "a", "context": -1}}
    two.remembered.put("model a", {**kept, "preset": "gone"})
    assert two.loader.plan("a").context == LoadSpec().context
    load(two, "a")
    assert now(two) == ("30%", "lru", [], "auto")


def test_the_page_says_so_and_takes_the_current_ones_on_a_click(two: Host) -> None:
    with page():
        section = ModelSection(two, gr.HTML({}))
        cache = CacheSection(two, section.form, section.fit, section.refit)

    said, *choices = section._recall("a")

    def verdict() -> dict[str, Any]:
        return section.refit("a", *choices)

    def picked(budget: str) -> BudgetPicked:
        return BudgetPicked(None, {"budget": budget})

    assert said == "" and section._recall("never loaded") == ["", *[gr.skip()] * len(CHOICES)]
    assert dict(zip((param.name for param in CHOICES), choices, strict=True))["context"] == 512
    first = verdict()
    assert "settings of the last time are used: Auto, memory 40%" in first["html"]
    assert now(two) == OF_B, "the loaded model's settings do not change"
    cache._suggested("a", picked("50%"))
    second = verdict()
    assert "memory 50%" in second["html"] and second["of"] != first["of"] and now(two) == OF_B
    problem = cache._suggested("a", picked("much"))[1]
    assert "much" in problem and "memory 50%" in verdict()["html"]
    cache._suggested("a", picked(""))
    assert "last time" not in verdict()["html"]
    load(two, "a")
    assert now(two) == OF_B


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what a host's simulated caches show: the chosen policy's rate and another's, and whether that is sure."""

    def show(host: Host, best: str, gain: float, *, better: bool = True, state: str = "ready") -> None:
        chosen = str(host.models.settings["eviction"])
        view = {"state": state, "title": chosen.upper(), "best": best, "best_title": best.upper(), "better": better}
        view |= {"gain": gain, "error": gain / 4, "tokens": 96, "alone": 0.5}
        view["rates"] = [[best.upper(), 0.5 + gain], [chosen.upper(), 0.5]]
        monkeypatch.setattr(host.regret, "view", lambda *_, **__: view)
        host.regret.heard()

    return show


def policy(host: Host) -> object:
    return host.models.settings["eviction"]


def test_the_policy_that_surely_hits_more_replaces_the_chosen_one(host: Host, says: Callable[..., None]) -> None:
    assert policy(host) == "lfru"
    says(host, "lfu", 0.1, better=False)
    says(host, "lfu", 0.001)
    says(host, "lfu", 0.1, state="warming")
    assert policy(host) == "lfru"
    says(host, "lfu", 0.1)
    assert policy(host) == "lfu"
    assert host.models.change("eviction", "lru") == ""
    says(host, "lfu", 0.1)
    assert policy(host) == "lru", "a policy chosen by hand stays"


def test_the_next_load_begins_with_it_for_the_same_budget(tmp_path: Path, says: Callable[..., None]) -> None:
    with closing(open_host(tmp_path)) as host:
        says(host, "lfu", 0.1)
        assert host.models.change("predictor", "stride") == "", "another knob, which leaves this one to Auto"
    with closing(open_host(tmp_path)) as host:
        assert policy(host) == "lfu" and host.remembered.auto == {"budget", "eviction"}
        assert host.models.change("budget", "40%") == ""
        host.auto.begun()
        assert policy(host) == "lfru", "nothing is known of this budget"
        assert host.models.change("budget", "62%") == ""
        host.remembered.put("auto_policies", {f"fake {host.models.settings['budget']}": "of another version"})
        host.auto.begun()
        assert policy(host) == "lfru"


def test_one_sentence_says_what_was_chosen_and_a_table_what_else_would_cost(
    tmp_path: Path, says: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_host(tmp_path)) as host, page():
        menu = CacheSection(host, [gr.Textbox()], gr.HTML(), lambda *form: "").preset

        def state() -> tuple[Any, str, bool]:
            chosen, _, note, back = menu.values()
            return chosen["value"], note, back["visible"]

        _, note, _ = state()
        assert "62% of the experts, the most that is safe; LFRU chooses what is evicted, until another" in note
        assert "prefetching is compared" in note and "<table" not in note
        monkeypatch.setattr(FakeEngine, "tried", Tried(waits=(0.05, 2.5)))
        assert "nothing is prefetched, as copies are waited for only 0.05 of a token's 2.5 ms" in state()[1]
        says(host, "lfu", 0.1)
        says(host, "lfru", -0.1, better=False)
        assert "missing experts" not in state()[1].lower(), "placement was not compared"
        monkeypatch.setattr(FakeEngine, "tried", Tried((4.5, 2.25, 40, False), placement=(1.5, 2.0, 32, True)))
        monkeypatch.setattr(host.models, "manifest", lambda: {"link_gbps": 1.0, "link": "emulated"})
        chosen, note, resets = state()
        assert (chosen, resets) == ("auto", False), "what Auto chose is no change of it"
        assert "LFU chooses what is evicted, with 50.0% hits, simulated" in note
        assert "prefetching is paused, as a token takes 4.5 ms with it and 2.25 without" in note
        assert "missing experts are computed where they lie: 1.5 ms a token in place of 2;" in note
        assert "waited for</th><td>2 ms a token, over 32 tokens</td><td>+0.5 ms a token</td>" in note
        shape = host.models.shape
        assert shape is not None
        cost = 0.1 * shape.layers * shape.top_k * shape.expert_bytes / 1e6
        hits = "40.0% hits, simulated on your last 96 tokens"
        assert (
            f"<td>{hits}</td><td>{cost:+.3g} ms a token, emulated link</td>" in note
            and "<td>+2.25 ms a token</td>" in note
        )
        assert host.models.change("eviction", "lfu") == ""
        chosen, note, resets = state()
        assert (chosen, resets) == ("custom", True) and "LFU chooses what is evicted, as you chose" in note
        assert menu.choose("auto") == "" and host.remembered.auto == {"budget", "eviction"}
        assert state()[0] == "auto"
        assert host.models.change("budget", "100%") == ""
        assert "All experts are in memory, so none has to be fetched." in state()[1]
        assert menu.choose("moepic") == "" and state()[1] == ""
