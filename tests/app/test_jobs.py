"""The runner of long jobs: who excludes whom, what a job's end says, and that closing ends them all."""

import threading
from collections.abc import Callable, Iterator

import pytest

from app.services.jobs import Job, JobRunner, ModelJob
from core.errors import BusyError, MoestroError
from tests.app.conftest import WAIT_S


class Plain(Job):
    name, done, undone, unexpected = "plain", "Made", "Not made", "It broke off."

    def __init__(self) -> None:
        super().__init__("Beginning", "a thing")

    @property
    def already(self) -> str:
        return f"One of {type(self).__name__} is running."


class Other(Plain):
    pass


class Alone(ModelJob):
    name, done, undone, unexpected, doing, tab = "plain", "Made", "Not made", "It broke off.", "squared", "Squares"

    def __init__(self) -> None:
        super().__init__("Beginning", "a model")


class AlsoAlone(Alone):
    pass


@pytest.fixture
def runner() -> Iterator[JobRunner]:
    runner = JobRunner()
    yield runner
    runner.close()


def waiting(job: Job) -> Callable[[], None]:
    def work() -> None:
        assert job.cancelled.wait(WAIT_S)
        raise MoestroError("Cancelled.")

    return work


def test_one_of_a_kind_and_one_with_the_model_to_itself(runner: JobRunner) -> None:
    plain, alone = Plain(), Alone()
    assert runner.start(plain, waiting(plain)) is plain
    with pytest.raises(BusyError, match="One of Plain is running"):
        runner.start(Plain(), lambda: None)
    assert runner.exclusive is None
    runner.start(alone, waiting(alone))
    assert runner.exclusive is alone
    with pytest.raises(BusyError, match="The model is being squared already"):
        runner.start(AlsoAlone(), lambda: None)
    assert runner.last(AlsoAlone) is None, "what was refused leaves nothing"
    assert runner.start(Other(), lambda: None).join(WAIT_S), "what needs no model runs beside them"
    runner.cancel(Alone)
    assert alone.join(WAIT_S)
    assert (runner.exclusive, runner.running(Alone), runner.last(Alone)) == (None, None, alone)
    assert runner.start(AlsoAlone(), lambda: None).join(WAIT_S)
    assert not plain.finished, "only the one asked for is cancelled"


@pytest.mark.parametrize(
    ("raised", "cancelled", "end"),
    [
        (None, False, ("done", "Made", "", 1.0)),
        (None, True, ("done", "Made", "", 1.0)),  # the wish to cancel came too late
        (MoestroError("No luck."), False, ("error", "Not made", "No luck.", 0.25)),
        (ValueError("secret"), False, ("error", "Not made", "It broke off.", 0.25)),
        (MoestroError("Cancelled."), True, ("cancelled", "Cancelled", "", 0.25)),
    ],
)
def test_the_end_is_remembered(
    runner: JobRunner, raised: Exception | None, cancelled: bool, end: tuple[str, str, str, float]
) -> None:
    job = Plain()

    def work() -> None:
        job.progress("Quarter", 0.25)
        if cancelled:
            runner.cancel(Plain)
        if raised is not None:
            raise raised

    assert runner.start(job, work).join(WAIT_S)
    last = runner.last(Plain)
    assert last is job
    assert (job.state, job.text, job.error, job.share) == end


def test_closing_ends_all_and_lets_none_start(runner: JobRunner) -> None:
    jobs: list[Job] = [Plain(), Alone()]
    for job in jobs:
        runner.start(job, waiting(job))
    runner.close()
    assert [job.state for job in jobs] == ["cancelled", "cancelled"]
    assert not any(thread.name == "moestro-plain" for thread in threading.enumerate())
    with pytest.raises(BusyError, match="closing"):
        runner.start(Other(), lambda: None)


def test_a_job_of_an_earlier_start_is_the_last_of_its_kind(runner: JobRunner) -> None:
    job = Plain()
    job.state = "cancelled"
    runner.recall(job)
    assert runner.last(Plain) is job
    assert runner.start(Plain(), lambda: None) is not job
