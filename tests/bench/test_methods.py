"""bench methods: the papers' orderings by hand, and the whole of it on the demo model with a drawn profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import methods, methods_claims
from bench.methods_claims import WAITED
from core.settings.registry import variants
from core.simulate import BELADY, BELADY_BYPASS, Clock
from core.simulate.prefetchers import ORACLE, TimedConfig
from tests.engine.profiles import drawn_profile
from tests.prediction.held import held_until


def figures(hit: float, recall: float, lived: float | None = None) -> dict[str, Any]:
    """`lived` = what the engine itself hit."""
    return {"hit_rate": hit, "recall_at_k": recall, "engine": {"hit_rate": hit if lived is None else lived}}


def test_an_ordering_holds_everywhere_in_part_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        methods_claims,
        "ORDERINGS",
        {
            "always": ("policy", "lcp", "lru"),
            "sometimes": ("hit", "gate", "request"),
            "never": ("recall", "gate", "request"),
            "a tie is no more": ("heed", "plec", "lru"),
        },
    )
    found = {
        "hit_rate": {"layer": {"25%": {"lcp": 0.5, "lru": 0.4}, "50%": {"lcp": 0.8, "lru": 0.7}}},
        "prefetchers": {
            "25%": {"gate": figures(0.3, 0.2), "request": figures(0.2, 0.4)},
            "50%": {"gate": figures(0.6, 0.2), "request": figures(0.7, 0.4)},
        },
        "behind": {"25%": {"plec": figures(0.5, 0.1), "lru": figures(0.5, 0.1)}},
    }
    said = {one["claim"]: one["holds"] for one in methods_claims.orderings(found)}
    assert said == {"always": "yes", "sometimes": "in part", "never": "no", "a tie is no more": "no"}


def test_an_ordering_that_waiting_changes_is_told_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods_claims, "ORDERINGS", {"map": ("hit", "map", "gate"), "heed": ("heed", "plec", "lru")})
    found = {
        "hit_rate": {},
        "prefetchers": {
            "25%": {"map": figures(0.3, 0.2, 0.2), "gate": figures(0.4, 0.4), "map" + WAITED: figures(0.5, 0.6)}
        },
        "behind": {"25%": {"plec": figures(0.5, 0.1), "lru": figures(0.4, 0.1)}},
    }
    by_map, heeding = methods_claims.orderings(found)
    assert by_map["pairs"] == {"25%": [0.2, 0.4]} and by_map["holds"] == "no", "as the engine hit, not the replay"
    assert by_map["pairs_waited_for"] == {"25%": [0.5, 0.4]} and by_map["holds_waited_for"] == "yes"
    assert heeding["holds"] == "yes" and "holds_waited_for" not in heeding


def test_a_miss_costs_the_replay_what_it_costs_the_engine() -> None:
    clock = Clock(compute_ms=5.0, load_ms=0.5, expert_ms=0.1)
    lived = {"busy_ms": 8.0, "misses": 6.0}
    assert methods.with_misses(clock, lived) == replace(clock, miss_ms=0.5)
    assert methods.with_misses(clock, {"busy_ms": 4.0, "misses": 6.0}).miss_ms == 0.0, "never less than nothing"
    assert methods.with_misses(clock, {"busy_ms": 8.0, "misses": 0.0}).miss_ms == 0.0


def drawn(engine: Any, texts: Sequence[Any], limit: int) -> Any:
    return replace(drawn_profile(engine), times={"att": 0.5, "moe": 0.3, "head": 1.0, "load": 0.7})


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two predictors with a worker, and a drawn profile."""
    found = {n: s for n, s in methods.subjects().items() if n in ("expert_map", "routing_path")}
    monkeypatch.setattr(methods, "calibrate", drawn)
    monkeypatch.setattr(methods, "subjects", lambda: found)
    return found


@pytest.mark.long(0.2)
def test_an_answer_that_comes_after_its_layer_counts_late_in_the_live_row(some: dict[str, Any], tmp_path: Path) -> None:
    late = 4
    with held_until(late):
        result: Any = methods.run(tmp_path, small=True, say=lambda text: None)
    for row in result["prefetchers"].values():
        assert row["none"]["hit_rate"] == pytest.approx(row["none"]["engine"]["hit_rate"])  # the very same cache
        for name in some:
            live, waited = row[name], row[name + WAITED]
            assert not any(live["recall_by_layer"][: late + 1]), "these were reached before their answer"
            assert any(waited["recall_by_layer"][1 : late + 1])
            assert live["prefetch_mb"] < waited["prefetch_mb"] and live["recall_at_k"] < waited["recall_at_k"]
    for row in result["behind"].values():
        assert all(row[policy]["prefetch_mb"] < row[policy + WAITED]["prefetch_mb"] for policy in methods.HEEDING)


@pytest.mark.long(0.2)
def test_what_was_recorded_before_an_interruption_is_not_recorded_again(
    some: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def stop(text: str) -> None:
        said.append(text)
        if sum(one.startswith("recording ") for one in said) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        methods.run(tmp_path, small=True, say=stop)
    monkeypatch.setattr(methods, "calibrate", None)  # the profile is kept, too
    again: list[str] = []
    result: Any = methods.run(tmp_path, small=True, say=again.append)
    before, after = ([one for one in heard if one.startswith("recording ")] for heard in (said, again))
    assert after[0] == before[2] and not {*before[:2]} & {*after} and len({*before, *after}) == 1 + 2 * 3 + 2 + 3
    assert result["prefetchers"].keys() == {"25.0%", "50.0%"}
    assert not [*(tmp_path / "methods").iterdir()], "the next run starts anew"


@pytest.mark.long(0.4)
def test_all_of_it_on_the_demo_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = ("gate", "expert_map", "request", "transitions", "recent", "hybrid", "default_vectors", "routing_path")
    some = {n: s for n, s in methods.subjects().items() if n.startswith(wanted)}
    monkeypatch.setattr(methods, "calibrate", drawn)
    monkeypatch.setattr(methods, "subjects", lambda: some)
    replayed: list[TimedConfig] = []
    replay = methods.timed
    monkeypatch.setattr(methods, "timed", lambda *args, **own: replayed.extend(args[1]) or replay(*args, **own))
    result: Any = json.loads(json.dumps(methods.run(tmp_path, small=True, say=lambda text: None)))
    assert {one.guard for one in replayed if one.config.scope == "layer"} == {True}
    assert {one.guard for one in replayed if one.config.scope == "global"} == {False}, "as the systems' presets are"
    for scope, sizes in result["hit_rate"].items():
        for share, row in sizes.items():
            bypass = {BELADY_BYPASS} if scope == "layer" and share != "12.5%" else set()  # a token needs those slots
            assert row.keys() == {BELADY, *bypass, *(v.name for v in variants("eviction"))}
            forced = {name: rate for name, rate in row.items() if name != BELADY_BYPASS}
            assert row["none"] == 0.0 and all(row[BELADY] >= rate for rate in forced.values())
    for share, row in result["hit_rate_by_layer"].items():
        assert row.keys() == result["hit_rate"]["layer"][share].keys()
        assert sum(row["lfu"]) / result["layers"] == pytest.approx(result["hit_rate"]["layer"][share]["lfu"])
    for share, rows in result["lcp_settings"].items():
        assert [(one["rho"], one["omega"]) for one in rows] == [*methods.LCP_SETTINGS]
        assert [one["hit_rate"] for one in rows if one["default"]] == [result["hit_rate"]["layer"][share]["lcp"]]
        assert all(one["tpot_ms"] > 0 for one in rows)
    apart = result["distance"]
    assert apart["rows"].keys() == {str(one) for one in methods.DISTANCES} and apart["share"] in result["behind"]
    default = result["behind"][apart["share"]]["finemoe"]  # the same recording, told by its default distance
    assert {**apart["rows"]["3"], "engine": None} == {**default, "engine": None}
    waited = {n + WAITED for n in some if n.startswith(("expert_map", "routing_path"))}
    for row in result["prefetchers"].values():
        assert row.keys() == {"none", ORACLE, *some, *waited}
        assert row[ORACLE]["tpot_ms"] <= min(one["tpot_ms"] for one in row.values())
        assert row["none"]["prefetch_mb"] == 0.0 < row["gate"]["prefetch_mb"]
        assert {name for name, one in row.items() if "engine" in one} == {"none", *some}
        assert all(one["engine"]["tpot_ms"] > 0.0 for one in row.values() if "engine" in one)
    assert result["clock"].keys() == result["prefetchers"].keys()
    for share, clock in result["clock"].items():
        lived = result["prefetchers"][share]["none"]["engine"]
        busy_ms = clock["compute_ms"] + clock["miss_ms"] * lived["misses"]
        assert busy_ms == pytest.approx(max(lived["busy_ms"], clock["compute_ms"])), "a replayed token is as busy"
    assert {one["holds"] for one in result["orderings"]} <= {"yes", "in part", "no"}
    text = methods.table(result)
    assert "simulated" in result["simulated"] and "Belady" not in text[:10]
    assert all(name in text for name in ("Belady (forced admission)", "Belady with bypass", *waited))
