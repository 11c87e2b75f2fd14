"""Benches beside other programs: their answers beside ours, and what comes of one that ends."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.process import Session
from bench.harness.run import Result
from bench.models import peers as programs
from bench.speed import peer_worker, peers
from core.errors import MoestroError

THREADS = 3  # of torch before anything is loaded


@pytest.mark.long(0.2)  # below, a program that fails and what is timed; tests/bench/test_paired.py has the intervals
@pytest.mark.usefixtures("other_programs")
def test_each_round_has_every_system_and_ratios_have_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS)
    jobs: list[dict[str, Any]] = []

    def seen(module: str, job: dict[str, Any], python: str) -> Session:
        jobs.append(job)
        return Session(module, job, python)

    monkeypatch.setattr(programs, "Session", seen)
    monkeypatch.setattr(programs, "CONFIGURATIONS", [(False, True), (True, False), (True, True)])
    found: Result = peers.SUITE.run(
        small=True,
        keep=tmp_path,
        formats="int4",
        lengths="16",
        rounds=3,
        peers="ik",
        coded="int4-g64,iq4_nl",
        arithmetics="fast",
    )
    assert {job["threads"] for job in jobs} == {THREADS} and {job["peer"] for job in jobs} == {"ik"}
    assert len(jobs) == 1 + len(programs.CONFIGURATIONS) + 1, "for its quality, to try, to measure"
    speeds = found["found"]["int4"]["speeds"]
    assert speeds.keys() == {"fast", "fast iq4_nl", "ik"}
    assert speeds["ik"]["16"]["decode"] == pytest.approx([1e4] * 3)
    about = found["found"]["int4"]["about"]
    assert 4 < about["fast"]["bits"] < 8 and about["fast"]["kl"] < 1 < about["ik"]["kl"]
    assert about["fast iq4_nl"]["file"] == "iq4_nl"
    assert (about["ik"]["repack"], about["ik"]["flash"]) == (True, True)
    ratio = found["ratios"]["int4 decode 16 fast/ik"]
    assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
    [decode] = [one for one in found["goals"] if one["goal"].startswith("int4 decode, fast over ik")]
    assert decode["found"] == ratio["ratio"]
    assert [line for line in peers.table(found) if line.split()[:2] == ["ik_llama.cpp", "Q4_0"]]


class Program:
    """Counts seconds by the positions that it computes."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    def forget(self) -> None:
        self.fed.clear()

    def feed(self, ids: list[int]) -> float:
        self.fed.append(ids)
        return float(len(ids))


def test_given_tokens_follow_the_prompt_one_at_a_time_until_the_cap() -> None:
    program = Program()
    found = peer_worker.timed(program, [1, 2, 3], [4, 5])
    assert program.fed == [[1, 2, 3], [4], [5]] and (found["prompt_s"], found["token_s"]) == (3.0, [1.0, 1.0])
    assert peer_worker.timed(program, [1], [4, 5], cap_s=1e-9)["token_s"] == [1.0]
    assert peer_worker.timed(program, [1], [])["token_s"] == []


def test_a_program_that_ends_is_an_error_with_its_last_words() -> None:
    with pytest.raises(MoestroError, match="KeyError: 'nothing'"):
        Session(programs.WORKER, {"peer": "nothing"})


@pytest.mark.usefixtures("other_programs")
def test_one_that_runs_in_no_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "CONFIGURATIONS", [(True, False)])
    said: list[str] = []
    with pytest.raises(MoestroError, match=r"Q4_0 runs in no configuration here.*--peers llama"):
        programs.Peer("ik", "Q4_0", tmp_path, Path(sys.executable), 1).fastest(said.append)
    assert "only with flash attention" in said[-1]


@pytest.mark.parametrize(("choice", "names"), [("all", ["ik", "llama"]), ("ik", ["ik"]), ("none", []), ("", [])])
def test_nothing_is_installed_unless_it_was_agreed_to(
    choice: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # nobody can answer
    assert programs.agreed(choice, programs.interpreter(tmp_path)) == names


def test_what_is_installed_is_used_unless_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "installed", lambda python: True)
    assert programs.agreed("", Path("python")) == ["ik", "llama"] and programs.agreed("none", Path("python")) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"formats": "int5"}, "no format int5"), ({"lengths": "many"}, "many is not a whole"), ({"lengths": "0"}, "0 is")],
)
def test_an_unknown_choice_is_refused(options: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=reason):
        peers.SUITE.run(small=True, keep=tmp_path, **options)
