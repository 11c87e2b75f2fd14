"""The cost of a launch in Python can be measured, and is there for each format."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.launch_cost import FORMATS


@pytest.mark.long(0.2)
def test_it_measures_both_ways() -> None:
    """In a process of its own, whose Triton is left with a GPU that is none."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "bench.launch_cost", "2"], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for name, line in zip(FORMATS, run.stdout.splitlines(), strict=True):
        assert line.startswith(name) and "product by Triton" in line
        assert len(re.findall(r"[\d.]+ us", line)) == 4
