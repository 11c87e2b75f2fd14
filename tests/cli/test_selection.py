"""Long tests run when asked for, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["plain", "gpu"]),
        (["--all"], ["plain", "gpu", "long", "long_gpu"]),
        (["-m", "gpu"], ["gpu"]),
        (["-m", "gpu", "--all"], ["gpu", "long_gpu"]),
        (["-m", "long"], ["long", "long_gpu"]),
        (["-m", "not long"], ["plain", "gpu"]),
    ],
)
def test_only_what_was_asked_for_is_selected(tmp_path: Path, options: list[str], expected: list[str]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        "-p",
        "tests.selection",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "-q",
        str(tmp_path),
        *options,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    found = [line.partition("::test_")[2] for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0, done.stdout + done.stderr
    assert found == expected
