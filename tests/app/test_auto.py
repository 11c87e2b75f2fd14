"""Auto: another cache policy once it surely hits more, kept for the model and its budget; one sentence says why."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.services.host import Host
from app.ui.sidebar import CacheSection
from core.policy.throttle import Tried
from tests.app.conftest import open_host, page
from tests.fakes import FakeEngine


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
