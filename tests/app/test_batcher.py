"""A batch from the dashboard: it has the model to itself, goes on where it was stopped, and shows what a pass needs."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.live_state import jobs_state
from app.server.v1.batch import ByEngine
from app.services.batch.answers_file import AnswersFile
from app.services.batcher import BatchForm, BatchJob
from app.services.host import Host
from app.ui.tabs import batch_views
from core.errors import BusyError, MoestroError
from tests.app.conftest import WAIT_S, GatedEngine, ended, open_host
from tests.selection import layered

PIECES = 5  # of an answer
SECRET = "the private key of somebody"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return open_host(tmp_path / "data", tokens=4)


@pytest.fixture
def gate() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def gated(tmp_path: Path, gate: threading.Semaphore) -> Host:
    return open_host(tmp_path / "data", type("Gated", (GatedEngine,), {"gate": gate}), tokens=4)


def prompts(folder: Path, count: int, more: str = "") -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "say {n}", "id": "{n}"}}\n' for n in range(count)) + more, "utf-8")
    return file


def answers(file: Path) -> dict[str, dict[str, object]]:
    return {one["id"]: one for one in map(json.loads, file.read_text("utf-8").splitlines())}


def place(job: BatchJob) -> Path:
    return job.answers.path


def download(host: Host) -> Any:
    return TestClient(build_app(host), base_url="http://localhost").get("/export/batch.jsonl")


def test_every_line_is_answered_and_can_be_downloaded(host: Host, tmp_path: Path) -> None:
    assert download(host).status_code == 404
    stamp, file = jobs_state(host)["batch"]["stamp"], prompts(tmp_path, 20, "no json\n")
    job = ended(host.batcher.start(BatchForm(str(file), at_once=3, scheduler="similarity"), ByEngine))
    assert (job.state, job.error, job.share) == ("done", "", 1.0)
    found = answers(place(job))
    assert len(found) == 21 and sum("error" in one for one in found.values()) == 1
    assert {*tmp_path.iterdir()} == {file, host.store.folder}, "nothing is written beside the prompts"
    reply = download(host)
    assert reply.content == place(job).read_bytes() and reply.headers["content-length"] == str(len(reply.content))
    assert reply.headers["content-disposition"] == f'attachment; filename="{place(job).name}"'
    assert jobs_state(host)["batch"]["stamp"] != stamp and not host.busy
    shown = batch_views.cards(job)
    assert "21 of 21" in shown and "1 with an error" in shown and "12.0 → 9.5" in shown
    figures = job.figures
    assert figures.union is not None and 0 < figures.union <= figures.shape.experts
    assert figures.hit_rate is not None and 0 < figures.hit_rate < 1
    assert "<td class='name'>19</td>" in batch_views.latest(job)
    assert batch_views.plot(job, True) is not None


def test_stopping_keeps_what_is_whole(gated: Host, gate: threading.Semaphore, tmp_path: Path) -> None:
    form = BatchForm(str(prompts(tmp_path, 6)), at_once=2)
    job = gated.batcher.start(form, ByEngine)
    gate.release(2 * PIECES)
    while job.answered is None or job.answered.done < 2:
        assert job.wait(job.version, WAIT_S)
    with pytest.raises(BusyError, match=r"being used for a batch .*tab Batch"):
        gated.chats.ask(None, "Hi")
    with pytest.raises(BusyError, match="used for a batch already"):
        gated.jobs.start(BatchJob(gated.models.loaded), lambda: None)  # type: ignore[arg-type]
    assert gated.models.change_many({"eviction": "lfu"}) == "", "settings may be turned"
    gated.batcher.stop()
    assert not job.finished, "what is being written ends"
    gated.batcher.stop()
    assert ended(job).state == "cancelled"
    assert len(answers(place(job))) == 2, "nothing half is written"
    again = gated.batcher.start(form, ByEngine)
    gate.release(4 * PIECES)
    assert ended(again).state == "done" and len(answers(place(again))) == 6
    assert again.answered is not None and again.answered.before == 2


def test_drained_it_ends_with_what_was_begun(gated: Host, gate: threading.Semaphore, tmp_path: Path) -> None:
    job = gated.batcher.start(BatchForm(str(prompts(tmp_path, 5)), at_once=2), ByEngine)
    gate.release(4)
    while job.answered is None or not job.answered.tokens:
        assert job.wait(job.version, WAIT_S)
    gated.batcher.stop()
    gate.release(2 * PIECES)
    assert ended(job).state == "cancelled"
    assert sorted(answers(place(job))) == ["0", "1"]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (BatchForm(), "Drop a file of prompts"),
        (BatchForm("/nowhere/x.jsonl"), "x.jsonl is not there any more"),
        (BatchForm("."), "is not there any more"),
        (BatchForm("here", at_once=0), "from 1 to 256"),
    ],
)
def test_what_is_wrong_at_once_is_said_at_once(host: Host, form: BatchForm, said: str) -> None:
    with pytest.raises(MoestroError, match=said):
        host.batcher.start(form, ByEngine)
    assert host.batcher.job is None


def test_an_empty_file_has_no_answers_to_download(host: Host, tmp_path: Path) -> None:
    job = ended(host.batcher.start(BatchForm(str(prompts(tmp_path, 0))), ByEngine))
    assert "holds no prompt" in job.error and job.answers is None
    assert download(host).status_code == 404


def test_the_same_file_continues_and_another_one_of_its_name_begins_anew(host: Host, tmp_path: Path) -> None:
    first = ended(host.batcher.start(BatchForm(str(prompts(tmp_path, 3))), ByEngine))
    assert place(first).parent == host.store.folder / "batches" and len(answers(place(first))) == 3
    again = ended(host.batcher.start(BatchForm(str(prompts(tmp_path, 3))), ByEngine))
    assert place(again) == place(first) and again.answered is not None and again.answered.before == 3
    other = ended(host.batcher.start(BatchForm(str(prompts(tmp_path, 2))), ByEngine))
    assert place(other) != place(first) and len(answers(place(other))) == 2


def test_a_file_that_another_run_writes_or_that_is_not_a_batchs_is_not_served(host: Host, tmp_path: Path) -> None:
    file = prompts(tmp_path, 2)
    out = place(ended(host.batcher.start(BatchForm(str(file)), ByEngine)))
    elsewhere = AnswersFile(out)
    job = ended(host.batcher.start(BatchForm(str(file)), ByEngine))
    assert "Another run is writing" in job.error and download(host).status_code == 404
    elsewhere.close()
    out.write_text(SECRET, "utf-8")
    job = ended(host.batcher.start(BatchForm(str(file)), ByEngine))
    assert "is not the answer of a batch" in job.error and out.read_text("utf-8") == SECRET
    assert download(host).status_code == 404


SWAPS: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda out, secret: None,
    "another file": lambda out, secret: secret.replace(out),
}
POSIX_SWAPS: dict[str, Callable[[Path, Path], object]] = {  # Windows has none, or needs a right
    "link": lambda out, secret: out.symlink_to(secret),
    "hard link": lambda out, secret: os.link(secret, out),
    "pipe": lambda out, secret: os.mkfifo(out),
    "folder": lambda out, secret: out.mkdir(),
    "loop": lambda out, secret: out.symlink_to(out),
    "device": lambda out, secret: out.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "swap",
    layered(
        SWAPS | (POSIX_SWAPS if os.name == "posix" else {}),
        quick=lambda swap: swap in (next(iter(SWAPS)), next(iter(POSIX_SWAPS))),
    ),
)
def test_what_took_the_place_of_the_answers_is_not_served(host: Host, tmp_path: Path, swap: str) -> None:
    job = ended(host.batcher.start(BatchForm(str(prompts(tmp_path, 2))), ByEngine))
    assert download(host).status_code == 200
    secret = tmp_path / "secret"
    secret.write_text(SECRET, "utf-8")
    place(job).unlink()
    (SWAPS | POSIX_SWAPS)[swap](place(job), secret)
    reply = download(host)
    assert reply.status_code == 404 and SECRET not in reply.text and place(job).name in reply.text


def test_answers_are_downloaded_while_they_are_written(gated: Host, gate: threading.Semaphore, tmp_path: Path) -> None:
    job = gated.batcher.start(BatchForm(str(prompts(tmp_path, 4)), at_once=2), ByEngine)
    gate.release(2 * PIECES)
    while job.answered is None or job.answered.done < 2:
        assert job.wait(job.version, WAIT_S)
    reply = download(gated)
    if os.name == "posix":
        assert reply.status_code == 200 and reply.content.count(b"\n") == 2
    else:
        assert reply.status_code == 404 and "Try again later" in reply.text
    gated.batcher.stop()
    gated.batcher.stop()
    assert ended(job).state == "cancelled"
    assert download(gated).content.count(b"\n") == 2
