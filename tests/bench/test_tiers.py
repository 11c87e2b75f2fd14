"""bench tiers: its arithmetic, and the whole of it on a tiny model with its measurements in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import fixtures, measure_protocol, measure_worker, tiers
from bench.generate import SMALL
from bench.measure_protocol import Job
from bench.tiers_result import Runs, goals
from core.capacity import fit
from core.errors import BudgetError


def test_the_best_variant_is_compared_round_by_round() -> None:
    runs = Runs()
    assert runs.best("llama.cpp", "bf16", "50%") is None and runs.rounds("llama.cpp", "bf16", "50%") == []
    for ours, one, two in ((8.0, 1.0, 3.0), (6.0, 9.0, 2.0), (8.0, 1.0, 2.0)):
        runs.add("moestro", "bf16", "50%", "", ours, {"hit_rate": ours / 10, "limit_bytes": None})
        runs.add("llama.cpp", "bf16", "50%", "1 thread", one, {})
        runs.add("llama.cpp", "bf16", "50%", "2 threads", two, {})
    assert runs.best("llama.cpp", "bf16", "50%") == "2 threads"
    assert runs.ratio(("moestro", "bf16", "50%"), ("llama.cpp", "bf16", "50%")) == 3.0  # of 8/3, 3, 4
    assert runs.ratio(("moestro", "bf16", "50%"), ("llama.cpp", "int4", "50%")) is None
    assert runs.middle("moestro", "bf16", "50%", "hit_rate") == 0.8
    assert runs.middle("moestro", "bf16", "50%", "limit_bytes") is None


@pytest.mark.parametrize(("read", "kept"), [(104.0, True), (106.0, False), (94.0, False)])
def test_bytes_off_by_more_than_five_percent_miss_the_goal(read: float, kept: bool) -> None:
    runs = Runs()
    for name in ("bf16", "int4"):
        runs.add("moestro", name, "50%", "", 1.0, {"disk_bytes_per_token": 100.0, "read_bytes_per_token": read})
    details = {name: {"50%": {"misses_x_blob": 100.0}} for name in ("bf16", "int4")}
    imports = {"bf16": {"rss_mb": 1200.0, "dense_mb": 100.0}, "int4": {"rss_mb": 900.0, "dense_mb": 100.0}}
    found = {goal["goal"].split(",")[0]: goal["kept"] for goal in goals(runs, details, imports)}
    assert found["bytes read / (misses x blob)"] is kept
    assert found["all resident"] is None
    assert [g["kept"] for g in goals(runs, details, imports)[-2:]] == [False, True]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Measurements without processes of their own: the jobs are real, what a process would add is made up."""
    asked: list[Job] = []

    def measure(module: str, job: Job, files: Sequence[Path], **more: Any) -> Job:
        assert module == "bench.measure_worker" and all(file.exists() for file in files)
        asked.append(job)
        held = {f"peak_{name}": value for name, value in measure_protocol.memory().items()}
        return {
            **measure_worker.prepare(job)(),
            **held,
            "idle_bytes": measure_protocol.memory()["rss"],
            "stayed_cached": 0,
        }

    for module in (fixtures, tiers):
        monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(tiers, "BUDGETS", ("100%", "50%"))
    monkeypatch.setattr(fixtures.Fixtures, "threads", [1])
    monkeypatch.setattr(fixtures, "disk_gbps", lambda pack: {"1 thread": 1.0})
    monkeypatch.setattr(fixtures, "find_llama", lambda asked: ("", "there is none"))
    return asked


@pytest.mark.long(0.2)
def test_everything_is_measured_and_told(
    tmp_path: Path, in_process: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    found = json.loads(json.dumps(tiers.run(rounds=1, tokens=4, keep=tmp_path, small=True, say=said.append)))
    more = ["moestro", "fit"] * (len(tiers.BUDGETS) - 1)  # at the budgets below 100 %
    assert [job["kind"] for job in in_process] == [
        "import",
        "import",
        "moestro",
        "transformers",
        "fit",
        *more,
        "moestro",
        "moestro",
        "fit",
        *more,
    ]
    assert [job["dense"] for job in in_process if job.get("budget") == "100%" and job["kind"] == "moestro"] == [
        "checkpoint",
        "int4-g64",
        "checkpoint",
    ]
    assert all(tuple(one) == tiers.BUDGETS for one in found["tok_s"].values())
    assert set(found["tok_s"]["bf16"]["100%"]) == {"moestro", "transformers"}
    assert found["tok_s"]["int4"]["100%"].keys() == {"moestro", "moestro, dense layers as in the checkpoint"}
    assert found["fit"].keys() == {f"{name}, {budget}" for name in ("bf16", "int4") for budget in tiers.BUDGETS}
    assert all(one["estimated_bytes"] >= one["counted_bytes"] > 0 for one in found["fit"].values())
    assert found["tok_s"]["int4"]["50%"]["moestro"] > 0
    blob = SMALL.expert_bytes // SMALL.layers // SMALL.experts
    for name, size in (("bf16", blob), ("int4", blob * 4.5 / 16)):
        detail = found["moestro"][name]["50%"]
        assert detail["slots"] == SMALL.layers * SMALL.experts // 2
        assert detail["blob_bytes"] == pytest.approx(size, rel=0.03)
        assert found["misses_x_blob"][name]["50%"] == detail["disk_misses_per_token"] * detail["blob_bytes"] > 0
        assert found["bytes_per_token"][name]["50%"] == pytest.approx(found["misses_x_blob"][name]["50%"], rel=0.05)
        assert found["bytes_per_token"][name]["100%"] == 0
        assert detail["belady_misses_per_token"] <= detail["disk_misses_per_token"]
    assert found["llama_cpp"] == "there is none" and found["memory_limit_method"].startswith("none: ")
    assert found["routing"]["by_chance"] == 0.25 and 0 < found["routing"]["repeats_of_previous_token"] <= 1
    job = next(job for job in in_process if (job["kind"], job.get("budget")) == ("moestro", "50%"))
    budget = int(found["moestro"]["bf16"]["50%"]["budget_bytes"])
    monkeypatch.setattr("core.capacity.free_memory.free_bytes", lambda device: (budget, budget))
    monkeypatch.setattr(fit, "HOST_MARGIN", fit.HOST_MARGIN)
    with pytest.raises(BudgetError, match="host memory"):
        measure_worker.prepare(job)()
    assert measure_worker.prepare({**job, "group": "with a limit"})()["tok_s"] > 0, "no margin is left in a group"
    text = tiers.table(found)
    assert "absent, there is none" in text and "not measured" in text and found["routing"]["says"] in text


def test_the_generated_model_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixtures, "find_llama", lambda asked: ("", "there is none"))
    said: list[str] = []
    first = fixtures.build(tmp_path, True, "", said.append)
    assert fixtures.build(tmp_path, True, "", said.append).model == first.model
    assert len(said) == 1


def test_an_interpreter_without_llama_cpp_is_refused_by_name(tmp_path: Path) -> None:
    from core.errors import MoestroError

    with pytest.raises(MoestroError, match="does not start"):
        fixtures.find_llama(str(tmp_path / "python"))
