"""Importing: one at a time, told as it goes, stopped and gone on with, and what failed says why."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.services.host import Host
from app.services.importer import ImportJob
from app.ui.sidebar import ModelSection
from app.ui.tabs.library import LibraryTab
from core.errors import BusyError, ModelError, MoestroError
from core.memory.pack.lock import Lock
from tests.app.conftest import WAIT_S, ended, open_host, page
from tests.checkpoints import make_checkpoint
from tests.fake_models import fake_import
from tests.logged import Logged

MB = 10**6


class Steered:
    """The fake import, which stands still at half until the test lets it go on."""

    def __init__(self) -> None:
        self.halfway, self.go, self.starts = threading.Event(), threading.Event(), list[int]()

    def __call__(self, *args: Any, progress: Callable[..., None], cancel: threading.Event, **options: Any) -> Path:
        first = True

        def steered(text: str, share: float, done: int, total: int) -> None:
            nonlocal first
            if first:
                self.starts.append(done)
                first = False
            progress(text, share, done, total)
            if share == 0.5:
                self.halfway.set()
                while not (self.go.is_set() or cancel.is_set()):
                    self.go.wait(0.01)

        return fake_import(*args, progress=steered, cancel=cancel, **options)


@pytest.fixture
def steered() -> Steered:
    return Steered()


@pytest.fixture
def host(tmp_path: Path, steered: Steered) -> Iterator[Host]:
    yield open_host(tmp_path / "home", importing=steered)
    steered.go.set()


def test_an_import_is_told_as_it_goes_while_chatting_goes_on(host: Host, steered: Steered) -> None:
    job = host.importer.start("models/Qwen3-Tiny", "int8")
    assert steered.halfway.wait(WAIT_S)
    assert (job.state, job.text, job.share, job.bytes_done, job.bytes_total) == (
        "running",
        "Layer 3 of 4",
        0.5,
        20 * MB,
        40 * MB,
    )
    assert ended(host.chats.ask(None, "hello")).error == ""
    with pytest.raises(BusyError, match="is being imported"):
        host.importer.start("another")
    steered.go.set()
    assert ended(job).state == "done"
    assert (job.out, job.share, job.error) == (host.library.packs / "Qwen3-Tiny-int8", 1.0, "")
    [entry] = host.library.refresh()
    assert (entry.name, entry.format, entry.problem) == ("Qwen3-Tiny-int8", "int8", "")
    assert host.loader.load(host.loader.plan(entry.path)).join(WAIT_S)
    assert host.models.model == entry.path


def test_a_cancelled_import_is_gone_on_with(host: Host, steered: Steered) -> None:
    job = host.importer.start("models/Qwen3-Tiny")
    assert steered.halfway.wait(WAIT_S)
    with pytest.raises(MoestroError, match="in use"):
        host.delete_model(host.library.refresh()[0].path)
    host.importer.cancel()
    assert ended(job).state == "cancelled"
    assert (job.error, job.can_resume, job.finished) == ("", True, True)
    [left] = host.library.refresh()
    assert left.problem.startswith("The import is not finished")
    steered.go.set()
    assert ended(host.importer.resume()).state == "done"
    assert steered.starts == [0, 20 * MB], "it began anew"
    assert [(e.name, e.problem) for e in host.library.refresh()] == [("Qwen3-Tiny-int4-g64", "")]
    with pytest.raises(MoestroError, match="no stopped import"):
        host.importer.resume()


def test_what_was_left_of_an_import_can_be_deleted(host: Host, steered: Steered) -> None:
    job = host.importer.start("models/Qwen3-Tiny")
    assert steered.halfway.wait(WAIT_S)
    host.importer.cancel()
    ended(job)
    [left] = host.library.refresh()
    host.delete_model(left.path)
    assert not job.can_resume
    assert host.library.entries() == []


def test_what_cannot_be_imported_is_told(host: Host, tmp_path: Path, caplog: Logged) -> None:
    with pytest.raises(MoestroError, match="Say what to import"):
        host.importer.start("  ")
    with pytest.raises(MoestroError, match="no format"):
        host.importer.start("model", "int5")
    with pytest.raises(MoestroError, match="exists already"):
        host.importer.start("model", out=str(tmp_path))
    job = ended(host.importer.start("broken-model"))
    assert (job.state, job.can_resume) == ("error", False)
    assert "no config.json" in job.error

    def fails(*args: Any, **options: Any) -> Path:
        raise RuntimeError("tensor of shape [3]")

    host.importer._work = fails
    job = ended(host.importer.start("model"))
    assert job.state == "error"
    assert "error inside Moestro" in job.error
    assert "shape [3]" in caplog.text


def test_closing_stops_an_import_and_the_next_start_goes_on_with_it(tmp_path: Path, steered: Steered) -> None:
    host = open_host(tmp_path, loaded=False, importing=steered)
    job = host.importer.start("models/Qwen3-Tiny")
    assert steered.halfway.wait(WAIT_S)
    host.close()
    assert (job.state, job.can_resume) == ("cancelled", True)
    host = open_host(tmp_path, loaded=False, importing=steered)  # the next start offers to go on
    assert (host.importer.job.source, host.importer.job.finished) == ("models/Qwen3-Tiny", True)
    steered.go.set()
    assert ended(host.importer.resume()).state == "done"
    assert steered.starts == [0, 20 * MB]
    host.close()
    assert open_host(tmp_path, loaded=False, importing=steered).importer.job is None


def test_speed_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("app.services.importer.time.monotonic", lambda: now)
    job = ImportJob("model", None, "auto", False)
    for done in range(0, 50, 5):  # 5 MB a second
        job.progress("Downloading", done / 100, done * MB, 100 * MB)
        now += 1
    assert job.bytes_s == pytest.approx(5 * MB)
    assert job.left_s == pytest.approx(11)
    job.progress("Layer 1", 0.0, 0, 400 * MB)  # counted anew: the old speed says nothing of it
    now += 2
    job.progress("Layer 1", 0.1, 40 * MB, 400 * MB)
    assert (job.bytes_s, job.left_s) == pytest.approx((20 * MB, 18))


def test_every_tab_is_told_of_it(host: Host, steered: Steered) -> None:
    client = TestClient(build_app(host), base_url="http://127.0.0.1:7860")
    before = client.get("/live/state").json()
    assert before["import"] is None
    job = host.importer.start("models/Qwen3-Tiny")
    assert steered.halfway.wait(WAIT_S)
    now = client.get("/live/state").json()
    assert {n: now["import"][n] for n in ("state", "name", "share", "done", "total", "resume")} == {
        "state": "running",
        "name": "Qwen3-Tiny",
        "share": 0.5,
        "done": 20 * MB,
        "total": 40 * MB,
        "resume": False,
    }
    host.importer.cancel()
    ended(job)
    after = client.get("/live/state").json()
    assert (after["import"]["state"], after["import"]["resume"]) == ("cancelled", True)
    assert len({state["host"]["library"] for state in (before, now, after)}) == 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"out": "a\0b"}, "NUL"),
        ({"out": "x" * 5000}, "output folder"),
        ({"out": "~there is no such user/x"}, "is not the home folder"),
    ],
)
def test_a_folder_that_cannot_be_is_refused(host: Host, given: dict[str, Any], told: str) -> None:
    with pytest.raises(MoestroError, match=told):
        host.importer.start(**{"source": "models/Qwen3-Tiny", **given})
    assert host.importer.job is None


def test_size_and_loss_stand_in_the_form_before_an_import_starts(host: Host, tmp_path: Path) -> None:
    with page():
        tab = LibraryTab(host, ModelSection(host, gr.HTML({})), gr.Tabs())
    source = make_checkpoint("mixtral", tmp_path / "a <model>", num_hidden_layers=1)
    said = tab._forecast(f" {source} ", "int4-g32")
    assert "The pack takes " in said and "float32, all of the experts&#x27; weights: quantised, off by " in said
    assert tab._forecast(str(source), "int8") != said and tab._forecast(str(source), "int4-g32") == said
    assert tab._take({**tab.list.value, "chosen": str(source)}, "int4-g32") == [str(source), said]
    (source / "config.json").write_text("{}")
    assert "names no model_type" in tab._forecast(str(source), "int4-g32")
    for source_text, format in ((None, "auto"), ("", None), ("models/none", "auto"), ("a\0", "auto"), ("x" * 5000, "")):
        assert tab._forecast(source_text, format) == ""


def test_an_import_takes_away_the_locks_of_killed_ones(host: Host, steered: Steered) -> None:
    packs = host.library.packs
    packs.mkdir(parents=True, exist_ok=True)
    (packs / "killed-bf16.lock").write_bytes(b"")
    (packs / "numbered-bf16.lock").write_bytes(b"12345\n")
    (packs / "other.lock").write_bytes(b"not Moestro's")
    held = Lock(packs / "held-bf16.lock", "{}")
    steered.go.set()
    assert ended(host.importer.start("models/Qwen3-Tiny")).state == "done"
    assert sorted(file.name for file in packs.glob("*.lock")) == ["held-bf16.lock", "other.lock"]
    with pytest.raises(ModelError):
        Lock(packs / "held-bf16.lock", "{}")
    held.release()
