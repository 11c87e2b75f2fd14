"""The figures of buddy lists: expert by expert in plain Python."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import cli
from bench.routing import buddies, buddy_figures
from core.errors import ProfileError, SettingError
from core.policy.substitute.list_lengths import COVERAGES
from core.profile import Profile, save

DEEP, WIDE = 2, 16


def profile(**more: Any) -> Profile:
    """Counts with an expert that was never chosen, and pairs that fit to them in shape."""
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
