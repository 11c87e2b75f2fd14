"""Loading, cancelling and unloading: what becomes of the model that was there."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from app.services.host import Host
from core.errors import BusyError, ModelError, MoestroError
from core.profile import Profile
from core.settings.loading import LoadSpec
from core.types import Memory
from tests.app.conftest import WAIT_S, GatedEngine, QuickEngine, ended, open_host
from tests.fake_models import fake_estimate
from tests.fakes import FakeEngine
from tests.logged import Logged


class SlowLoad(QuickEngine):
    """Loads when the test lets it; fails when told to. Remembers who is in memory."""

    go = threading.Event()
    began = threading.Event()
    failure: Exception | None = None
    deaf = False  # does not look at `cancel`
    alive: ClassVar[set[str]] = set()  # of this class; each test makes one of its own

    @classmethod
    def load(
        cls,
        spec: LoadSpec,
        progress: Callable[[str, float], None] = lambda text, share: None,
        cancel: threading.Event | None = None,
        profile: Callable[[str], Profile | None] | None = None,
    ) -> FakeEngine:
        progress("Reading weights", 0.25)
        cls.began.set()
        while not cls.go.wait(0.01):
            if cancel is not None and cancel.is_set() and not cls.deaf:
                raise ModelError("Cancelled.")
        if cls.failure is not None:
            raise cls.failure
        cls.alive.add(spec.model)
        return cls(spec)

    def unload(self) -> None:
        self.alive.discard(self.spec.model)
        super().unload()


@pytest.fixture
def slow() -> type[SlowLoad]:
    return type("Slow", (SlowLoad,), {"go": threading.Event(), "began": threading.Event(), "alive": set()})


@pytest.fixture
def slow_host(tmp_path: Path, slow: type[SlowLoad]) -> Iterator[Host]:
    """A host with model "old" loaded, whose next load waits for `slow.go`."""
    slow.go.set()
    host = open_host(tmp_path, slow, loaded=False)
    assert host.loader.load(host.loader.plan("old")).join(WAIT_S)
    slow.go.clear()
    slow.began.clear()
    yield host
    slow.go.set()
    host.close()


def test_a_load_shows_its_progress_and_holds_everybody_else_off(slow_host: Host, slow: type[SlowLoad]) -> None:
    loading = slow_host.loader.load(slow_host.loader.plan("new"))
    assert slow.began.wait(WAIT_S)
    assert (loading.text, loading.share, loading.finished, slow_host.busy) == ("Reading weights", 0.25, False, True)
    with pytest.raises(BusyError, match="being loaded"):
        slow_host.loader.load(slow_host.loader.plan("third"))
    with pytest.raises(BusyError, match="being loaded"):
        slow_host.models.unload()
    with pytest.raises(BusyError, match="still being loaded"):
        slow_host.chats.ask(None, "hello")
    assert slow_host.models.change("budget", "75%") == ""  # moved during the load: the new model gets it
    slow.go.set()
    assert loading.join(WAIT_S)
    assert (loading.state, loading.share, slow_host.models.model, slow.alive) == ("done", 1.0, "new", {"new"})
    assert slow_host.models.settings["budget"] == "75%"
    assert ended(slow_host.chats.ask(None, "hello")).error == ""
    assert [one.model for one in slow_host.store.steps.loads() if one.ended is None] == ["new"]


def test_a_cancelled_load_keeps_the_old_model(slow_host: Host, slow: type[SlowLoad]) -> None:
    loading = slow_host.loader.load(slow_host.loader.plan("new"))
    assert slow.began.wait(WAIT_S)
    slow_host.loader.cancel()
    assert loading.join(WAIT_S)
    assert (loading.state, loading.error, slow_host.models.model, slow.alive) == ("cancelled", "", "old", {"old"})
    assert "old is still loaded" in loading.text


def test_a_load_that_ends_after_it_was_cancelled_is_given_up(slow_host: Host, slow: type[SlowLoad]) -> None:
    slow.deaf = True
    loading = slow_host.loader.load(slow_host.loader.plan("new"))
    assert slow.began.wait(WAIT_S)
    slow_host.loader.cancel()
    slow.go.set()
    assert loading.join(WAIT_S)
    assert (loading.state, slow_host.models.model, slow.alive) == ("cancelled", "old", {"old"})


def test_closing_cancels_a_load(slow_host: Host, slow: type[SlowLoad]) -> None:
    loading = slow_host.loader.load(slow_host.loader.plan("new"))
    assert slow.began.wait(WAIT_S)
    slow_host.close()
    assert (loading.state, slow.alive) == ("cancelled", set())
    with pytest.raises(BusyError, match="closing"):
        slow_host.loader.load(slow_host.loader.plan("new"))


def test_a_load_that_does_not_fit_is_told_before_anything_is_given_up(slow_host: Host) -> None:
    loading = slow_host.loader.load(LoadSpec("new", settings=slow_host.models.settings.with_({"budget": "5%"})))
    assert loading.join(WAIT_S)
    assert loading.state == "error"
    assert "give at least" in loading.error
    assert "old is still loaded" in loading.error
    assert slow_host.models.model == "old"
    assert slow_host.models.settings["budget"] == "62%"


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ModelError("The file model.safetensors is cut short. Download it again."), "cut short"),
        (RuntimeError("tensor of shape [3]"), "error inside Moestro"),
    ],
)
def test_a_failed_load_keeps_the_old_model(
    slow_host: Host, slow: type[SlowLoad], failure: Exception, told: str, caplog: Logged
) -> None:
    slow.failure = failure
    slow.go.set()
    loading = slow_host.loader.load(slow_host.loader.plan("new"))
    assert loading.join(WAIT_S)
    assert told in loading.error
    assert "shape [3]" not in loading.error
    assert str(failure) in caplog.text or isinstance(failure, MoestroError)
    assert (loading.state, slow_host.models.model, slow.alive) == ("error", "old", {"old"})
    assert ended(slow_host.chats.ask(None, "hello")).error == ""


def test_when_memory_holds_one_model_a_failed_load_says_what_became_of_the_old(
    slow_host: Host, slow: type[SlowLoad], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Memory | None] = []

    def estimate(spec: LoadSpec, instead_of: Memory | None = None, seen: object = None, forecast: bool = True) -> Any:
        if forecast:  # not for the budget that Auto takes
            asked.append(instead_of)
        return replace(fake_estimate(spec), problem="" if instead_of else "Only 2 GB are free.")

    monkeypatch.setitem(sys.modules, "core.capacity.fit", SimpleNamespace(estimate=estimate))
    slow_host.loader._estimate = None  # core's own, which knows what unloading gives back
    slow.failure = ModelError("The file is cut short.")
    slow.go.set()
    loading = slow_host.loader.load(slow_host.loader.plan("new"))
    assert loading.join(WAIT_S)
    assert "old had been unloaded to make room" in loading.error
    assert (slow_host.models.model, slow.alive) == (None, set())
    assert asked[0] is None
    assert asked[1] is not None
    slow.failure = None
    assert slow_host.loader.load(slow_host.loader.plan("new")).join(WAIT_S)
    assert slow_host.loader.loading.error == "Only 2 GB are free."  # nothing is loaded that would give memory back


def test_loading_and_unloading_wait_for_answers(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chats.ask(None, "one")
    with pytest.raises(BusyError, match="An answer is being written"):
        gated_host.loader.load(gated_host.loader.plan("demo"))
    with pytest.raises(BusyError, match="An answer is being written"):
        gated_host.models.unload()
    gated.gate.release(100)
    ended(answer)
    gated_host.models.unload()
    assert (
        gated_host.models.model,
        gated_host.models.frame(),
        gated_host.models.memory(),
        gated_host.models.shape,
    ) == (None, None, None, None)
    gated_host.models.unload()  # nothing left to unload
    assert gated_host.models.change("budget", "75%") == ""
    assert gated_host.models.settings["budget"] == "75%"


def test_what_an_unloaded_engine_held_is_freed_at_once(tmp_path: Path) -> None:
    class Knotted(QuickEngine):
        """Its parts refer to each other, as the real one's do, so that counting references does not free it."""

        alive: ClassVar[list[weakref.ref[FakeEngine]]] = []

        def __init__(self, spec: LoadSpec) -> None:
            super().__init__(spec)
            self.itself = self
            self.alive.append(weakref.ref(self))

    with closing(open_host(tmp_path, Knotted)) as host:
        host.models.unload()
        assert [engine() for engine in Knotted.alive] == [None]
