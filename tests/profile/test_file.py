"""A profile on disk: what is written is read, what is damaged or of another model is refused, nothing is half done."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from core.errors import ProfileError
from core.policy.allocation.cache_plan import CachePlan
from core.profile import PARTS, Profile, check_model, load, profile_path, save
from core.profile.file import SUM, checksum
from core.profile.profile import KEY
from core.profile.summary import TITLES, describe

L, E, K, H, N = 3, 8, 2, 16, 5


def whole(seed: int = 0) -> Profile:
    rng = np.random.default_rng(seed)

    def some(*shape: int, dtype: str = "float32") -> Any:
        return rng.random(shape).astype(dtype)

    return Profile(
        "tiny",
        "ab" * 32,
        L,
        E,
        K,
        H,
        1234,
        "a text",
        "2026-01-02T03:04:05+00:00",
        counts=rng.integers(0, 1 << 40, (L, E)),
        pairs=some(L, E, E),
        pairs_weighted=some(L, E, E),
        defaults=some(L, E, H, dtype="float16"),
        gate_recall=np.array([np.nan, 0.5, 0.75], np.float32),
        default_recall=np.array([np.nan, 0.25, 0.5], np.float32),
        similarity=some(L - 1),
        tae=some(L, 101),
        tae_tempered=some(L, 5, 101),
        maps=some(N, L, E, dtype="float16"),
        map_keys=some(N, H, dtype="float16"),
        likeness=some(L, E, E, dtype="float16"),
        norms=some(L, E),
        peaks=some(L, E),
        curve_hit=some(L, E + 1),
        curve_chosen=some(L, K),
        curve_cached=some(L, E + 1, K),
        times={"att": 0.1, "moe": 0.25, "head": 1.5, "load": 2.0},
        nets={
            "estimator.a": torch.from_numpy(some(3, 4)),
            "path.tokens": torch.tensor([2**24 + 1, 5]),
            "path.b": torch.from_numpy(some(2)).bfloat16(),
        },
        settings={
            "estimator": {"width": 4},
            "path": {"d_model": 2},
            "recall": {"estimator": [None, 0.5, 0.25]},
            "times": {"link": "emulated"},
            "gathered": {part: {"tokens": seed} for part in PARTS},
        },
        plan=CachePlan((2.5, 1.0, 0.5), (5, 2, 1), (0.5, 0.5, 0.5), (0.0, 1.25, seed + 0.5), 4.0, 3),
    )


def same(a: Profile, b: Profile) -> None:
    for f in fields(Profile):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        elif f.name == "nets":
            assert x.keys() == y.keys() and all(torch.equal(x[n].float(), y[n].float()) for n in x)
        else:
            assert x == y, f.name


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = profile_path(tmp_path, "ab" * 32)
    assert file == tmp_path / "profiles" / "abababababababab.safetensors"
    save(whole(), file)
    back = load(file, model_hash="ab" * 32)
    same(whole(), back)
    assert back.nets["path.tokens"].dtype == torch.int64 and int(back.nets["path.tokens"][0]) == 2**24 + 1
    assert back.parts() == tuple(PARTS) and list(describe(back)) == list(TITLES) == list(PARTS)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    save(whole(1), file)  # over itself, also while it is open elsewhere
    same(whole(1), load(file))


@pytest.mark.parametrize("part", PARTS)
def test_any_part_may_be_missing(part: str, tmp_path: Path) -> None:
    blank: dict[str, Any] = dict.fromkeys(PARTS[part])
    nets = {n: t for n, t in whole().nets.items() if not n.startswith(part)}
    less = replace(whole(), **blank, nets=nets)
    save(less, tmp_path / "p")
    back = load(tmp_path / "p")
    same(less, back)
    assert not back.has(part) and back.parts() == tuple(p for p in PARTS if p != part)
    assert part not in describe(back)
    same(whole(), back.over(whole()))
    with pytest.raises(KeyError):
        back.has("luck")


def test_a_newer_profile_goes_over_an_older_one() -> None:
    fresh = replace(
        whole(1),
        tokens=7,
        defaults=None,
        nets={"path.b": torch.ones(2)},
        settings={"path": {"d_model": 3}, "gathered": {"counts": {"tokens": 1}}},
    )
    both, old = fresh.over(whole(0)), whole(0)
    assert both.tokens == 7 and both.counts is fresh.counts and both.plan == fresh.plan != old.plan
    assert replace(fresh, plan=None).over(old).plan == old.plan and not replace(old, plan=None).has("plan")
    np.testing.assert_array_equal(both.defaults, old.defaults)
    assert set(both.nets) == {"estimator.a", "path.b"} and torch.equal(both.nets["path.b"], torch.ones(2))
    assert both.settings["path"] == {"d_model": 3} and both.settings["estimator"] == {"width": 4}
    assert replace(fresh, tokens=0, source="").over(old).tokens == old.tokens == 1234  # of times measured again
    gathered = both.settings["gathered"]
    assert gathered == {"counts": {"tokens": 1}, "defaults": {"tokens": 0}, "estimator": {"tokens": 0}}


def test_another_models_profile_is_refused(tmp_path: Path) -> None:
    save(whole(), tmp_path / "p")
    with pytest.raises(ProfileError, match=r"measured on tiny \(abababababab\).*about mixtral \(cdcdcdcdcdcd\)"):
        load(tmp_path / "p", model_hash="cd" * 32, model="mixtral")
    with pytest.raises(ProfileError, match="says nothing about this model"):
        check_model(whole(), "cd" * 32)
    with pytest.raises(ProfileError, match="tiny"):
        whole().over(replace(whole(), model_hash="cd" * 32))


@pytest.mark.parametrize("at", [0.0, 0.01, 0.3, 0.6, 0.999, None])
def test_a_flipped_bit_is_found_and_half_a_file(at: float | None, tmp_path: Path) -> None:
    save(whole(), tmp_path / "p")
    data = bytearray((tmp_path / "p").read_bytes())
    if at is None:
        del data[len(data) // 2 :]
    else:
        data[int(at * len(data))] ^= 0x10
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(ProfileError, match=r"damaged|later version|another"):
        load(tmp_path / "p", model_hash="ab" * 32)


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\xff" * 64], ids=["empty", "nonsense", "noise"])
def test_what_is_no_profile_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(ProfileError, match="damaged"):
        load(tmp_path / "p")
    with pytest.raises(ProfileError, match="Calibrate the model first"):
        load(tmp_path / "nowhere")


def rewritten(path: Path, change: dict[str, object], arrays: dict[str, Any] | None = None) -> None:
    """The same file with another head, or other arrays, and a checksum that fits."""
    with safe_open(path, framework="numpy") as file:
        head = json.loads(file.metadata()[KEY])
        held = {name: file.get_tensor(name) for name in file.keys()} | (arrays or {})  # noqa: SIM118
        held = {name: array for name, array in held.items() if array is not None}
    text = json.dumps(head | change)
    save_file(held, path, {KEY: text, SUM: checksum(text, held)})


def test_a_later_version_and_wrong_shapes_are_refused(tmp_path: Path) -> None:
    save(whole(), tmp_path / "p")
    rewritten(tmp_path / "p", {"version": 2})
    with pytest.raises(ProfileError, match="later version"):
        load(tmp_path / "p")
    rewritten(tmp_path / "p", {"version": 1}, {"counts": np.zeros((L, E + 1), np.int64)})
    with pytest.raises(ProfileError, match=r"damaged \(counts is int64 \[3, 9\]"):
        load(tmp_path / "p")
    rewritten(tmp_path / "p", {}, {"counts": np.zeros((L, E), np.float64)})
    with pytest.raises(ProfileError, match="float64"):
        load(tmp_path / "p")


@pytest.mark.parametrize(
    ("said", "arrays", "why"),
    [
        ({"top_k": float("inf")}, {}, "top_k"),
        ({"top_k": True}, {}, "top_k"),
        ({"layers": 0}, {}, "layers"),
        ({"layers": "x"}, {}, "layers"),
        ({"experts": 2**80}, {}, "experts"),
        ({"hidden": -4}, {}, "hidden"),
        ({"tokens": None}, {}, "tokens"),
        ({"model": 7}, {}, "model"),
        ({"model_hash": -1}, {}, "model_hash"),
        ({"settings": False}, {}, "settings"),
        ({"settings": []}, {}, "settings"),
        ({"times": {"att": 0.1, "moe": "1"}}, {}, "times"),
        ({"settings": {"path": {"d_model": 2}}}, {}, "estimator"),
        ({"settings": {"estimator": {"width": "4"}}}, {}, "sizes"),
        ({"settings": {"estimator": {"quasi": 1}, "path": {}}}, {"defaults": None}, "default vectors that estimator"),
        ({}, {"counts": np.full((L, E), -1)}, "fewer than no"),
        ({}, {"peaks": np.full((L, E), -1.0, np.float32)}, "peaks"),
        ({}, {"pairs": np.full((L, E, E), np.inf, np.float32)}, "pairs"),
        ({}, {"tae": np.full((L, 101), np.nan, np.float32)}, "tae"),
        ({}, {"tae": None}, "only one of tae and tae_tempered"),
        ({}, {"gate_recall": None, "similarity": None}, "only one of gate_recall and default_recall"),
        ({}, {"tae_tempered": np.zeros((L, 4, 101), np.float32)}, "tae_tempered"),
        ({}, {"similarity": None}, "not have all of gate_recall and similarity"),
        ({}, {"map_keys": np.ones((N + 1, H), np.float16)}, "equally many"),
    ],
)
def test_impossible_values_are_refused(tmp_path: Path, said: dict[str, Any], arrays: dict[str, Any], why: str) -> None:
    save(whole(), tmp_path / "p")
    rewritten(tmp_path / "p", said, arrays)
    with pytest.raises(ProfileError, match=why) as error:
        load(tmp_path / "p")
    assert "argument" not in str(error.value)


def test_what_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(whole(0), tmp_path / "p")

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ProfileError, match="No space left"):
        save(whole(1), tmp_path / "p")
    same(whole(0), load(tmp_path / "p"))
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_reading_one_without_nets_needs_no_torch(tmp_path: Path) -> None:
    save(replace(whole(), nets={}), tmp_path / "p")
    code = (
        "import sys, pathlib; from core.profile import load; "
        f"print(load(pathlib.Path({str(tmp_path / 'p')!r})).tokens, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "1234",
        "False",
    ]
