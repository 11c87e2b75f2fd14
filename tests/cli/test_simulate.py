"""`simulate` on the command line: a table for people, one line of JSON for programs, errors in the user's words."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from app import cli
from core.profile import save as store
from core.profile.trace import ArrayTrace
from core.profile.trace.file import save
from core.settings.registry import variants
from tests.cli.printed import EXPERTS, LAYERS, K, printed
from tests.profiles import profile_of
from tests.simulate.test_engine import routes

result = partial(printed, "simulate")


def test_every_policy_and_size_beside_the_bound(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, table = result(capsys, "--trace", trace, "--slots", "25%,50%,75%", "--policies", "all")
    names, sizes = [v.name for v in variants("eviction")], ["25%", "50%", "75%"]
    assert list(found["hit_rate"]) == names and len(names) == 11
    assert all(list(found["hit_rate"][name]) == sizes for name in names)
    assert list(found["belady"]) == sizes and found["slots"] == {"25%": 12, "50%": 24, "75%": 36}
    for size in sizes:
        assert all(found["hit_rate"][name][size] <= found["belady"][size] for name in names)
        assert found["belady"][size] < found["belady_warm"][size] <= 1
        assert 0 < found["belady_bypass"][size] <= 1
    assert found["bypass"] is False
    assert (found["tokens"], found["layers"], found["experts"], found["top_k"]) == (200, LAYERS, EXPERTS, K)
    assert 0 < found["seconds"] < 600 and "tpot_ms" not in found
    assert all(name in table for name in [*names, "belady", "25% (12)", "200 tokens"])


@pytest.mark.long(0.1)
def test_bypass_beside_its_own_bound(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--trace", trace, "--slots", "6,7,8,25%,50%", "--policies", "lfu,lru"
    off, table = result(capsys, *words)
    assert list(off["belady"]) == ["6", "7", "8", "25%", "50%"]
    assert list(off["belady_bypass"]) == ["8", "25%", "50%"]  # 6 for a token, and 2 set aside
    assert "forced admission" in table and "--bypass on" in table
    assert cli.main(["simulate", *map(str, words), "--bypass", "on"]) != 0
    assert "Bypass sets 2 slots aside" in capsys.readouterr().err
    words = "--trace", trace, "--slots", "25%,50%", "--policies", "lfu,lru"
    on, _ = result(capsys, *words, "--bypass", "on")
    assert on["bypass"] is True
    for size in ("25%", "50%"):
        assert all(on[bound][size] == off[bound][size] for bound in ("belady", "belady_bypass"))
        assert off["hit_rate"]["lfu"][size] != on["hit_rate"]["lfu"][size] <= on["belady_bypass"][size]
    pool, _ = result(capsys, *words, "--bypass", "on", "--scope", "global")
    assert pool["belady_bypass"] == {}
    assert pool["hit_rate"] == result(capsys, *words, "--scope", "global")[0]["hit_rate"]


def test_choices_act(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, _ = result(
        capsys, "--trace", trace, "--slots", "24", "--policies", "lru, lcp,belady", "--set", "eviction.lcp.omega=1"
    )
    assert list(few["hit_rate"]) == ["lru", "lcp"] and list(few["belady"]) == ["24"]
    other, _ = result(capsys, "--trace", trace, "--slots", "24", "--policies", "lcp")
    assert other["hit_rate"]["lcp"] != few["hit_rate"]["lcp"]
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


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--slots 25,x%", "'x%' is not understood"),
        ("--slots 110%", "not between one expert and all 48"),
        ("--slots 0", "not between one"),
        ("--slots 1.5", "not understood"),
        ("--slots 5", "need at least 6"),
        ("--policies lru,psychic", "no eviction called 'psychic'"),
        ("--policies lru --set seed=3", "no use for seed"),
        ("--policies lru --set miss_placement=host", "no use for miss_placement"),
        ("--set eviction.lcp.omega=-1", "between 1 and"),
        ("--compute-ms 5", "give --compute-ms and --load-ms"),
        ("--load-ms -1", "milliseconds"),
        ("--predictors recent", "or a --profile with measured times"),
        ("--predictors psychic --compute-ms 5 --load-ms 1", "no predictor called 'psychic'"),
        ("--predictors estimator --compute-ms 5 --load-ms 1", "hidden states"),
        ("--experts 3", "but 3 experts were said"),
        ("--trace nowhere.npz", "There is no trace nowhere.npz"),
    ],
)
def test_errors_in_the_users_words(trace: Path, words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):  # of argparse, or of ours
        raise SystemExit(cli.main(["simulate", "--trace", str(trace), *words.split()]))
    assert why in capsys.readouterr().err


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Of the model that `trace` could be of: what it used, and a gate that guesses half of it."""
    ids = routes(0, 200, EXPERTS, LAYERS, K)
    counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])
    gate = {"gate_recall": np.array([np.nan, 0.5, 0.5], np.float32), "similarity": np.array([0.5, 0.5], np.float32)}
    store(profile_of(LAYERS, EXPERTS, K, tokens=200, counts=counts, **gate), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


TIMES = "--compute-ms", 6, "--load-ms", 1.5


def test_a_preset_replays_its_cache_and_its_prefetcher(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = "--trace", trace, "--slots", "25%", *TIMES
    found, table = result(capsys, *given, "--preset", "moe_infinity")
    by_hand, _ = result(capsys, *given, "--policies", "lfu", "--scope", "global", "--predictors", "request")
    assert list(found["hit_rate"]) == ["lfu"] and found["scope"] == "global"
    assert list(found["prefetching"]["lfu"]["25%"]) == ["none", "request", "oracle"] and "request" in table
    assert (found["hit_rate"], found["prefetching"]) == (by_hand["hit_rate"], by_hand["prefetching"])


@pytest.mark.long(0.1)
def test_what_is_asked_goes_before_a_preset(trace: Path, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = "--trace", trace, "--slots", "25%", *TIMES
    ring, _ = result(capsys, *given, "--preset", "se_moe")
    assert ring["prefetching"]["none"]["25%"]["all_next"]["issued"] > 0 == ring["hit_rate"]["none"]["25%"]
    moved, _ = result(capsys, *given, "--preset", "moe_infinity", "--policies", "lru,lfu", "--scope", "layer")
    assert list(moved["hit_rate"]) == list(moved["prefetching"]) == ["lru", "lfu"] and moved["scope"] == "layer"
    other, _ = result(capsys, *given, "--preset", "moe_infinity", "--predictors", "recent")
    assert list(other["prefetching"]["lfu"]["25%"]) == ["none", "recent", "oracle"]
    bare, _ = result(capsys, *given, "--preset", "on_demand")
    assert "prefetching" not in bare and set(bare["hit_rate"]["none"].values()) == {0.0}
    alone, _ = result(capsys, "--trace", trace, "--preset", "adapmoe", "--profile", profile, "--predictors", "none")
    assert alone["layer_slots"] == "adapmoe" and list(alone["hit_rate"]) == ["lru"] and "prefetching" not in alone


@pytest.mark.long(0.1)
def test_a_presets_settings_of_prefetching_act_and_give_way(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--trace", trace, "--slots", "25%", *TIMES, "--preset", "auto", "--predictors", "transitions"
    for name, predictor in (("prefetch_deadline", "transitions"), ("prefetch_guard", "all_next")):
        words = (*words[:-1], predictor)
        plain = result(capsys, *words)[0]["prefetching"]
        moved, _ = result(capsys, *words, f"--{name.replace('_', '-')}", "off")
        assert moved["prefetching"] != plain, name
        assert moved["prefetching"] == result(capsys, *words, "--set", f"{name}=off")[0]["prefetching"]
    assert cli.main(["simulate", *map(str, words)]) == 0
    assert "prefetch_auto" in capsys.readouterr().err
    lossy = "--preset", "speculating_execute", "--predictors", "recent"
    assert cli.main(["simulate", *map(str, words[:8]), *lossy]) == 0
    assert "compute lossily is not simulated" in capsys.readouterr().err


def test_slots_by_use_and_pins_act(trace: Path, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--trace", trace, "--policies", "static", "--profile", profile, "--slots", "14", "--start", "filled"
    even, _ = result(capsys, *options)
    by_use, _ = result(capsys, *options, "--layer-slots", "profile")
    assert by_use["hit_rate"]["static"]["14"] != even["hit_rate"]["static"]["14"]
    worst, _ = result(capsys, *options, "--pins", "0:15, 1:15, 2:15")
    assert worst["hit_rate"]["static"]["14"] != even["hit_rate"]["static"]["14"]
    for name in ("static", "belady"):
        pinned = worst["hit_rate"][name] if name == "static" else worst["belady"]
        assert 0 < pinned["14"] < 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--layer-slots profile", "needs a profile of this model"),
        ("--preset adapmoe --predictors none", "needs a profile of this model"),
        ("--preset moe_infinity", "To predict speed, give --compute-ms"),
        ("--preset moe_infinity", "--predictors none simulates its cache alone"),
        ("--preset mixtral_offloading --compute-ms 6 --load-ms 1", "hidden states"),
        ("--preset mixtral_offloading --compute-ms 6 --load-ms 1", "--predictors none simulates its cache alone"),
        ("--policies lru --prefetch-guard off", "no use for prefetch_guard"),
        ("--pins 9:0", "this model has layers 0 to 2"),
        ("--pins top:1", "needs a profile"),
        ("--slots 6 --pins 0:1", "Layer 0 has 2 slots"),
        ("--profile nowhere", "There is no profile nowhere"),
    ],
)
def test_what_cannot_be_placed_is_said(trace: Path, capsys: pytest.CaptureFixture[str], words: str, why: str) -> None:
    assert cli.main(["simulate", "--trace", str(trace), *words.split()]) == 2
    assert why in capsys.readouterr().err


def test_another_models_profile(trace: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "other.npz", experts=routes(0, 20, 8, 2, K).transpose(1, 0, 2))
    assert cli.main(["simulate", "--trace", str(tmp_path / "other.npz"), "--profile", str(profile)]) == 2
    assert "layers of 16 experts" in capsys.readouterr().err


@pytest.mark.long(0.1)
def test_prefetchers_beside_what_perfect_prefetching_reaches(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trace", trace, "--slots", "25%,50%", "--predictors", "recent, none,transitions")
    words += (*"--compute-ms 6 --load-ms 2 --start filled".split(),)
    found, table = result(capsys, *words)
    assert list(found["hit_rate"]) == list(found["prefetching"]) == ["lru"]  # unless others are named
    for size in ("25%", "50%"):
        by_name = found["prefetching"]["lru"][size]
        assert list(by_name) == ["none", "recent", "transitions", "oracle"]
        none, oracle = by_name["none"], by_name["oracle"]
        assert none["hit_rate"] == pytest.approx(found["hit_rate"]["lru"][size])
        assert none["tpot_ms"] == pytest.approx(6 + 2 * found["misses_per_token"]["lru"][size])
        assert none["net_ms"] == none["prefetch_bytes"] == 0 and none["recall_by_layer"] == [None] * LAYERS
        assert found["bound_ms"][size] <= oracle["tpot_ms"] + 1e-9 < none["tpot_ms"]
        assert oracle["recall_by_layer"] == [1.0] * LAYERS and oracle["wasted_bytes"] == 0
        assert by_name["transitions"]["prefetch_bytes"] == by_name["transitions"]["issued"] > 0
    assert all(word in table for word in ("transitions", "perfect prefetch", "bound", "50% (24)"))
    assert "prefetching" not in result(capsys, *words[:4])[0]


@pytest.mark.long(0.1)
def test_settings_of_prefetchers_and_times(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--trace", trace, "--predictors", "transitions", "--slots", "25%", "--policies", "lfru")
    given += ("--compute-ms", 6, "--load-ms", 3)
    plain, _ = result(capsys, *given)
    for pair in ("predictor.width=1", "prefetch_deadline=on", "prefetch_guard=off"):
        other, _ = result(capsys, *given, "--set", pair)
        assert other["prefetching"] != plain["prefetching"], pair
    lcp = [
        result(capsys, *given[:-6], "--policies", "lcp", *given[-4:], *more)[0]
        for more in ((), ("--set", "eviction.lcp.omega=3"))
    ]
    assert lcp[0]["prefetching"] != lcp[1]["prefetching"]
    passing, _ = result(capsys, *given, "--set", "bypass=on")
    beside, _ = result(capsys, *given, "--set", "bypass=on", "--set", "prefetch_beside=on")
    assert beside["prefetching"] != passing["prefetching"]
    times = {"att": 1.0, "moe": 0.8, "head": 0.6, "load": 3.0}
    store(profile_of(LAYERS, EXPERTS, K, times=times), tmp_path / "p")
    timed, _ = result(
        capsys, "--trace", trace, "--predictors", "transitions", "--policies", "lfu", "--profile", tmp_path / "p"
    )
    computed = timed["prefetching"]["lfu"]["50%"]["none"]["compute_ms"]
    assert computed == pytest.approx(LAYERS * 1.8 + 0.6)


@pytest.mark.long(0.1)
def test_all_means_those_that_the_trace_serves(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", str(trace), "--compute-ms", "6", "--load-ms", "1", "--predictors"]
    found, _ = result(capsys, *words, "all")
    by_name = found["prefetching"]["lru"]["50%"]
    assert {"none", "recent", "oracle"} <= set(by_name) and not {"gate", "estimator"} & set(by_name)
    capsys.readouterr()
    assert cli.main(["simulate", *words, "gate"]) == 2
    assert "hidden states" in capsys.readouterr().err
