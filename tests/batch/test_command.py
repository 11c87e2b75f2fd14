"""The real command: killed and started again, interrupted, and asked what cannot be."""

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

from app.cli import main
from tests.architectures.trial import random_model, save
from tests.batch.test_files import ids
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer

ROOT = Path(__file__).parents[2]
QUESTIONS = [
    json.loads(line)["question"]
    for line in (ROOT / "assets" / "demo" / "questions.jsonl").read_text("utf-8").splitlines()
]
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a model that is loaded in no time."""
    return str(save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny"))))


def words(folder: Path, *more: str, out: str = "out") -> list[str]:
    files = ["--in", str(folder / "in"), "--out", str(folder / out)]
    return ["batch", *files, "--budget", "50%", "--at-once", "6", *more]


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch.py"), *words(folder, *more)]


def prompts(folder: Path, count: int) -> None:
    lines = [{"prompt": QUESTIONS[n % len(QUESTIONS)], "id": n, "max_tokens": 4 + n % 20} for n in range(count)]
    (folder / "in").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def texts(file: Path) -> dict[str, Any]:
    return {one["id"]: one["text"] for one in map(json.loads, file.read_text("utf-8").splitlines())}


def begun(folder: Path, lines: int, *more: str) -> subprocess.Popen[str]:
    """The command, once it has written so many lines in all, or ended."""
    process = subprocess.Popen(command(folder, *more), stderr=subprocess.PIPE, text=True, cwd=ROOT)
    began_s = time.monotonic()
    while process.poll() is None and len(_lines(folder)) < lines:
        assert time.monotonic() - began_s < PATIENCE_S
        time.sleep(0.002)
    return process


def _lines(folder: Path) -> list[bytes]:
    return (folder / "out").read_bytes().splitlines() if (folder / "out").exists() else []


def goes_on(folder: Path, count: int, *more: str) -> None:
    """The command, started again in this process, answers what is left: a line for each, with the texts of a run that
    nothing stopped."""
    for out in ("out", "whole"):
        assert main(words(folder, *more, out=out)) == 0
    assert sorted(ids(folder / "out")) == sorted(map(str, range(count)))
    assert texts(folder / "out") == texts(folder / "whole")


WINDOWS = sys.platform == "win32"  # where SIGINT cannot be sent to another process


@pytest.mark.long(0.3)
@pytest.mark.parametrize("killed", [False, True])
def test_whatever_stopped_it_every_line_has_one_answer(tmp_path: Path, tiny: str, killed: bool) -> None:
    """What was `killed` is taken up by a process that is interrupted, which ends with whole answers and says how to go
    on; what both left is answered last. Whatever a kill leaves of the file, test_files.py goes on from."""
    count, model = 40, ("--model", tiny, "--context", "256", "--threads", "1")
    prompts(tmp_path, count)
    if killed:
        process = begun(tmp_path, 10, *model)
        assert process.poll() is None
        process.kill()
        process.communicate()
    if not WINDOWS:
        before = len(_lines(tmp_path))
        process = begun(tmp_path, before + 2, *model)
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130 and "The same command goes on" in said and "Traceback" not in said
        kept = ids(tmp_path / "out")
        assert before + 2 <= len(kept) < count and len(kept) == len({*kept})
    goes_on(tmp_path, count, *model)


@pytest.mark.long(3)
@pytest.mark.timeout(1200)
def test_killed_ten_times(tmp_path: Path) -> None:
    count, kills = 200, 10
    prompts(tmp_path, count)
    draw = random.Random(1)
    for kill in range(kills):
        process = begun(tmp_path, draw.randint(len(_lines(tmp_path)), count * (kill + 1) // (kills + 1)) + 1)
        assert process.poll() is None
        process.kill()
        process.communicate()
    goes_on(tmp_path, count)


@pytest.mark.long(0.1)
def test_why_prompts_are_answered_one_at_a_time_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(random_model("inkling2_text"), tmp_path / "model")
    prompts(tmp_path, 2)
    assert main(words(tmp_path, "--model", str(model), "--context", "128", "--threads", "1")) == 0
    assert "This model answers prompts one at a time: its code cannot" in capsys.readouterr().err
    assert len(texts(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [(("--at-once", "0"), "from 1 to 256"), (("--budget", "x"), "budget"), (("--in", "nowhere"), "cannot be read")],
)
def test_what_cannot_be_is_said_at_once(
    tmp_path: Path, more: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts(tmp_path, 1)
    try:
        code = main(words(tmp_path, *more))
    except SystemExit as refused:  # argparse's way
        code = int(str(refused.code))
    assert code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
