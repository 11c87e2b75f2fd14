"""`kill -9` at random points of an import: never a pack that opens and is wrong; always one that can be finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.memory.pack import verify
from tests.conftest import Checkpoint
from tests.pack.packs import same

ROOT = Path(__file__).parents[2]


@pytest.mark.long(0.3)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children that are killed are forked")
def test_killed_at_ten_random_points(checkpoint: Checkpoint, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.pack.killed", checkpoint("olmoe"), tmp_path, "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ran = [json.loads(line) for line in run.stdout.splitlines()]
    killed = [one for one in ran if one["code"] == -9]
    assert len({one["out"] for one in killed}) == 10
    for one in killed:  # what got its name before the end came is whole; all else is not there
        assert not one["exists"] or verify(Path(one["out"])).problems == ()
    for out in {one["out"] for one in ran}:
        assert same(Path(out), tmp_path / "reference"), out
        assert not Path(f"{out}.partial").exists()
    assert len(ran) > 15  # many were killed twice, then finished
