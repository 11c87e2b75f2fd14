"""`plan` on the command line: from a trace or a profile, a budget or a speed; what it says, keeps and refuses."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from app import cli
from core.policy.allocation.slot_allocation import place
from core.profile import load, save
from core.settings.config import Settings
from tests.cli.printed import EXPERTS, LAYERS, K, printed
from tests.profiles import profile_of
from tests.simulate.test_engine import routes

result = partial(printed, "plan")

TIMES = "--att-ms 0.5 --moe-ms 1 --head-ms 0.5 --load-ms 2".split()


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    found = profile_of(
        LAYERS,
        EXPERTS,
        K,
        counts=rng.integers(0, 100, (LAYERS, EXPERTS)),
        gate_recall=np.array([np.nan, 0.4, 0.9], np.float32),
        similarity=np.ones(LAYERS - 1, np.float32),
        times={"att": 0.5, "moe": 1.0, "head": 0.5, "load": 2.0},
        settings={"times": {"link": "emulated", "load_from": "memory"}, "device": "cpu"},
    )
    save(found, tmp_path / "p")
    return tmp_path / "p"


def test_from_a_profile_alone(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, table = result(capsys, "--profile", profile, "--budget", "50%")
    assert found["budget"] == {"experts": 24, "buffer": K, "bytes": None}
    assert sum(found["plan"]["slots"]) == pytest.approx(24 - K)
    assert found["tpot_ms"] == pytest.approx(5 + sum(found["plan"]["exposed_ms"]))
    assert len(found["compared_ms"]) == 4 and found["tpot_ms"] <= found["compared_ms"]["even, each layer's best split"]
    assert found["statistics"]["recall"] == pytest.approx([0.0, 0.4, 0.9])
    for words in (
        "over an emulated link",
        "400 tokens in the profile",
        "24 of 48 experts, 50.0%",
        "AdapMoE",
        "part res",
    ):
        assert words in table
    assert load(profile).plan is None
    whole, _ = result(capsys, "--profile", profile, "--theta", 1, "--load-ms", 3, "--save")
    assert set(whole["plan"]["theta"]) == {1.0} and sum(whole["plan"]["slots"]) == 24
    assert whole["budget"]["buffer"] == 0 and set(whole["compared_ms"]) == {
        "even, whole experts",
        "AdapMoE, whole experts",
    }
    assert whole["times"]["load_ms"] == 3.0 and min(whole["plan"]["slots"]) >= K
    kept = load(profile).plan
    assert kept is not None and kept.as_json() == whole["plan"]


def test_the_prefetch_buffer_is_the_engines(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (0, 5):
        found, table = result(capsys, "--profile", profile, "--set", f"buffer={asked}")
        engine = place(Settings({"buffer": asked}).cache, LAYERS, EXPERTS, K, None, 4)
        assert found["budget"]["buffer"] == engine.transit == (asked or K)
        assert f"{engine.transit} of them the prefetch buffer" in table


def test_the_least_budget_for_a_speed(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, _ = result(capsys, "--profile", profile, "--budget", "20%")
    target_ms = slow["tpot_ms"] - 0.5
    found, table = result(capsys, "--profile", profile, "--tpot", f"{target_ms}ms")
    assert found["target_ms"] == pytest.approx(target_ms) and found["tpot_ms"] <= target_ms
    assert found["budget"]["experts"] > slow["budget"]["experts"] and "Least budget for" in table
    same, _ = result(capsys, "--profile", profile, "--tpot", f"{target_ms / 1000}s")
    assert same["plan"] == found["plan"]
    assert cli.main(["plan", "--profile", str(profile), "--tpot", "4"]) != 0
    assert "No budget reaches 4 ms a token" in capsys.readouterr().err


def test_of_a_trace_with_and_without_a_profile(trace: Path, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone, table = result(capsys, "--trace", trace, *TIMES, "--tokens", 100)
    assert alone["statistics"]["tokens"] == 100 and "no predictions" in table and "as given" in table
    both, _ = result(capsys, "--trace", trace, "--profile", profile)
    assert both["statistics"]["tokens"] == 200 and both["statistics"]["recall"][2] == pytest.approx(0.9)
    scarce = ("--trace", trace, "--profile", profile, "--budget", "30%")
    usual, other = result(capsys, *scarce)[0], result(capsys, *scarce, "--set", "eviction.lcp.omega=1")[0]
    assert other["plan"] != usual["plan"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "There is nothing to plan from"),
        ("--trace T", "Without measured times, give --att-ms, --moe-ms, --head-ms, --load-ms"),
        ("--profile P --budget 6.5GB", "needs --model"),
        ("--profile P --budget 0%", "a token uses 2 in a layer"),
        ("--profile P --theta 1 --budget 5%", "3 layers keep at least 2 each"),
        ("--profile P --theta 2", "not a number from 0 to 1"),
        ("--profile P --tpot soon", "not a time"),
        ("--trace T --profile P --eviction psychic", "eviction"),
        ("--profile P --set seed=3", "no use for seed"),
        ("--profile P --set buffer=1", "A prefetch buffer of 1 experts is too small"),
        ("--profile Q", "There is no profile"),
        ("--trace T --att-ms 1 --moe-ms 1 --head-ms 1 --load-ms 1 --save", "no profile to keep the plan in"),
    ],
)
def test_errors_in_the_users_words(
    words: str, why: str, trace: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = {"T": str(trace), "P": str(profile), "Q": str(tmp_path / "none")}
    with pytest.raises(SystemExit, match=r"^2$"):  # of argparse, or of ours
        raise SystemExit(cli.main(["plan", *(at.get(word, word) for word in words.split())]))
    assert why in capsys.readouterr().err


def test_measured_curves_come_before_guessed_ones(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = load(profile)
    hit = np.tile(np.linspace(0, 1, EXPERTS + 1, dtype=np.float32), (LAYERS, 1))
    some = np.full((LAYERS, K), 0.25, np.float32)
    cached = np.repeat(hit[:, :, None], K, 2)
    about = {**found.settings, "curves": {"tokens": 77, "eviction": "lcp"}}
    save(replace(found, curve_hit=hit, curve_chosen=some, curve_cached=cached, settings=about), profile)
    measured, table = result(capsys, "--profile", profile)
    assert measured["statistics"]["tokens"] == 77 and measured["statistics"]["recall"] == [0.25] * LAYERS
    assert "77 tokens that calibration read, LCP" in table
    other, table = result(capsys, "--profile", profile, "--eviction", "lru")
    assert "400 tokens in the profile" in table and other["statistics"]["recall"] != [0.25] * LAYERS


def test_a_profile_without_uses_tells_nothing(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(replace(load(profile), counts=None), profile)
    assert cli.main(["plan", "--profile", str(profile)]) == 2
    assert "There is nothing to plan from" in capsys.readouterr().err


def test_bytes_of_a_model(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    assert cli.main(["plan", "--trace", str(trace), "--model", "demo", *TIMES]) == 2
    assert "demo has 6 layers of 32 experts, and what is known is of 3 of 16" in capsys.readouterr().err
    np.savez(tmp_path / "demo.npz", experts=routes(0, 60, 32, 6, 4).transpose(1, 0, 2))
    half, table = result(capsys, "--trace", tmp_path / "demo.npz", "--model", "demo", *TIMES)
    assert half["budget"]["experts"] == 96 and "MB in all" in table
    size = half["budget"]["bytes"]
    same, _ = result(capsys, "--trace", tmp_path / "demo.npz", "--model", "demo", *TIMES, "--budget", size)
    assert 0 < same["budget"]["experts"] < 192 and 0.9 * size < same["budget"]["bytes"] <= size
