"""The real command: killed and started again, interrupted, and asked what cannot be."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.batch.test_files import ids

ROOT = Path(__file__).parents[2]
QUESTIONS = [
    json.loads(line)["question"]
    for line in (ROOT / "assets" / "demo" / "questions.jsonl").read_text("utf-8").splitlines()
]
PATIENCE_S = 300.0


def command(folder: Path, *more: str, out: str = "out") -> list[str]:
    files = ["--in", str(folder / "in"), "--out", str(folder / out)]
    return [sys.executable, str(ROOT / "launch.py"), "batch", *files, "--budget", "50%", "--at-once", "6", *more]


def prompts(folder: Path, count: int) -> None:
    lines = [{"prompt": QUESTIONS[n % len(QUESTIONS)], "id": n, "max_tokens": 4 + n % 20} for n in range(count)]
    (folder / "in").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def texts(file: Path) -> dict[str, Any]:
    return {one["id"]: one["text"] for one in map(json.loads, file.read_text("utf-8").splitlines())}


def begun(folder: Path, lines: int) -> subprocess.Popen[str]:
    """The command, once it has written so many lines in all, or ended."""
    process = subprocess.Popen(command(folder), stderr=subprocess.PIPE, text=True, cwd=ROOT)
    began_s = time.monotonic()
    while process.poll() is None and len(_lines(folder)) < lines:
        assert time.monotonic() - began_s < PATIENCE_S
        time.sleep(0.002)
    return process


def _lines(folder: Path) -> list[bytes]:
    return (folder / "out").read_bytes().splitlines() if (folder / "out").exists() else []


@pytest.mark.parametrize(
    ("count", "kills"), [(24, 1), pytest.param(200, 10, marks=[pytest.mark.long(2), pytest.mark.timeout(1200)])]
)
def test_killed_and_started_again_every_line_has_one_answer(tmp_path: Path, count: int, kills: int) -> None:
    prompts(tmp_path, count)
    whole = subprocess.run(command(tmp_path, out="whole"), capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert whole.returncode == 0, whole.stderr
    draw, killed = random.Random(1), 0
    for kill in range(kills):
        process = begun(tmp_path, draw.randint(len(_lines(tmp_path)), count * (kill + 1) // (kills + 1)) + 1)
        killed += process.poll() is None
        process.kill()
        process.communicate()
    last = subprocess.run(command(tmp_path), capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert last.returncode == 0, last.stderr
    assert sorted(ids(tmp_path / "out")) == sorted(map(str, range(count))) and killed == kills
    assert texts(tmp_path / "out") == texts(tmp_path / "whole")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to another process there")
def test_an_interruption_ends_with_whole_answers(tmp_path: Path) -> None:
    prompts(tmp_path, 60)
    process = begun(tmp_path, 2)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "The same command goes on" in said and "Traceback" not in said
    kept = ids(tmp_path / "out")
    assert 2 <= len(kept) < 60 and len(kept) == len({*kept})


@pytest.mark.parametrize(
    ("more", "said"),
    [(("--at-once", "0"), "from 1 to 256"), (("--budget", "x"), "budget"), (("--in", "nowhere"), "cannot be read")],
)
def test_what_cannot_be_is_said_at_once(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    prompts(tmp_path, 1)
    done = subprocess.run(command(tmp_path, *more), capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode not in (0, None) and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
