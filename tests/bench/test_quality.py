"""The suites of whole systems and of lossy choices: their arithmetic, bounds, what is kept, table and picture."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app import cli
from app.store import results as stored
from app.store.results import BOUNDS
from app.ui.tabs.analysis_answers import SystemsAnswer
from app.ui.tabs.systems_figures import LOSSY, bound_lines, lines, tpot_over_budgets
from bench.harness.workload import NAMES, PER_TOKEN, bounds, median_round
from bench.quality import lossy, speculating, systems
from bench.routing import buddies, buddy_figures
from core.errors import ProfileError, SettingError
from core.measure.evaluate.rows import EvaluationRow
from core.memory.link import Pace
from core.metrics import BY_NAME
from core.policy.substitute.list_lengths import COVERAGES
from core.profile import Profile, save
from core.profile.trace import Chunk, FileTrace
from core.profile.trace.file import TraceHead, TraceWriter
from core.simulate import Clock
from tests.bench.systems_result import systems_result


def test_every_figure_is_a_metric_of_the_table() -> None:
    assert set(PER_TOKEN) <= BY_NAME.keys()


def test_the_round_with_the_median_time_stands_for_a_system() -> None:
    rounds = [
        {"round": 1, "tpot_ms": 9.0, "ttft_ms": 1.0, "stall_ms": 4.0},
        {"round": 2, "tpot_ms": 7.0, "ttft_ms": 5.0, "stall_ms": 2.0},
        {"round": 3, "tpot_ms": 8.0, "ttft_ms": 3.0, "stall_ms": 3.0},
        {"round": 4, "problem": "too small"},
    ]
    found = median_round(rounds)
    assert (found["tpot_ms"], found["stall_ms"], found["ttft_ms"]) == (8.0, 3.0, 3.0)
    assert found["tpot_rounds_ms"] == [9.0, 7.0, 8.0] and found["problem"] == ""
    assert median_round(rounds[3:]) == {"problem": "too small"}
    assert median_round([])["problem"]


def traced(path: Path) -> FileTrace:
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(6)[:2] for _ in range(80)]).reshape(40, 2, 2)
    with TraceWriter(path, TraceHead(2, 6, 2)) as trace:
        trace.write(Chunk(ids.astype(np.int16), np.ones(40, np.int32), np.ones(40, bool), np.ones(40, np.int32)))
    return FileTrace(path)


def test_bounds_are_in_their_order(tmp_path: Path) -> None:
    trace, pace = traced(tmp_path / "a.trace"), Pace(1.0, 0.0)
    clock = Clock(compute_ms=2.0, load_ms=1.0, expert_ms=0.1)
    found = bounds(trace, 8, (), 2.0, pace, 1_000_000, clock)
    hits = [found[name]["hit_rate"] or 0.0 for name in NAMES]
    assert 0 < hits[0] <= hits[2] and hits[1] > 0  # one pool can keep whatever pools of layers keep
    times = [found[name]["tpot_ms"] or 0.0 for name in ("resident", "perfect_prefetch", "belady")]
    assert 0 < times[0] <= times[1] <= times[2]
    fewest = min(found[name]["misses"] or 0.0 for name in NAMES)
    assert found["perfect_prefetch"]["tpot_ms"] == pytest.approx(max(2.0, fewest))  # a copy takes 1 ms
    few = bounds(trace, 4, (), 2.0, pace, 1_000_000, clock)
    assert few["belady"]["hit_rate"] is not None and few["belady_bypass"]["hit_rate"] is None
    whole = bounds(trace, 12, (), None, pace, 1_000_000, None)
    assert whole["belady"]["tpot_ms"] is whole["perfect_prefetch"]["tpot_ms"] is None
    assert found.keys() == BOUNDS.keys()


def test_the_table_says_what_was_measured() -> None:
    text = "\n".join(systems.table(systems_result()))
    assert "EMULATED" in text and "LOSSY" in text and "The budget is too small." in text
    rows = text.splitlines()
    at = next(i for i, line in enumerate(rows) if line.startswith("Budget 50%"))
    assert [line.split()[0] for line in rows[at + 2 : at + 4]] == ["BuddyMoE", "FineMoE"]  # the faster first
    assert all(name in text for name in BOUNDS.values())
    assert "BuddyMoE at 50%" in text and "FineMoE at" not in text


@pytest.mark.long(0.1)
def test_the_picture_has_a_line_for_every_system_and_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "systems-20260102-030405.json").write_text(json.dumps(systems_result()), "utf-8")
    (tmp_path / "systems-20260103-030405.json").write_text(json.dumps({"bench": "systems", "small": True}), "utf-8")
    (tmp_path / "systems-20260104-030405.json").write_text("torn", "utf-8")
    found = stored.newest("systems", tmp_path)
    assert found is not None and found[0].name == "systems-20260102-030405.json"
    result = found[1]
    assert lines(result) == {"finemoe": ([25.0, 50.0], [20.0, 10.0], True), "buddymoe": ([50.0], [9.0], False)}
    assert bound_lines(result)["belady"] == ([25.0, 50.0], [12.0, 8.0])
    for dark in (True, False):
        drawn = tpot_over_budgets(result, dark)
        assert [one.name for one in drawn.data] == ["FineMoE", "BuddyMoE" + LOSSY, *BOUNDS.values()]
    monkeypatch.setattr(stored, "FOLDERS", [tmp_path])
    shown = SystemsAnswer().values(True)
    assert "systems-20260102-030405.json" in shown[2] and len(shown[3].data) == 7
    monkeypatch.setattr(stored, "FOLDERS", [tmp_path / "none"])
    assert [update.get("visible") for update in SystemsAnswer().values(True)[:2]] == [True, False]


@pytest.mark.parametrize(("budgets", "why"), [("half", "not understood"), (" , ", "at least one budget")])
def test_a_wrong_budget_is_refused_before_a_model_is_loaded(budgets: str, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        systems.SUITE.run(budgets=budgets)


def test_the_bound_is_what_computing_and_copying_have_in_common() -> None:
    def copy(layer: int, ms: float) -> Any:
        return SimpleNamespace(layer=layer, started_s=1.0, ended_s=1.0 + ms / 1e3)

    steps: Any = [
        SimpleNamespace(compute_ms=4.0, transfers=(copy(0, 1.0), copy(0, 2.0), copy(1, 5.0))),
        SimpleNamespace(compute_ms=8.0, transfers=(copy(1, 9.0),)),
    ]
    # a token computes 6 ms, 3 in each layer; it copies 1.5 ms in layer 0 and 7 ms in layer 1: 1.5 + 3
    assert speculating.bound_ms(steps, 2) == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("context", "lengths"), [(1024, [64, 256, 768, 976]), (816, [64, 256, 768]), (112, [64]), (60, [12])]
)
def test_times_go_up_to_the_models_own_context(context: int, lengths: list[int]) -> None:
    assert speculating.lengths(context, 48) == lengths


def test_redundancy_is_the_best_pair() -> None:
    likeness = np.array([[[1, 0.5, 0.1], [0.5, 1, 0.3], [0.1, 0.3, 1]]], np.float32)
    profile: Any = SimpleNamespace(likeness=likeness)
    [best] = lossy.redundancy(profile) or [0.0]
    assert best == pytest.approx((0.5 + 0.5 + 0.3) / 3) and lossy.redundancy(None) is None


def test_rows_and_the_first_load_s_link_are_kept(tmp_path: Path) -> None:
    pace = SimpleNamespace(gbps=0.25, latency_us=10.0)
    engine: Any = SimpleNamespace(transfers=SimpleNamespace(pace=pace))
    rows = [
        EvaluationRow("exact", "Exact", 0.5, tok_s=3.0),
        EvaluationRow("drop", "Drop", 0.5, settings={"miss": "drop"}),
    ]
    first = lossy.Kept(tmp_path, {"tokens": 8})
    assert first.rows == [] and first.link(engine)["link_gbps"] == 0.25
    for row in rows:
        first.add(row)
    again = lossy.Kept(tmp_path, {"tokens": 8})
    pace.gbps = 0.5  # another load timed it so
    assert again.rows == rows and again.link(engine)["link_gbps"] == 0.25


DEEP, WIDE = 2, 16


def profile(**more: Any) -> Profile:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 500, (DEEP, WIDE))
    counts[:, 3] = 0
    pairs = rng.poisson(1.0, (DEEP, WIDE, WIDE)).astype(np.float32) ** 3
    pairs = pairs + pairs.transpose(0, 2, 1)
    pairs[:, 3] = pairs[:, :, 3] = 0
    for one in pairs:
        np.fill_diagonal(one, 0)
    likeness = rng.uniform(-0.1, 0.9, pairs.shape).astype(np.float16)
    parts: dict[str, Any] = {"counts": counts, "pairs": pairs, "likeness": likeness, **more}
    return Profile("tiny", "ab" * 32, DEEP, WIDE, 2, 8, 900, "a text", "2026-01-02T03:04:05+00:00", **parts)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_shares_of_the_busiest_and_of_the_first_peers_expert_by_expert() -> None:
    known = profile()
    assert known.counts is not None and known.pairs is not None
    few = 4
    found = (
        buddy_figures.busiest(known.counts),
        buddy_figures.concentration(known.pairs, few),
        buddy_figures.popular(known.counts, few),
    )
    for layer in range(DEEP):
        counts = [int(n) for n in known.counts[layer]]
        assert found[0][layer] == pytest.approx(sum(sorted(counts)[-2:]) / sum(counts)), "2 of 16 are an eighth"
        covered, popular = [], []
        for i in range(WIDE):
            row = sorted((float(known.pairs[layer, i, j]) for j in range(WIDE) if j != i), reverse=True)
            others = sorted((counts[j] for j in range(WIDE) if j != i), reverse=True)
            if sum(row):
                covered.append(sum(row[:few]) / sum(row))
            if counts[i]:
                popular.append(sum(others[:few]) / sum(others))
        assert (found[1][layer], found[2][layer]) == pytest.approx((mean(covered), mean(popular)))
    assert not buddy_figures.concentration(np.zeros((1, 4, 4), np.float32), 1).any()


def test_cosines_are_of_different_experts() -> None:
    likeness = np.array([[[1.0, 0.5, -0.25], [0.5, 1.0, 0.0], [-0.25, 0.0, 1.0]]], np.float16)
    (found,) = buddy_figures.cosines(likeness)
    assert found["best"] == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    assert found["50"] == pytest.approx(0.0) and found["95"] <= 0.5


def test_lists_are_counted_at_the_paper_s_coverages_and_over_all() -> None:
    found = buddy_figures.measured(profile())
    assert list(found["lists"]) == list(found["numbers_by_length"]) == ["0.75", "0.95", "0.99"]
    assert list(found["length_percentiles"]) == [f"{alpha:g}" for alpha in COVERAGES]
    for alpha, by_layer in found["numbers_by_length"].items():
        for numbers, row in zip(by_layer, found["lists"][alpha], strict=True):
            listed = [length for length, number in enumerate(numbers) for _ in range(number) if length]
            assert sum(numbers) == WIDE and numbers[0] == 1, "expert 3 has no list"
            assert (row["experts"], row["shortest"], row["longest"]) == (15, min(listed), max(listed))
            assert row["median"] == np.median(listed)
    every = [
        length
        for numbers in found["numbers_by_length"]["0.95"]
        for length, number in enumerate(numbers)
        for _ in range(number)
        if length
    ]
    assert found["length_percentiles"]["0.95"]["50"] == np.median(every)


def test_any_profile_is_read_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, file = profile(), tmp_path / "profile"
    save(known, file)
    words = ["bench", "buddies", "--profile", str(file), "--json", "--save", str(tmp_path / "result.json")]
    assert cli.main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result == json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert {name: result[name] for name in buddy_figures.measured(known)} == buddy_figures.measured(known)
    assert (result["model"], result["profile_tokens"], result["experts"]) == ("tiny", 900, WIDE)
    assert result["list_shares"] == [
        row["median"] / WIDE for row in result["lists"]["0.95"]
    ] and "Buddy lists" in "\n".join(lines)
    assert [*result["halves"]["early"], *result["halves"]["late"]] == [row["median"] for row in result["lists"]["0.95"]]
    again = [*words[:-1], str(tmp_path / "another.json"), "--model", "demo"]
    assert cli.main(again) == 2
    assert "not both" in capsys.readouterr().err


def test_a_profile_that_lacks_a_part_says_so(tmp_path: Path) -> None:
    assert buddy_figures.measured(profile(likeness=None))["cosines"] is None
    with pytest.raises(ProfileError, match="with the parts counts and pairs"):
        buddy_figures.measured(replace(profile(), counts=None))
    with pytest.raises(ProfileError, match="There is no profile"):
        buddies.SUITE.run(profile=tmp_path / "no")
    with pytest.raises(SettingError, match="not both"):
        buddies.SUITE.run(model="demo", profile=tmp_path / "no")
