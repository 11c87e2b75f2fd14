"""Routing in files that other programs made: JSON lines, CSV and NPZ are read, or refused in words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import TraceError
from core.profile.trace import open_trace
from tests.profile.passes import read, routed


def test_npz_files_are_read(tmp_path: Path) -> None:
    ids = routed(30)
    extras = {"weights": np.ones((3, 30, 2), np.float32), "tok": np.arange(30), "rid": np.repeat([4, 5], 15)}
    np.savez(tmp_path / "a.npz", experts=ids.transpose(1, 0, 2), **extras)
    trace = open_trace(tmp_path / "a.npz")
    assert (trace.layers, trace.experts, trace.top_k, trace.tokens) == (3, 9, 2, 30)
    assert (read(trace) == ids).all()
    (chunk,) = trace.chunks()
    assert chunk.tok.tolist() == list(range(30)) and chunk.rid.tolist() == [4] * 15 + [5] * 15
    assert chunk.weights.shape == (30, 3, 2)
    assert open_trace(tmp_path / "a.npz", 16).experts == 16


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "token,layer,expert\n0,1,3,1\n0,4,2,0\n7,1,0,2\n7,4,1,1\n"),
        ("a.csv", "0,1,3 1\n0,4,2;0\n7,1,[0 2]\n7,4,1\n"),
        ("a.csv", "0,1,3\n0,1,1\n0,4,2\n0,4,0\n7,1,0\n7,1,2\n7,4,1\n"),
        ("a.json", "[[0, 1, [3, 1]], [0, 4, [2, 0]], [7, 1, [0, 2]], [7, 4, [1]]]"),
        (
            "a.json",
            '{"trace": [{"token": 0, "layer": 1, "experts": [3, 1]}, {"token": 0, "layer": 4, "ids": [2, 0]},'
            '{"token": 7, "layer": 1, "expert_ids": [0, 2]}, {"token": 7, "layer": 4, "expert": 1}]}',
        ),
        ("a.jsonl", "[0, 1, 3, 1]\n[0, 4, 2, 0]\n\n[7, 1, 0, 2]\n[7, 4, 1, 1]\n"),
    ],
)
def test_lists_of_token_layer_and_experts_are_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    trace = open_trace(tmp_path / name)
    assert (trace.layers, trace.experts, trace.top_k, trace.tokens) == (2, 4, 2, 2)
    assert read(trace).tolist() == [[[3, 1], [2, 0]], [[0, 2], [1, 1]]]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.csv", "0,0,1\n0,x,2\n", "Line 2 is not token, layer"),
        ("a.csv", "0,0,1\n0,1,2\n1,0,3\n", "no experts for token 1 in layer 1"),
        ("a.csv", "token,layer,expert\n", "has no rows"),
        ("a.csv", "0,0,-1\n", "experts count from 0"),
        ("a.json", '[{"token": 0, "experts": [1]}]', "Entry 1 is not token, layer"),
        ("a.json", "nonsense", "cannot be read as a trace"),
        ("a.npz", "nonsense", "not a readable .npz"),
        ("a.txt", "nonsense", "It reads Moestro's own traces"),
        ("a.csv", json.dumps([[0, 0, 40000]])[2:-2], "more than any model has"),
        ("t.csv", "0,0,0.5\n", "Line 1 is not token"),
        ("t.csv", "0,0,1_0\n", "Line 1 is not token"),
        ("t.csv", "0,0,1-2\n", "Line 1 is not token"),
        ("t.csv", "0,-1,1 2\n", "layers count from 0"),
        ("t.csv", f"0,0,{'1' * 200_000}\n", "field larger"),
        ("t.json", "null", "not a list"),
        ("t.json", "7", "not a list"),
        ("t.json", '{"trace": 5}', "not a list"),
        ("t.json", '{"trace": {"a": 1}}', "not a list"),
        ("t.json", "[[0, 0, [0.5]]]", "Entry 1"),
        ("t.json", "[[0, 0, [true]]]", "Entry 1"),
        ("t.json", "[[0, 0, [NaN]]]", "it has NaN where a number belongs"),
        ("t.json", '[[0, 0, ["x"]]]', "Entry 1"),
        ("t.json", "[[null, null, [1]]]", "Entry 1"),
        ("t.json", '[{"token": 0, "layer": 0, "experts": {"a": 1}}]', "Entry 1"),
        ("t.json", "[[0, 0, [99999999999999999999]]]", "Entry 1"),
        ("t.json", "[[1e400, 0, [1]]]", "too large"),
        ("t.json", "[[0, 0, [1e999]]]", "too large"),
        ("t.json", "[[1, 2, [3]], [0, 0, [1" + "0" * 400 + "]]]", "Entry 2"),
        ("t.jsonl", "[0, 0, [1]]\n" + "[" * 100_000 + "\n", "line 2"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(tmp_path: Path, name: str, content: str, why: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TraceError, match=why) as error:
        open_trace(tmp_path / name)
    assert "Error" not in str(error.value) and "object" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "token,layer,ids\nSECRET,0,1\n"),
        ("a.csv", "0,0,SECRET\n"),
        ("a.json", '{"key": "SECRET"}'),
        ("a.json", '["SECRET"]'),
        ("a.jsonl", '[0, 0, "SECRET"]\n[0, 0, "SECRET"]\n'),
        ("a.json", "SECRET"),
        ("a.txt", "SECRET"),
        ("a.npz", "SECRET"),
    ],
)
def test_what_is_in_a_file_that_is_no_trace_is_not_repeated(tmp_path: Path, name: str, content: str) -> None:
    """The dashboard shows the message to a user who named any file that its server may read."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TraceError) as refused:
        open_trace(tmp_path / name)
    assert "SECRET" not in str(refused.value)


IDS = np.zeros((2, 3, 2), np.int64)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"other": np.zeros(3)}, "no array `experts`"),
        ({"experts": np.zeros((3, 2), int)}, "whole numbers"),
        ({"experts": np.zeros((3, 2, 2))}, "whole numbers"),
        ({"experts": np.full((1, 1, 1), -3)}, "count from 0"),
        ({"experts": np.zeros((3, 2, 2), int), "tok": np.zeros(3)}, "does not go with"),
        ({"experts": np.full((1, 1, 1), 7)}, "7, but 4 experts were said"),
        ({"experts": IDS, "weights": np.full((2, 3, 2), np.inf)}, "weights"),
        ({"experts": IDS, "weights": np.full((2, 3, 2), "x")}, "weights"),
        ({"experts": IDS, "tok": np.array([0, 1, -1])}, "tok"),
        ({"experts": IDS, "tok": np.array([0.0, 1.0, 2.0])}, "tok"),
        ({"experts": IDS, "rid": np.array([0, 1, 2**40])}, "rid"),
        ({"experts": IDS, "rid": np.array([True, False, True])}, "rid"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_words(tmp_path: Path, arrays: Any, why: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(TraceError, match=why):
        open_trace(tmp_path / "a.npz", 4)


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="There is no trace"):
        open_trace(tmp_path / "gone.npz")


def test_a_damaged_array_of_an_npz_is_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", experts=IDS + 1)
    data = bytearray((tmp_path / "t.npz").read_bytes())
    data[250] ^= 1  # within the ids
    (tmp_path / "t.npz").write_bytes(data)
    with pytest.raises(TraceError, match="damaged"):
        open_trace(tmp_path / "t.npz")
