"""Long tests run when asked for, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.selection import GPU

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.gpu
def test_gpu(): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.long
@pytest.mark.gpu
def test_long_gpu(): pass
"""


EXPECTED = {
    "": ["plain", "gpu"],
    "--all": ["plain", "gpu", "long", "long_gpu"],
    "-m gpu": ["gpu"],
    "-m gpu --all": ["gpu", "long_gpu"],
    "-m long": ["long", "long_gpu"],
    "-m 'not long'": ["plain", "gpu"],
}
RUNS = """
import shlex, sys, pytest
for options in sys.argv[1].split(","):
    print("==", options)
    assert pytest.main(sys.argv[2:] + ["--collect-only", *shlex.split(options)]) == 0
print("== in time")
assert pytest.main(sys.argv[2:] + ["--all", "--until", "0", "-rsp"]) == 0
"""


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The tests that each of the options selects, all of them asked in one process."""
    tmp_path = tmp_path_factory.mktemp("selected")
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [
        sys.executable,
        "-c",
        RUNS,
        ",".join(EXPECTED),
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        "-p",
        "tests.selection",
        "-p",
        "no:cacheprovider",
        "-q",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("== "):
            now = found.setdefault(line.removeprefix("== "), [])
        elif "::" in line:
            now.append(line.partition("::test_")[2])
    found["in time"].sort()
    return found


@pytest.mark.parametrize("options", EXPECTED)
def test_only_what_was_asked_for_is_selected(selected: dict[str, list[str]], options: str) -> None:
    assert selected[options] == EXPECTED[options]


def test_without_time_long_tests_are_skipped_by_name(selected: dict[str, list[str]]) -> None:
    assert selected["in time"] == ["gpu", "long, about 1 min", "long_gpu, about 1 min", "plain"]


def test_tests_that_need_a_gpu_are_where_they_are_looked_for() -> None:
    others = [file for file in (ROOT / "tests").rglob("test_*.py") if not file.is_relative_to(GPU)]
    mark = "pytest.mark." + "gpu"
    assert [file.name for file in others if mark in file.read_text(encoding="utf-8")] == [Path(__file__).name]
    assert all(mark in file.read_text(encoding="utf-8") for file in GPU.glob("test_*.py"))


@pytest.mark.long(0.5)
def test_those_need_no_more_than_the_engine_and_pytest(tmp_path: Path) -> None:
    absent = "hypothesis xdist pytest_timeout gradio fastapi starlette uvicorn httpx plotly pydantic llvmlite gguf "
    absent += "llguidance pynvml playwright openai anthropic"
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({absent.split()})\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--collect-only"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line} == {
        file.relative_to(ROOT).as_posix() for file in GPU.glob("test_*.py")
    }


def test_no_example_fails_for_being_slow() -> None:
    used = settings()
    assert used.deadline is None and HealthCheck.too_slow in used.suppress_health_check
