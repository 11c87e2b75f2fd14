"""bench peers: other programs, their answers beside ours, and what comes of one that ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch

from bench.harness.run import Result
from bench.models import peers as programs
from bench.speed import peers
from core.errors import MoestroError

THREADS = 3  # of torch before anything is loaded


class Other:
    """In place of another program: a token takes it .1 ms, a prompt of any length 1 ms."""

    threads: ClassVar[list[int]] = []

    def __init__(self, python: Path, **job: Any) -> None:
        assert job["peer"] == "ik"
        self.threads.append(job["threads"])

    def ask(self, **asked: Any) -> dict[str, Any]:
        if "text" in asked:
            return {"logits": torch.zeros(len(asked["text"]), 4096).tolist()}
        return {"prompt_s": 1e-3, "token_s": [1e-4] * len(asked["tokens"])}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


def test_each_round_has_every_system_and_ratios_have_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(model: Path, kind: str, python: Path, say: object) -> Path:
        assert kind == "Q4_0"
        return next(model.glob("*.safetensors"))

    monkeypatch.setattr(peers, "Peer", Other)
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS)
    monkeypatch.setattr(programs, "environment", lambda folder, names, say: Path(sys.executable))
    monkeypatch.setattr(programs, "gguf", named)
    found: Result = peers.SUITE.run(small=True, keep=tmp_path, formats="int4", lengths="16", rounds=3, peers="ik")
    assert Other.threads == [THREADS] * (len(peers.CONFIGURATIONS) + 1) + [1], "as many as ours, and one to read logits"
    speeds = found["found"]["int4"]["speeds"]
    assert speeds.keys() == {"fast", "reference", "ik"} and speeds["ik"]["16"]["decode"] == pytest.approx([1e4] * 3)
    about = found["found"]["int4"]["about"]
    assert 4 < about["fast"]["bits"] < 8 and about["fast"]["kl"] < 1 < about["ik"]["kl"]
    ratio = found["ratios"]["int4 decode 16 fast/ik"]
    assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
    [decode] = [one for one in found["goals"] if one["goal"].startswith("int4 decode, fast over ik")]
    assert decode["found"] == ratio["ratio"]
    assert [line for line in peers.table(found) if line.lstrip().startswith("ik_llama.cpp Q4_0")]


def test_a_program_that_ends_is_an_error_with_its_last_words() -> None:
    with pytest.raises(MoestroError, match="other program ended: KeyError: 'nothing'"):
        peers.Peer(Path(sys.executable), peer="nothing")


@pytest.mark.parametrize(("choice", "names"), [("all", ["ik", "llama"]), ("ik", ["ik"]), ("none", []), ("", [])])
def test_nothing_is_installed_unless_it_was_agreed_to(
    choice: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # nobody can answer
    assert programs.agreed(choice) == names


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match="no format int5"):
        peers.SUITE.run(small=True, keep=tmp_path, formats="int5")
