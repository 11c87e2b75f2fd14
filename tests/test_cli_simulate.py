"""`simulate` on the command line: a table for people, one line of JSON for programs, errors in the user's words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import cli
from core.registry import variants
from core.trace import ArrayTrace
from core.trace.file import save
from tests.simulate.test_engine import routes

LAYERS, EXPERTS, K = 3, 16, 2


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    np.savez(tmp_path / "t.npz", experts=routes(0, 200, EXPERTS, LAYERS, K).transpose(1, 0, 2))
    return tmp_path / "t.npz"


def result(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict[str, Any], str]:
    assert cli.main(["simulate", *map(str, words), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return json.loads(last), "\n".join(lines)


def test_every_policy_and_size_beside_the_bound(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, table = result(capsys, "--trace", trace, "--slots", "25%,50%,75%", "--policies", "all")
    names, sizes = [v.name for v in variants("eviction")], ["25%", "50%", "75%"]
    assert list(found["hit_rate"]) == names and len(names) == 10
    assert all(list(found["hit_rate"][name]) == sizes for name in names)
    assert list(found["belady"]) == sizes and found["slots"] == {"25%": 12, "50%": 24, "75%": 36}
    for size in sizes:
        assert all(found["hit_rate"][name][size] <= found["belady"][size] for name in names)
        assert found["belady"][size] < found["belady_warm"][size] <= 1
    assert (found["tokens"], found["layers"], found["experts"], found["top_k"]) == (200, LAYERS, EXPERTS, K)
    assert 0 < found["seconds"] < 600 and "tpot_ms" not in found
    assert all(name in table for name in [*names, "belady", "25% (12)", "200 tokens"])


def test_choices_act(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, _ = result(capsys, "--trace", trace, "--slots", "24", "--policies", "lru, random,belady", "--set",
                    "eviction.random.seed=1")
    assert list(few["hit_rate"]) == ["lru", "random"] and list(few["belady"]) == ["24"]
    other, _ = result(capsys, "--trace", trace, "--slots", "24", "--policies", "random")
    assert other["hit_rate"]["random"] != few["hit_rate"]["random"]
    pool, _ = result(capsys, "--trace", trace, "--slots", "24", "--policies", "lru", "--scope", "global")
    full, _ = result(capsys, "--trace", trace, "--slots", "24", "--policies", "lru", "--start", "filled")
    assert len({r["hit_rate"]["lru"]["24"] for r in (few, pool, full)}) == 3
    timed, table = result(capsys, "--trace", trace, "--policies", "lru", "--compute-ms", 10, "--load-ms", 2)
    rate, ms = timed["misses_per_token"]["lru"]["50%"], timed["tpot_ms"]["lru"]["50%"]
    assert ms == pytest.approx(10 + 2 * rate) and f"{ms:.2f}" in table
    assert "more" not in timed and result(capsys, "--trace", trace, "--experts", 32)[0]["experts"] == 32
    save(ArrayTrace(routes(0, 200, EXPERTS, LAYERS, K), EXPERTS, model="demo"), tmp_path / "own")
    own, table = result(capsys, "--trace", tmp_path / "own", "--slots", "24", "--policies", "lru")
    assert own["hit_rate"]["lru"] == few["hit_rate"]["lru"] and "demo" in table


@pytest.mark.parametrize(("words", "why"), [
    ("--slots 25,x%", "'x%' is not understood"), ("--slots 110%", "not between one expert and all 48"),
    ("--slots 0", "not between one"), ("--slots 1.5", "not understood"), ("--slots 5", "need at least 6"),
    ("--policies lru,psychic", "no eviction called 'psychic'"), ("--policies lru --set seed=3", "no use for seed"),
    ("--set eviction.lfu.half_life=-1", "between 0 and"), ("--compute-ms 5", "give both"),
    ("--load-ms -1", "milliseconds"), ("--experts 3", "but 3 experts were said"),
    ("--trace nowhere.npz", "There is no trace nowhere.npz"),
])
def test_errors_in_the_users_words(trace: Path, words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):      # of argparse, or of ours
        raise SystemExit(cli.main(["simulate", "--trace", str(trace), *words.split()]))
    assert why in capsys.readouterr().err


def test_nothing_heavy_is_loaded() -> None:
    code = "import app.cli, core.simulate, sys; print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
