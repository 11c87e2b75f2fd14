"""Every suite of routing and of quality, as test_suites.py has those of speed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.ui.tabs.systems_figures import tpot_over_budgets
from bench.quality import lossy, speculating, systems
from bench.routing import methods, overhead, path, path_accuracy, predictors
from bench.routing.methods_result import WAITED
from bench.suites import suite
from core.profile import load
from core.settings.presets import PRESETS
from core.settings.registry import variants
from core.simulate import BELADY, BELADY_BYPASS
from core.simulate.prefetchers import ORACLE, TimedConfig
from core.system.native.compile import supported
from tests.bench.tried import calibrated, only, tried
from tests.prediction.held import held_until


@pytest.mark.long(0.2)
def test_predictors(monkeypatch: pytest.MonkeyPatch) -> None:
    some = only(monkeypatch, predictors, lambda name: name in ("all_next", "gate", "routing_path", "expert_map"))
    one = tried("predictors")
    r, found = one.result, one.result["predictors"]
    assert found.keys() == some.keys() and all(name in one.text for name in found)
    for row in found.values():
        assert len(row["recall_by_layer"]) == r["layers"]
        by_rank = [sum(rates) / r["top_k"] for rates in row["recall_by_rank"]]
        assert by_rank == pytest.approx(row["recall_by_layer"])
        assert 0 <= row["recall_at_k"] <= row["recall_of_all_named"] <= 1
    assert found["all_next"]["recall_of_all_named"] > 0.9 and found["all_next"]["named"] > r["top_k"]
    assert found["gate"]["recall_at_k"] > found["routing_path"]["recall_at_k"]  # which was never trained


@pytest.mark.long(0.2)
def test_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, overhead, lambda name: name in ("gate", "lab"))
    monkeypatch.setattr(overhead, "BEGIN", 33)
    one = tried("overhead")
    found = one.result["predictors"]
    assert found.keys() == {"gate", "lab"}
    for name, figure in (("gate", "predict_ms"), ("lab", "record_ms")):
        assert found[name]["total_ms"] > found[name]["compute_ms"] > found[name][figure] > 0 == found[name]["stall_ms"]
    assert one.result["comparison"]["none_ms"] > 0
    assert "none blocks the compute path" in one.text and "lab" in one.text and overhead.LIVE in one.text


@pytest.mark.long(0.3)
def test_estimator() -> None:
    one = tried("estimator")
    rows = one.result["estimators"]
    assert [row["estimator_input"] for row in rows] == ["hidden", "quasi"]
    for row in rows:
        assert row["trained"] == 180 and row["parameters"] > 0 and 0 <= row["recall"] <= 1
        assert len(row["recall_by_layer"]) == one.result["layers"] == 6
    assert rows[1]["disk_bytes"] == rows[0]["disk_bytes"] + 200 * 5 * 24
    assert list(one.result["untrained"]) == ["gate", "default_vectors"] and "default_vectors, untrained" in one.text


@pytest.mark.long(0.3)
def test_path(tmp_path: Path) -> None:
    def stop(text: str) -> None:
        if text.startswith("training, "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite("path").run(small=True, keep=tmp_path, say=stop)
    one = tried("path", tmp_path)
    r = one.result
    assert r["runs"] == 16 and not [text for text in one.said if text.startswith("writing")], "answers are kept"
    (folder,) = (tmp_path / "path").iterdir()
    state = path.StateFile(tmp_path / "net-1.state")
    assert state.read() is None
    state.write({"step": torch.tensor(7)})
    kept = path.StateFile(tmp_path / "net-1.state").read()
    assert kept is not None and int(kept["step"]) == 7
    state.drop()
    assert state.read() is None
    assert load(folder / "profile").nets and not [*folder.glob("*.state")]
    for rows in r["accuracy"].values():
        assert rows.keys() == {*path_accuracy.NAMES}
        assert all(0 <= row[figure] <= 1 for row in rows.values() for figure in ("accuracy", "precision"))
        assert rows["TLP"]["accuracy"] > 0.1 < rows["network"]["named"] <= r["experts"]
    alone = r["accuracy"]["1"]
    assert alone["TLP"]["accuracy"] == pytest.approx(alone["TLP"]["precision"]), "as many are named as are needed"
    assert len(alone["TLP"]["blocks"]["accuracy"]) > 2 and "30,000 in the paper" in one.text
    assert {len(layers) for layers in r["recall_by_layer"].values()} == {r["layers"]}


@pytest.mark.long(0.2)
def test_expert_maps() -> None:
    one = tried("expert_maps")
    r = one.result
    assert r["tokens"] == 12 and list(r["distance"]) == [str(d) for d in range(1, r["layers"] + 1)]
    for of in ("probabilities", "activations"):
        assert 0 < r["entropy"][of]["fine"] <= r["entropy"][of]["coarse"] <= r["entropy"]["most"]
    assert r["entropy"]["activations"]["fine"] == pytest.approx(np.log2(r["top_k"]))
    assert all(-1 <= of["pearson"] <= 1 for of in r["correlation"].values())
    assert all(0 <= of["recall_in_time"] <= 1 for of in r["distance"].values())
    assert r["distance"]["3"]["recall_at_k"] == r["capacity"]["1000"]["recall_at_k"]
    blocks, answers = r["blocks"], r["entropy"]["answers"]
    every = (*blocks["distance"].values(), *blocks["bounds"].values(), *blocks["capacity"]["semantic"].values())
    assert {len(one) for one in every} == {answers} and blocks["distance"].keys() == {*r["distance"], "request counts"}
    assert sum(blocks["distance"]["3"]) / answers == pytest.approx(r["distance"]["3"]["recall_at_k"], abs=0.2)


@pytest.mark.long(0.1)
def test_buddies() -> None:
    one = tried("buddies")
    r = one.result
    assert r["model"] == "demo" and r["profile_tokens"] >= 100 and r["device"]
    assert all(0 < share < 1 for share in (*r["busiest"], *r["few_cover"], *r["few_popular_cover"]))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two predictors with a worker."""
    return only(monkeypatch, methods, lambda name: name in ("expert_map", "routing_path"))


@pytest.mark.long(0.2)
def test_an_answer_that_comes_after_its_layer_counts_late(workers: dict[str, Any], tmp_path: Path) -> None:
    late = 4
    with held_until(late):
        r = tried("methods", tmp_path).result
    for row in r["prefetchers"].values():
        assert row["none"]["hit_rate"] == pytest.approx(row["none"]["engine"]["hit_rate"])  # the very same cache
        for name in workers:
            live, waited = row[name], row[name + WAITED]
            assert not any(live["recall_by_layer"][: late + 1]), "these were reached before their answer"
            assert any(waited["recall_by_layer"][1 : late + 1])
            assert live["prefetch_mb"] < waited["prefetch_mb"] and live["recall_at_k"] < waited["recall_at_k"]
    for row in r["behind"].values():
        assert all(row[policy]["prefetch_mb"] < row[policy + WAITED]["prefetch_mb"] for policy in methods.HEEDING)


@pytest.mark.long(0.2)
def test_what_was_recorded_is_kept(workers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[str] = []

    def stop(text: str) -> None:
        before.extend([text] if text.startswith("recording ") else [])
        if len(before) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite("methods").run(small=True, keep=tmp_path, say=stop)
    monkeypatch.setattr(methods, "calibrate", None)  # the profile is kept, too
    one = tried("methods", tmp_path)
    after = [text for text in one.said if text.startswith("recording ")]
    assert after[0] == before[2] and not {*before[:2]} & {*after} and len({*before, *after}) == 1 + 2 * 3 + 2 + 3
    assert one.result["prefetchers"].keys() == {"25.0%", "50.0%"}
    assert not [*(tmp_path / "methods").iterdir()], "the next run starts anew"


@pytest.mark.long(0.4)
def test_methods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = ("gate", "expert_map", "request", "transitions", "recent", "hybrid", "default_vectors", "routing_path")
    some, replay, replayed = (
        only(monkeypatch, methods, lambda n: n.startswith(wanted)),
        methods.timed,
        list[TimedConfig](),
    )
    monkeypatch.setattr(methods, "timed", lambda *args, **own: replayed.extend(args[1]) or replay(*args, **own))
    one = tried("methods", tmp_path)
    r = one.result
    beside_plec = [each for each in replayed if each.config.scope == "layer" and not each.guard]
    assert {each.config.policy for each in beside_plec} == {"lru", "lfu"}, "the paper's LRU is each layer's own"
    assert {each.predictor for each in beside_plec} <= {*methods.PLEC_BEHIND}
    assert {each.guard for each in replayed if each.config.scope == "global"} == {False}, "as the systems' presets are"
    for scope, sizes in r["hit_rate"].items():
        for share, row in sizes.items():
            bypass = {BELADY_BYPASS} if scope == "layer" and share != "12.5%" else set()  # a token needs those slots
            assert row.keys() == {BELADY, *bypass, *(v.name for v in variants("eviction"))}
            forced = {name: rate for name, rate in row.items() if name != BELADY_BYPASS}
            assert row["none"] == 0.0 and all(row[BELADY] >= rate for rate in forced.values())
    for share, row in r["hit_rate_by_layer"].items():
        assert row.keys() == r["hit_rate"]["layer"][share].keys()
        assert sum(row["lfu"]) / r["layers"] == pytest.approx(r["hit_rate"]["layer"][share]["lfu"])
    for share, rows in r["lcp_settings"].items():
        assert [(row["rho"], row["omega"]) for row in rows] == [*methods.LCP_SETTINGS]
        assert [row["hit_rate"] for row in rows if row["default"]] == [r["hit_rate"]["layer"][share]["lcp"]]
        assert all(row["tpot_ms"] > 0 for row in rows)
    apart = r["distance"]
    assert apart["rows"].keys() == {str(each) for each in methods.DISTANCES} and apart["share"] in r["behind"]
    default = r["behind"][apart["share"]]["finemoe"]  # the same recording, named by its default distance
    assert {**apart["rows"]["3"], "engine": None} == {**default, "engine": None}
    waited = {n + WAITED for n in some if n.startswith(("expert_map", "routing_path"))}
    for row in r["prefetchers"].values():
        assert row.keys() == {"none", ORACLE, *some, *waited}
        assert row[ORACLE]["tpot_ms"] <= min(each["tpot_ms"] for each in row.values())
        assert row["none"]["prefetch_mb"] == 0.0 < row["gate"]["prefetch_mb"]
        assert {name for name, each in row.items() if "engine" in each} == {"none", *some}
        assert all(each["engine"]["tpot_ms"] > 0.0 for each in row.values() if "engine" in each)
    assert r["clock"].keys() == r["prefetchers"].keys()
    for share, clock in r["clock"].items():
        lived = r["prefetchers"][share]["none"]["engine"]
        busy_ms = clock["compute_ms"] + clock["miss_ms"] * lived["misses"]
        assert busy_ms == pytest.approx(max(lived["busy_ms"], clock["compute_ms"])), "a replayed token is as busy"
    assert "simulated" in r["simulated"]
    for share, of in r["hit_blocks"]["layer"].items():
        assert sum(of["lru"]) / len(of["lru"]) == pytest.approx(r["hit_rate"]["layer"][share]["lru"], abs=0.02)
    assert r["lcp_shares"].keys() == r["lcp_settings"].keys()
    assert all(name in one.text for name in ("Belady (forced admission)", "Belady with bypass", *waited))


@pytest.mark.long(0.2)
def test_lossy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossy, "calibrated", calibrated)
    monkeypatch.setattr(lossy, "RESIDENCIES", (0.75,))
    one = tried("lossy", tmp_path)
    r, found = one.result, one.result["speculating"]
    assert [row["mode"] for row in r["rows"]] == ["exact", "drop", "execute_gate"]
    assert r["rows"][0]["kl"] == 0 and r["rows"][1]["saved"] == 1.0 and r["emulated"]
    by_layer = (*found["cosine"].values(), *found["recall"].values())
    assert {len(rates) for rates in by_layer} == {r["layers"] - 1}
    for row in found["tpot"].values():
        assert row["systems"].keys() == speculating.SYSTEMS.keys() and row["bound_ms"] > 0
        for of in row["systems"].values():
            assert of["tpot_ms"] == pytest.approx(of["compute_ms"] + of["stall_ms"] + of["idle_ms"])
        assert row["systems"]["on demand"]["gained_ms"] == 0
    assert all(len(row["blocks"]["exact_match"]) == 1 for row in r["rows"])
    assert all(len(of["tpot_rounds_ms"]) == 1 for row in found["tpot"].values() for of in row["systems"].values())
    assert not (tmp_path / "lossy" / "rows.jsonl").exists()


@pytest.mark.long(0.2)
def test_distance() -> None:
    one = tried("distance")
    rows = one.result["rows"]
    assert [(row["format"], row["dense"]) for row in rows] == [("int8", "checkpoint"), ("int8", "int8")]
    for row in rows if supported() else ():
        assert row["arithmetic"] == "fast" and row["distance"]["tokens"] == one.result["tokens"] == 24
        assert 0 < row["distance"]["kl"] < 0.1
    if supported():
        assert rows[0]["fp32"].keys() == {"reference", "fast", "both"} and rows[1]["fp32"] is None
        assert all(0 < kl < 0.1 for kl in rows[0]["fp32"].values())
    assert "int8" in one.text


@pytest.mark.long(0.3)
def test_invariance() -> None:
    one = tried("invariance")
    fast, reference = (one.result["arithmetics"][name] for name in ("fast", "reference"))
    assert fast["runs"] == reference["runs"] == 16 and fast["logits"] == reference["logits"] > 0
    if supported():
        assert fast["arithmetic"] == "fast" and fast["differing"] == 0 < reference["differing"]
    for values in (("budget 25%",), ("threads 1", "threads 2"), ("reuse False", "reuse True")):
        assert sum(fast["of"][value][0] for value in values) == fast["logits"], "each run is in one row"
    assert f"0 of {fast['logits']:,}" in one.text or not supported()


@pytest.mark.long(0.5)
def test_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"model": "generated", "budgets": "50%,5MB"}
    with monkeypatch.context() as broken:  # it is interrupted after some rounds, and continues
        broken.setattr(systems, "gather", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            suite("systems").run(small=True, keep=tmp_path, say=said.append, **options)
    small = [one for one in PRESETS if one.name in systems.SMALL_PRESETS]
    compared = {one.name for one in systems.systems(small)}  # each as in its paper, and some with our guard
    count = 1 + 2 * len(compared)
    measured = [line for line in said if f" of {count}: " in line]
    assert len(measured) == count
    one = tried("systems", tmp_path, **options)
    r = one.result
    assert f"{len(measured)} measurements are there already" in one.said
    assert not [line for line in one.said if f" of {count}: " in line or line.startswith("calibrating")]
    assert r["systems"].keys() == r["titles"].keys() == compared > {one.name for one in small}
    assert r["budgets"]["50%"]["share"] == 0.5 and r["link"] == "emulated"
    for name, row in r["systems"].items():
        assert row.keys() == r["budgets"].keys() == r["bounds"].keys()
        for of in row.values():
            if of["problem"]:
                assert "too small" in of["problem"] and of is row["5000000"]
                continue
            assert of["tpot_ms"] == pytest.approx(of["compute_ms"] + of["stall_ms"] + of["idle_ms"])
            assert of["tokens"] == r["tokens"] and of["ttft_ms"] > 0
            assert of["exact"] == (name != "speculating_execute") == (of["quality"] is None)
    whole = r["systems"][systems.WHOLE_MOEPIC]["50%"]
    assert len(whole["tpot_rounds_ms"]) == len(whole["ttft_rounds_ms"]) == 1 and not whole["problem"]
    assert r["resident"]["hit_rate"] == 1.0 and r["exact_quality"]["kl"] == 0.0
    judged = r["systems"]["speculating_execute"]["50%"]["quality"]
    assert judged["kl"] > 0 and judged["exact_match"] is None  # there are no questions for a generated model
    assert {"tpot_ms", "hit_rate", "kl", "demand_bytes"} <= r["units"].keys()
    assert len(tpot_over_budgets(r, True).data) > len(systems.SMALL_PRESETS)
