"""Buddy lists in a pack: what is written is read, travels with the pack, and is refused where it does not belong."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from app import cli
from app.services.profiles import save_buddies_in_pack
from core import importing
from core.errors import ProfileError
from core.memory.pack import check, verify
from core.policy.substitute.buddies import cut, rank
from core.profile import Profile, buddies, load, profile_path
from core.profile.file import SUM, checksum


def profile(experts: int = 8, **parts: Any) -> Profile:
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 50, (3, experts, experts)).astype(np.float32)
    known = {"pairs": pairs + pairs.transpose(0, 2, 1), "pairs_weighted": rng.random(pairs.shape, np.float32), **parts}
    return Profile("tiny", "ab" * 32, 3, experts, 4, 64, 1234, "a text", "2026-01-02T03:04:05+00:00", **known)


@pytest.mark.parametrize("experts", [8, 65, 90])
def test_any_list_can_be_cut_from_what_was_written(experts: int, tmp_path: Path) -> None:
    """Also where an expert has more peers than are kept."""
    buddies.save(profile(experts), tmp_path / buddies.NAME)
    back, was = buddies.load(tmp_path / buddies.NAME, model_hash="ab" * 32), profile(experts)
    assert back.parts() == ("pairs",) and (back.model, back.tokens, back.source) == ("tiny", 1234, "a text")
    assert [file.name for file in tmp_path.iterdir()] == [buddies.NAME]
    for name in ("pairs", "pairs_weighted"):
        for alpha, most, smoothing in ((1.0, 64, 0.0), (0.95, 16, 0.5), (0.3, 5, 20.0)):
            one, other = (cut(rank(getattr(p, name)), np.full(3, alpha), most, smoothing) for p in (was, back))
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_allclose(one.q, other.q, rtol=1e-5)


def test_lists_without_weights(tmp_path: Path) -> None:
    buddies.save(profile(pairs_weighted=None), tmp_path / "b")
    assert buddies.load(tmp_path / "b").pairs_weighted is None
    with pytest.raises(ProfileError, match=r"does not say which experts are chosen together"):
        buddies.save(profile(pairs=None), tmp_path / "b")


def test_lists_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    buddies.save(profile(), tmp_path / buddies.NAME)
    with pytest.raises(ProfileError, match=r"made for tiny \(abababababab\).*about mixtral \(cdcdcdcdcdcd\)"):
        buddies.find(None, tmp_path, "cd" * 32, "mixtral")
    assert "nothing about this model (cdcdcdcdcdcd)" in buddies.problem(tmp_path, "cd" * 32)
    assert buddies.problem(tmp_path, "ab" * 32) == "" == buddies.problem(tmp_path / "no", "ab" * 32)


@pytest.mark.parametrize("at", [0.0, 0.01, 0.3, 0.6, 0.999])
def test_a_flipped_bit_is_found(at: float, tmp_path: Path) -> None:
    buddies.save(profile(), tmp_path / "b")
    data = bytearray((tmp_path / "b").read_bytes())
    data[int(at * len(data))] ^= 0x10
    (tmp_path / "b").write_bytes(data)
    with pytest.raises(ProfileError, match=r"damaged|later version|made for"):
        buddies.load(tmp_path / "b", model_hash="ab" * 32)


@pytest.mark.parametrize(
    ("change", "said"), [({"version": 2}, "later version"), ({"experts": 9}, "peers is"), ({"layers": None}, "damaged")]
)
def test_a_head_that_does_not_fit_is_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    arrays: Any = {name: np.ascontiguousarray(value) for name, value in rank(profile().pairs)._asdict().items()}
    head = {name: getattr(profile(), name) for name in buddies._PLAIN} | {"version": 1} | change
    text = json.dumps(head)
    save_file(arrays, tmp_path / "b", {buddies.KEY: text, SUM: checksum(text, arrays)})
    with pytest.raises(ProfileError, match=said):
        buddies.load(tmp_path / "b")


def test_peers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    arrays: Any = {name: np.ascontiguousarray(value) for name, value in rank(profile().pairs)._asdict().items()}
    arrays["peers"][0, 0, 0] = 8
    text = json.dumps({name: getattr(profile(), name) for name in buddies._PLAIN} | {"version": 1})
    save_file(arrays, tmp_path / "b", {buddies.KEY: text, SUM: checksum(text, arrays)})
    with pytest.raises(ProfileError, match="names an expert that is not there"):
        buddies.load(tmp_path / "b")


def test_what_is_known_already_goes_before_what_a_pack_brings(tmp_path: Path) -> None:
    counts = np.ones((3, 8), np.int64)
    assert buddies.find(None, tmp_path, "ab" * 32) is None is buddies.find(None, None, "ab" * 32)
    buddies.save(profile(), tmp_path / buddies.NAME)
    own, less = profile(), profile(pairs=None, pairs_weighted=None, counts=counts)
    assert buddies.find(own, tmp_path, "ab" * 32) is own
    assert buddies.find(less, None, "ab" * 32) is less
    both = buddies.find(less, tmp_path, "ab" * 32)
    assert both is not None and both.parts() == ("counts", "pairs") and both.counts is counts
    alone = buddies.find(None, tmp_path, "ab" * 32)
    assert alone is not None and alone.parts() == ("pairs",)


def test_what_cannot_be_written_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buddies.save(profile(), tmp_path / "b")
    before = (tmp_path / "b").read_bytes()

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ProfileError, match=r"No space left.*the profile itself is kept elsewhere"):
        buddies.save(profile(90), tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["b"]
    with pytest.raises(ProfileError, match="cannot be written"):
        buddies.save(profile(), tmp_path / "nowhere" / "b")


def test_only_a_pack_with_pairs_takes_any(tmp_path: Path) -> None:
    assert save_buddies_in_pack(str(tmp_path), profile()) == []
    (tmp_path / "moestro.json").touch()
    assert save_buddies_in_pack(str(tmp_path), profile(pairs=None)) == [] and not (tmp_path / buddies.NAME).exists()
    (tmp_path / f"{buddies.NAME}.new").mkdir()  # nothing can be written there
    (said,) = save_buddies_in_pack(str(tmp_path), profile())
    assert said.startswith("The buddy lists cannot be written") and not (tmp_path / buddies.NAME).exists()


@pytest.mark.long(0.1)
def test_calibrating_a_pack_puts_them_into_it(
    chat_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("Some words to be read by a very small model.", encoding="utf-8")
    pack = importing.import_model(str(chat_model("qwen3_moe")), tmp_path / "pack")
    assert (
        cli.main(
            [
                "profile",
                "--model",
                str(pack),
                "--text",
                str(tmp_path / "text.txt"),
                "--context",
                "128",
                "--parts",
                "pairs",
            ]
        )
        == 0
    )
    assert f"travel with the pack, in {pack / buddies.NAME}" in capsys.readouterr().out
    model_hash = check(pack).model_hash
    assert verify(pack).problems == ()
    found, kept = buddies.find(None, pack, model_hash), load(profile_path(tmp_path / "home", model_hash))
    np.testing.assert_array_equal(found.pairs, kept.pairs)
    assert cli.main(["doctor", "--pack", str(pack)]) == 0
    (pack / buddies.NAME).write_bytes(b"nonsense")
    assert cli.main(["doctor", "--pack", str(pack)]) == 1
    assert f"{pack / buddies.NAME} are damaged" in capsys.readouterr().out
