"""A batch from the dashboard: it has the model to itself, goes on where it was stopped, and shows what a pass needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.live_state import jobs_state
from app.server.v1.batch import ByEngine
from app.services.batcher import BatchForm, BatchJob
from app.services.host import Host
from app.store import Store
from app.ui.tabs import batch_views
from core.errors import BusyError, MoestroError
from tests.app.conftest import WAIT_S, GatedEngine, QuickEngine
from tests.fake_models import fake_estimate

PIECES = 5  # of an answer


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    yield from _host(tmp_path, QuickEngine)


@pytest.fixture
def gate() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def gated(tmp_path: Path, gate: threading.Semaphore) -> Iterator[Host]:
    """A piece of an answer, its prompt or one of 4 tokens, is made for each release of `gate`."""
    yield from _host(tmp_path, type("Gated", (GatedEngine,), {"gate": gate}))


def _host(folder: Path, engine: type[QuickEngine]) -> Iterator[Host]:
    host = Host(Store(folder / "data"), engine, fake_estimate)
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    host.chats.set_sampling(max_new_tokens=4)
    yield host
    host.close()


def prompts(folder: Path, count: int, more: str = "") -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "say {n}", "id": "{n}"}}\n' for n in range(count)) + more, "utf-8")
    return file


def answers(file: Path) -> dict[str, dict[str, object]]:
    return {one["id"]: one for one in map(json.loads, file.read_text("utf-8").splitlines())}


def over(job: BatchJob) -> BatchJob:
    assert job.join(WAIT_S), f"still {job.state}"
    return job


def test_every_line_is_answered_and_can_be_downloaded(host: Host, tmp_path: Path) -> None:
    client = TestClient(build_app(host), base_url="http://localhost")
    assert client.get("/export/batch.jsonl").status_code == 404
    stamp, file = jobs_state(host)["batch"]["stamp"], prompts(tmp_path, 20, "no json\n")
    job = over(host.batcher.start(BatchForm(str(file), at_once=3, scheduler="similarity"), ByEngine))
    assert (job.state, job.error, job.share) == ("done", "", 1.0)
    found = answers(tmp_path / "prompts.answers.jsonl")
    assert len(found) == 21 and sum("error" in one for one in found.values()) == 1
    assert client.get("/export/batch.jsonl").text.count("\n") == 21
    assert jobs_state(host)["batch"]["stamp"] != stamp and not host.busy
    shown = batch_views.cards(job)
    assert "21 of 21" in shown and "1 with an error" in shown and "12.0 → 9.5" in shown
    figures = job.figures
    assert figures.union is not None and 0 < figures.union <= figures.shape.experts
    assert figures.hit_rate is not None and 0 < figures.hit_rate < 1
    assert "<td class='name'>19</td>" in batch_views.latest(job)
    assert batch_views.plot(job, True) is not None


def test_the_model_is_its_own_and_stopping_keeps_what_is_whole(
    gated: Host, gate: threading.Semaphore, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    form = BatchForm(str(prompts(tmp_path, 6)), out=str(out), at_once=2)
    job = gated.batcher.start(form, ByEngine)
    gate.release(2 * PIECES)
    while job.answered is None or job.answered.done < 2:
        assert job.wait(job.version, WAIT_S)
    with pytest.raises(BusyError, match=r"being used for a batch .*tab Batch"):
        gated.chats.ask(None, "Hi")
    with pytest.raises(BusyError, match="used for a batch already"):
        gated.jobs.start(BatchJob(gated.models.loaded, out), lambda: None)  # type: ignore[arg-type]
    assert gated.models.change_many({"eviction": "lfu"}) == "", "settings may be turned"
    gated.batcher.stop()
    assert not job.finished, "what is being written ends"
    gated.batcher.stop()
    assert over(job).state == "cancelled"
    assert len(answers(out)) == 2, "nothing half is written"
    again = gated.batcher.start(form, ByEngine)
    gate.release(4 * PIECES)
    assert over(again).state == "done" and len(answers(out)) == 6
    assert again.answered is not None and again.answered.before == 2


def test_drained_it_ends_with_what_was_begun(gated: Host, gate: threading.Semaphore, tmp_path: Path) -> None:
    job = gated.batcher.start(BatchForm(str(prompts(tmp_path, 5)), at_once=2), ByEngine)
    gate.release(4)
    while job.answered is None or not job.answered.tokens:
        assert job.wait(job.version, WAIT_S)
    gated.batcher.stop()
    gate.release(2 * PIECES)
    assert over(job).state == "cancelled"
    assert sorted(answers(tmp_path / "prompts.answers.jsonl")) == ["0", "1"]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (BatchForm(""), "Name the file of prompts"),
        (BatchForm("/nowhere/x.jsonl"), "There is no file"),
        (BatchForm("here", at_once=0), "from 1 to 256"),
    ],
)
def test_what_is_wrong_at_once_is_said_at_once(host: Host, form: BatchForm, said: str) -> None:
    with pytest.raises(MoestroError, match=said):
        host.batcher.start(form, ByEngine)
    assert host.batcher.job is None


def test_an_empty_file_and_a_folder_that_is_not_there(host: Host, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "holds no prompt" in over(host.batcher.start(BatchForm(str(empty)), ByEngine)).error
    form = BatchForm(str(prompts(tmp_path, 1)), out=str(tmp_path / "not" / "there.jsonl"))
    assert "there is no folder" in over(host.batcher.start(form, ByEngine)).error


def test_an_uploaded_file_is_answered_in_the_data_folder(host: Host, tmp_path: Path) -> None:
    """Uploads are deleted at the next start; the same file goes on, another one of its name begins anew."""
    first = over(host.batcher.start(BatchForm("", upload=str(prompts(tmp_path, 3))), ByEngine))
    assert first.out.parent == host.store.folder / "batches" and len(answers(first.out)) == 3
    again = over(host.batcher.start(BatchForm("", upload=str(prompts(tmp_path, 3))), ByEngine))
    assert again.out == first.out and again.answered is not None and again.answered.before == 3
    other = over(host.batcher.start(BatchForm("", upload=str(prompts(tmp_path, 2))), ByEngine))
    assert other.out != first.out and len(answers(other.out)) == 2
