"""Every suite of speed, far too small to mean anything: its result is JSON with what it was measured on, its figures
fit together, and its table shows them."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.harness import process, protocol
from bench.harness.run import Suite
from bench.models import fixtures
from bench.models.sizes import SMALL
from bench.speed import auto, batch, host, prefill, split, tiers, worker
from bench.speed import share as share_suite
from bench.suites import SUITES, suite
from core.capacity import fit
from core.errors import BudgetError
from core.system.native.compile import supported
from tests.bench import other
from tests.bench.tried import tried


@pytest.mark.parametrize("name", SUITES)
def test_the_command_line_knows_the_options_of_a_suite(name: str) -> None:
    found, (_, listed) = suite(name), SUITES[name]
    assert isinstance(found, Suite) and found.small.keys() <= found.options.keys()
    assert {*listed.split()} - {"keep", "small"} <= found.options.keys()


@pytest.mark.long(0.3)
@pytest.mark.usefixtures("other_programs")
def test_quick() -> None:
    one = tried("quick", peers="llama")
    r = one.result
    assert r["peers_tpot_ms"] == {"llama.cpp BF16": pytest.approx(0.1)}
    assert r["about"]["Moestro"]["bits"] == pytest.approx(16, rel=0.02) and r["about"]["Moestro"]["kl"] < 0.01
    assert 0 < r["peers_over"]["llama.cpp BF16"]["ratio"] < 1 and "tokens a second over llama.cpp BF16: 0." in one.text
    assert r["layers"] == 6 and r["versions"] and r["cores"] and r["rounds"] == 1
    assert (
        r["resident_ratio"] > 0
        and r["systems"]["lru"]["copies_per_token"] <= r["systems"]["ondemand"]["copies_per_token"]
    )
    assert r["bound_tpot_ms"] >= r["resident_tpot_ms"] and r["belady_misses_per_token"] >= 0


@pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
@pytest.mark.long(0.5)
def test_host() -> None:
    one = tried("host")
    for of in one.result["links"].values():
        assert of["differing"] == 0 and all(of[kind]["tpot_ms"]["median"] > 0 for kind in host.KINDS)
        assert of["wait"]["host_computed"] == 0 < of["host"]["host_computed"]
    assert "Balance" in one.text and "over the better" in one.text
    lines = ElementTree.fromstring(host.picture(one.result)).findall("{*}polyline")
    assert [len(line.get("points", "").split()) for line in lines] == [len(one.result["links"])] * len(host.KINDS)


@pytest.mark.long(0.2)
def test_share() -> None:
    one = tried("share")
    r = one.result
    assert r["budget"] == "100%" and r["resident"] == r["hit_rate"]["median"] == 1.0
    assert r["tok_s"]["median"] > 0 < r["ttft_ms"]["median"] and r["prompt_tokens"] == share_suite.SMALL_PROMPT
    assert "tok/s" in one.text and "6 x 32 experts" in one.text
    drawn = ElementTree.fromstring(share_suite.picture({**r, "model": "a <b> & c"}))
    assert any("a <b> & c" in (text.text or "") for text in drawn)


@pytest.mark.long(1)
def test_auto() -> None:
    one = tried("auto")
    (cell,) = one.result["cells"].values()
    assert cell["best"] in auto.FIXED and cell["auto"]["median"] > 0
    assert one.result["worst"] == one.result["median"] == cell["over_best"] and "EMULATED" in one.text


@pytest.mark.long(0.1)
def test_auto_goes_on_where_it_broke_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of one budget are measured once, until all have been."""
    answered = list[str]()

    def answer(engine: Any, kind: str, where: Any, prompt: Any, tokens: int) -> auto.Answer:
        answered.append(where["budget"])
        return auto.Answer([1.0] * tokens, 0)

    monkeypatch.setattr(auto, "_answer", answer)
    monkeypatch.setattr(auto, "LINKS", (0.0,))
    sizes = {"keep": tmp_path, "rounds": 1, "tokens": 2, "drawn": 0}
    for budgets, measured in (("30%", {"30%"}), ("30%,50%", {"50%"}), (auto.BUDGETS, {"15%", "75%"}), ("15%", {"15%"})):
        found = auto.SUITE.run(**sizes, budgets=budgets)
        assert {*answered} == measured and len(found["cells"]) == len(budgets.split(","))
        answered.clear()


def test_what_was_fast_by_chance_is_not_the_best() -> None:
    """Each round is held against the setting that the others show to be the fastest."""
    times = {kind: [20.0] * 5 for kind in auto.FIXED}
    times |= {"lru": [1.0, 9.0, 9.0, 9.0, 9.0], "lcp": [5.0, 5.0, 6.0, 6.0, 7.0]}
    assert auto.best_of_others(times) == times["lcp"]
    draw = Random(0)
    alike = {kind: [draw.gauss(1.0, 0.1) for _ in range(41)] for kind in auto.FIXED}
    assert abs(median(auto.best_of_others(alike)) - 1.0) < 0.03
    assert auto.best_of_others({kind: [at] for at, kind in enumerate(auto.FIXED)}) == [0]


@pytest.mark.long(2)
@pytest.mark.parametrize("model", ["demo", "demo-head"])
def test_speculation(model: str) -> None:
    """A trained head guesses in the texts that the model writes, and no kind changes a bit."""
    one = tried("speculation", model=model)
    assert {row["text"] for row in one.result["rows"]} == {"repeated", "edited", "held out", "own"}
    assert not any(row["differing"] for row in one.result["rows"])
    assert all(row["lookup"]["tokens_per_pass"] >= 1 for row in one.result["rows"])
    assert ("head faster" in one.text) == (model == "demo-head")
    if model == "demo-head":
        assert any(row["mtp"]["drafted"] for row in one.result["rows"])


@pytest.mark.long(0.3)
def test_dispatch() -> None:
    one = tried("dispatch")
    assert list(one.result["experts"]) == ["16", "64"] and one.result["growth"] > 0 and "goals" in one.text
    for row in one.result["experts"].values():
        assert row["model"] > row["router"] > 0 and row["step"] > 0 and row["reading"] > 0
        assert {"gate", "random"} <= row["predictors"].keys()


@pytest.mark.long(1)
def test_batch(tmp_path: Path) -> None:
    one = tried("batch", tmp_path)
    r = one.result
    for place in ("link", "disk"):
        for share, rows in r[place].items():
            assert rows["1"]["tokens_per_expert"] == 1.0 and rows["4"]["union"] > rows["1"]["union"]
            assert (rows["1"]["bytes_per_token"] > 0) == (share != "100%")
            assert all(row["least_bytes_per_token"] <= row["bytes_per_token"] for row in rows.values())
    assert {*r["schedulers"]} == {*batch.SCHEDULERS, *batch.BY_NETWORK}
    assert all(len(values) == 1 for values in r["shares"].values()) and r["shares"]["speedup"][0] > 0
    assert 0 < r["gain_frugal"] <= r["gain_bound"]
    assert "16 at a time over one" in one.text and "two batches of 2" in one.text


@pytest.mark.long(1)
def test_split(tmp_path: Path) -> None:
    one = tried("split", tmp_path)
    r = one.result
    assert r["links"].keys() == {*split.LINKS, "disk"} and r["blocks"] == 3
    thetas = [f"theta {n / 3:.2f}" for n in range(4)]
    for name, link in r["links"].items():
        assert link["rows"].keys() == {*split.PLAIN, *split.PLANNED, *thetas}
        assert all(not row["problem"] for row in link["rows"].values())
        assert link["emulated"] == (name != "disk") and link["gain"] > 0
        assert link["rows"]["theta 0.33"]["top_hits"] > 0 == link["rows"]["lru"]["top_hits"]
        assert link["predicted_over_measured"].keys() == {"moepic_split", *thetas}
    assert len(r["expected"]) == len(split.LOADS) * len(split.SHARES)
    least, most = min(split.LOADS), max(split.SHARES)
    resident = [one for one in r["expected"] if one["load"] == least and one["share"] == most]
    assert all(one["whole_ms"] == pytest.approx(one["plan_ms"], rel=0.05) for one in resident), "nothing to save"
    assert "times as fast" in one.text and "not measured" in one.text


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[protocol.Job]:
    """Measurements without processes of their own: the jobs are real, what a process would add is made up."""
    asked: list[protocol.Job] = []

    def measure(
        module: str, job: protocol.Job, files: Sequence[Path], request: protocol.Job | None = None, **more: Any
    ) -> protocol.Job:
        assert all(file.exists() for file in files)
        asked.append(job)
        held = {f"peak_{name}": value for name, value in protocol.memory().items()}
        idle = {"idle_bytes": protocol.memory()["rss"], "stayed_cached": 0}
        return {**{tiers.WORKER: worker, tiers.PEER: other}[module].prepare(job)(request or {}), **held, **idle}

    monkeypatch.setattr(process, "measure", measure)
    monkeypatch.setattr(fixtures, "measure", measure)
    monkeypatch.setattr(fixtures.Fixtures, "threads", [1])
    monkeypatch.setattr(fixtures, "disk_gbps", lambda pack: {"1 thread": 1.0})
    return asked


@pytest.mark.long(0.2)
@pytest.mark.usefixtures("other_programs")
def test_tiers(tmp_path: Path, in_process: list[protocol.Job], monkeypatch: pytest.MonkeyPatch) -> None:
    one, budgets = tried("tiers", tmp_path, tokens=4, budgets="100%,50%", peers="all"), ["100%", "50%"]
    r, others = one.result, ["ik", "llama"]  # where everything is resident, as nothing is limited here
    more = ["moestro", "fit"]  # below that
    whole = ["moestro", "transformers", "fit", *others, *more, "moestro", "moestro", "fit", *others, *more]
    assert [job.get("kind") or job["peer"] for job in in_process] == ["import", "import", *whole]
    resident = [job for job in in_process if job.get("budget") == "100%"]
    assert [job["dense"] for job in resident if job["kind"] == "moestro"] == ["checkpoint", "int4-g64", "checkpoint"]
    assert all([*of] == budgets for of in r["tok_s"].values())
    theirs = {"ik_llama.cpp", "llama.cpp"}
    assert r["tok_s"]["bf16"]["100%"].keys() == {"moestro", "transformers", *theirs}
    assert r["tok_s"]["int4"]["100%"].keys() == {"moestro", "moestro, dense layers as in the checkpoint", *theirs}
    assert r["tok_s"]["int4"]["100%"]["llama.cpp"] == pytest.approx(1e4)
    assert 0 < r["over"]["int4, 100%, ik_llama.cpp"]["ratio"] < 1 and "int4, 50%, ik_llama.cpp" not in r["over"]
    assert all(of["moestro"]["kl"] < 1 < of["llama.cpp"]["kl"] for of in r["about"].values())
    assert r["fit"].keys() == {f"{name}, {budget}" for name in ("bf16", "int4") for budget in budgets}
    assert all(of["estimated_bytes"] >= of["counted_bytes"] > 0 for of in r["fit"].values())
    assert r["tok_s"]["int4"]["50%"]["moestro"] > 0
    blob = SMALL.expert_bytes // SMALL.layers // SMALL.experts
    for name, size in (("bf16", blob), ("int4", blob * 4.5 / 16)):
        detail = r["moestro"][name]["50%"]
        assert detail["slots"] == SMALL.layers * SMALL.experts // 2
        assert detail["blob_bytes"] == pytest.approx(size, rel=0.03)
        assert r["misses_x_blob"][name]["50%"] == detail["disk_misses_per_token"] * detail["blob_bytes"] > 0
        assert r["bytes_per_token"][name]["50%"] == pytest.approx(r["misses_x_blob"][name]["50%"], rel=0.05)
        assert r["bytes_per_token"][name]["100%"] == 0
        assert detail["belady_misses_per_token"] <= detail["disk_misses_per_token"]
    assert r["memory_limit_method"].startswith("none: ")
    assert r["routing"]["by_chance"] == 0.25 and 0 < r["routing"]["repeats_of_previous_token"] <= 1
    assert "not measured" in one.text and r["routing"]["says"] in one.text
    job = next(job for job in in_process if (job.get("kind"), job.get("budget")) == ("moestro", "50%"))
    budget = int(r["moestro"]["bf16"]["50%"]["budget_bytes"])
    monkeypatch.setattr("core.capacity.free_memory.free_bytes", lambda device: (budget, budget))
    monkeypatch.setattr(fit, "HOST_MARGIN", fit.HOST_MARGIN)  # which a group sets to 0
    with pytest.raises(BudgetError, match="host memory"):
        worker.prepare(job)({})
    assert worker.prepare({**job, "group": "with a limit"})({})["tok_s"] > 0, "no margin is left in a group"


@pytest.mark.long(0.3)
@pytest.mark.usefixtures("other_programs")
def test_prefill(tmp_path: Path) -> None:
    one = tried("prefill", tmp_path, peers="all")
    r, lengths = one.result, [str(length) for length in prefill.LENGTHS[True]]
    for name, budget in prefill.OURS:
        assert [*r["prefill_ratio"][name][budget]] == lengths
        assert all(ratio > 0 for ratio in r["prefill_ratio"][name][budget].values())
        assert r["pieces"][f"{name} {budget}"] >= prefill.LENGTHS[True][-1]
    for name in prefill.FORMATS:
        assert set(r["missing_bytes"][name]["100%"].values()) == {0}
        assert set(r["read_over_missing"][name]["50%"].values()) <= {1.0, None}
        assert any(r["missing_bytes"][name]["50%"].values())
    assert all(same for by_length in r["same_bits"].values() for same in by_length.values())
    assert sum("importing" in text for text in one.said) == len(prefill.FORMATS)
    assert r["tok_s"]["llama.cpp int4"]["16"] == pytest.approx(16e3)
    assert 0 < r["over"]["int4 at 100% over llama.cpp"]["16"]["ratio"] < 1
    assert r["about"].keys() == {"bf16", "int4", *(f"{n}llama.cpp {f}" for n in ("", "ik_") for f in prefill.FORMATS)}
    assert "int4 at 100% over ik_llama.cpp: 16 tokens 0." in one.text
    assert "the same" in one.text and "DIFFERENT" not in one.text
