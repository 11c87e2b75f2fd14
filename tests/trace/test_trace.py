"""Traces: what was recorded is read, however the writing ended; what others made is read, or refused in words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import TraceError
from core.trace import ArrayTrace, FileTrace, Trace, TraceWriter, open_trace
from core.trace import file as trace_file
from core.trace.chunk import RANKED
from core.trace.file import save
from core.types import Phase, StepRecord


def step(ids: Any, phase: Phase = "decode") -> StepRecord:
    """A record with the routing [layers, tokens, k] and nothing else."""
    array = np.array(ids, np.int16)
    none = np.zeros(0, np.int16)
    return StepRecord(0, phase, array.shape[1], 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, array, none, none, none.astype(np.uint8))


def routed(tokens: int, experts: int = 9, layers: int = 3, k: int = 2, seed: int = 0) -> Any:
    noise = np.random.default_rng(seed).random((tokens, layers, experts))
    return np.argsort(noise, 2)[..., :k]


def read(trace: Trace) -> Any:
    return np.concatenate([chunk.ids for chunk in trace.chunks()])


@pytest.mark.parametrize("experts", [9, 300])
def test_passes_are_read_as_they_were_recorded(tmp_path: Path, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "CHUNK", 8)
    sizes, ids = [5, 1, 1, 12, 1], routed(20, experts)
    rng, at = np.random.default_rng(1), 0
    weights, tok = rng.random((20, 3, 2)).astype(np.float16), rng.integers(0, 99, 20)
    with TraceWriter(tmp_path / "t", 3, experts, 2, model="m", model_hash="h") as writer:
        for rid, size in enumerate(sizes):
            part = slice(at, at + size)
            writer.add(
                step(ids[part].transpose(1, 0, 2), "decode" if size == 1 else "prefill"),
                rid,
                tok[part],
                weights[part].transpose(1, 0, 2),
            )
            at += size
        writer.add(step(np.zeros((3, 0, 2))))  # telemetry was off
    trace = FileTrace(tmp_path / "t")
    chunks = list(trace.chunks())
    assert (trace.layers, trace.experts, trace.top_k, trace.model, trace.model_hash) == (3, experts, 2, "m", "h")
    assert (trace.tokens, trace.cut, len(chunks)) == (20, False, 2)
    assert (read(trace) == ids).all()
    assert chunks[0].ids.dtype == (np.uint8 if experts == 9 else np.int16)
    for name, want in {
        "sizes": sizes,
        "decode": [s == 1 for s in sizes],
        "rid": list(range(5)),
        "tok": tok.tolist(),
        "weights": weights.tolist(),
    }.items():
        assert np.concatenate([getattr(chunk, name) for chunk in chunks]).tolist() == want
    assert (tmp_path / "t").stat().st_size < 6000


def test_a_file_whose_writing_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    whole, ids = tmp_path / "whole", routed(9000)
    save(ArrayTrace(ids, 9), whole)
    data = whole.read_bytes()
    for lost in (1, 1000):
        (tmp_path / "cut").write_bytes(data[:-lost])
        trace = FileTrace(tmp_path / "cut")
        assert trace.cut and trace.tokens == 8192
        assert (read(trace) == ids[:8192]).all()


def test_what_is_damaged_or_too_new_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    save(ArrayTrace(routed(50), 9), path)
    data = path.read_bytes()
    start = data.index(b"pass")

    def refused(changed: bytes, why: str) -> None:
        path.write_bytes(changed)
        with pytest.raises(TraceError, match=why):
            read(FileTrace(path))

    refused(data[1:], "not a trace of Moestro")
    refused(data.replace(b'"version": 1', b'"version": 9'), "later version")
    refused(data.replace(b'"layers"', b'"players'), "second line")
    refused(data[:start] + b"xxxx" + data[start + 4 :], "damaged at byte")
    refused(data[:-200] + bytes(100) + data[-100:], "damaged")
    refused(data.replace(b'"experts": 9', b'"experts": 5'), "an expert that the model does not have")


def test_a_writer_refuses_what_does_not_belong(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", 3, 9, 2) as writer, pytest.raises(TraceError, match="does not belong"):
        writer.add(step(np.zeros((4, 1, 2))))
    with pytest.raises(TraceError, match="cannot be written"):
        TraceWriter(tmp_path / "none" / "t", 3, 9, 2)


def test_npz_files_are_read(tmp_path: Path) -> None:
    ids = routed(30)
    extras = {"weights": np.ones((3, 30, 2), np.float32), "tok": np.arange(30), "rid": np.repeat([4, 5], 15)}
    np.savez(tmp_path / "a.npz", experts=ids.transpose(1, 0, 2), **extras)
    trace = open_trace(tmp_path / "a.npz")
    assert (trace.layers, trace.experts, trace.top_k, trace.tokens) == (3, 9, 2, 30)
    assert (read(trace) == ids).all()
    (chunk,) = trace.chunks()
    assert chunk.tok is not None and chunk.weights is not None
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
    ],
)
def test_what_cannot_be_read_is_refused_in_words(tmp_path: Path, name: str, content: str, why: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TraceError, match=why):
        open_trace(tmp_path / name)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"other": np.zeros(3)}, "no array `experts`"),
        ({"experts": np.zeros((3, 2), int)}, "whole numbers"),
        ({"experts": np.zeros((3, 2, 2))}, "whole numbers"),
        ({"experts": np.full((1, 1, 1), -3)}, "count from 0"),
        ({"experts": np.zeros((3, 2, 2), int), "tok": np.zeros(3)}, "does not go with"),
        ({"experts": np.full((1, 1, 1), 7)}, "7, but 4 experts were said"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_words(tmp_path: Path, arrays: Any, why: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(TraceError, match=why):
        open_trace(tmp_path / "a.npz", 4)


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="There is no trace"):
        open_trace(tmp_path / "gone.npz")


def told(passes: int, count: int, seed: int = 0) -> Any:
    """`count` guesses in each of so many passes."""
    rng, rows = np.random.default_rng(seed), []
    for of in range(passes):
        rows += [(of, rng.integers(-1, 3), rng.integers(3), rng.integers(9), rng.random()) for _ in range(count)]
    return np.array(rows, RANKED)


def test_distributions_and_guesses_are_read_as_they_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "CHUNK", 8)
    ids, sizes = routed(20), [5, 1, 1, 12, 1]
    probs, predictions = np.random.default_rng(1).random((20, 3, 9)).astype(np.float16), told(5, 4)
    at = 0
    with TraceWriter(tmp_path / "t", 3, 9, 2, probs=True, predictor=("gate", {"width": 3})) as writer:
        for of, size in enumerate(sizes):
            part, mine = slice(at, at + size), predictions[predictions["of"] == of].copy()
            one, mine["of"], at = step(ids[part].transpose(1, 0, 2)), 0, at + size
            one.probs, one.ranked, one.tok = probs[part].transpose(1, 0, 2), mine, np.arange(size, dtype=np.int32)
            writer.add(one)
    trace = FileTrace(tmp_path / "t")
    chunks = list(trace.chunks())
    assert trace.predictor == ("gate", {"width": 3}) and [len(c.sizes) for c in chunks] == [4, 1]
    assert (np.concatenate([c.probs for c in chunks if c.probs is not None]) == probs).all()
    assert np.concatenate([c.tok for c in chunks if c.tok is not None]).tolist() == [i for s in sizes for i in range(s)]
    first, last = (c.ranked for c in chunks)
    assert first is not None and last is not None
    assert first.tolist() == predictions[predictions["of"] < 4].tolist()
    assert last["of"].tolist() == [0] * 4 and last["score"].tolist() == predictions["score"][-4:].tolist()
    again = save(trace, tmp_path / "again")
    assert again.predictor == trace.predictor
    assert [c.ranked.tolist() for c in again.chunks() if c.ranked is not None] == [first.tolist(), last.tolist()]


def test_a_plain_trace_stays_one_that_older_versions_read(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", 3, 9, 2) as writer:
        one = step(routed(2).transpose(1, 0, 2))
        one.probs, one.ranked = np.zeros((3, 2, 9), np.float16), told(1, 2)
        writer.add(one)
    assert b'"version": 1' in (tmp_path / "t").read_bytes()
    (chunk,) = FileTrace(tmp_path / "t").chunks()
    assert chunk.probs is chunk.ranked is None
    with TraceWriter(tmp_path / "new", 3, 9, 2, probs=True) as writer:
        writer.add(one)
    assert b'"version": 2' in (tmp_path / "new").read_bytes()
    assert FileTrace(tmp_path / "new").predictor is None


def test_large_distributions_do_not_gather_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "PENDING_BYTES", 200)
    one = step(routed(1).transpose(1, 0, 2))
    one.probs = np.zeros((3, 1, 9), np.float16)  # 54 bytes, and 6 of ids
    with TraceWriter(tmp_path / "t", 3, 9, 2, probs=True) as writer:
        for _ in range(10):
            writer.add(one)
            assert writer._bytes < 200
    assert [len(chunk.sizes) for chunk in FileTrace(tmp_path / "t").chunks()] == [4, 4, 2]


@pytest.mark.parametrize(("name", "value"), [("of", 1), ("at", -2), ("layer", 3), ("expert", 9), ("expert", -1)])
def test_guesses_of_what_there_is_not_are_refused(tmp_path: Path, name: str, value: int) -> None:
    with TraceWriter(tmp_path / "t", 3, 9, 2, predictor=("gate", {})) as writer:
        one = step(routed(1).transpose(1, 0, 2))
        one.ranked = told(1, 3)
        one.ranked[name][1] = value
        writer.add(one)
    with pytest.raises(TraceError, match="predictions for layers or experts that do not exist"):
        read(FileTrace(tmp_path / "t"))


def test_distributions_of_another_model_are_refused(tmp_path: Path) -> None:
    one = step(routed(1).transpose(1, 0, 2))
    one.probs = np.zeros((3, 1, 8), np.float16)
    with TraceWriter(tmp_path / "t", 3, 9, 2, probs=True) as writer, pytest.raises(TraceError, match="do not belong"):
        writer.add(one)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "0,0,0.5\n", "Line 1 is not token"),
        ("t.csv", "0,0,1_0\n", "Line 1 is not token"),
        ("t.csv", "0,0,1-2\n", "Line 1 is not token"),
        ("t.csv", "0,-1,1 2\n", "layers count from 0"),
        ("t.csv", f"0,0,{'1' * 200_000}\n", "field larger"),
        ("t.json", "null", "not a list"),
        ("t.json", "[[0, 0, [0.5]]]", "Entry 1"),
        ("t.json", "[[0, 0, [true]]]", "Entry 1"),
        ("t.json", "[[0, 0, [99999999999999999999]]]", "Entry 1"),
        ("t.json", "[[1e400, 0, [1]]]", "too large"),
        ("t.jsonl", "[0, 0, [1]]\n" + "[" * 100_000 + "\n", "line 2"),
    ],
)
def test_what_is_no_whole_number_is_not_taken_for_one(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=said) as error:
        open_trace(tmp_path / name)
    assert "Error" not in str(error.value) and "object" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", np.full((2, 3, 2), np.inf)),
        ("weights", np.full((2, 3, 2), "x")),
        ("tok", np.array([0, 1, -1])),
        ("tok", np.array([0.0, 1.0, 2.0])),
        ("rid", np.array([0, 1, 2**40])),
        ("rid", np.array([True, False, True])),
    ],
)
def test_arrays_beside_the_ids_are_looked_at(tmp_path: Path, name: str, value: Any) -> None:
    np.savez(tmp_path / "t.npz", experts=np.zeros((2, 3, 2), np.int64), **{name: value})
    with pytest.raises(TraceError, match=name):
        open_trace(tmp_path / "t.npz")


def test_a_damaged_array_of_an_npz_is_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", experts=np.ones((2, 3, 2), np.int64))
    data = bytearray((tmp_path / "t.npz").read_bytes())
    data[250] ^= 1  # within the ids
    (tmp_path / "t.npz").write_bytes(data)
    with pytest.raises(TraceError, match="damaged"):
        open_trace(tmp_path / "t.npz")


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"experts": 2**40},
        {"top_k": True},
        {"layers": "3"},
        {"model": None},
        {"version": 1.5},
        {"predictor": []},
        {"predictor": {"name": 3, "params": {}}},
        {"predictor": {"name": "gate", "params": [[]]}},
    ],
)
def test_a_head_that_no_trace_has_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    save(ArrayTrace(routed(4), 9), tmp_path / "t")
    magic, head, rest = (tmp_path / "t").read_bytes().split(b"\n", 2)
    (tmp_path / "t").write_bytes(b"\n".join([magic, json.dumps({**json.loads(head), **change}).encode(), rest]))
    with pytest.raises(TraceError, match="not the head of a trace"):
        FileTrace(tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ids", np.full((4, 3, 2), "x")),
        ("sizes", np.array([5, -1], np.int32)),
        ("decode", np.ones(3, np.bool_)),
        ("rid", np.zeros(9, np.int32)),
        ("tok", np.zeros(3, np.int32)),
        ("weights", np.full((4, 3, 2), np.nan, np.float16)),
        ("probs", np.full((4, 3, 9), np.inf, np.float16)),
    ],
)
def test_a_frame_whose_arrays_do_not_fit_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    arrays = {
        "ids": routed(4).astype(np.uint8),
        "sizes": np.array([3, 1], np.int32),
        "decode": np.ones(2, np.bool_),
        "rid": np.zeros(2, np.int32),
        name: value,
    }
    trace_file.TraceWriter(tmp_path / "t", 3, 9, 2).close()
    data = io.BytesIO()
    np.savez(data, **arrays)
    frame = trace_file.FRAME.pack(trace_file.MARK, 4, 2, data.tell())
    with (tmp_path / "t").open("ab") as file:
        file.write(frame + data.getvalue())
    with pytest.raises(TraceError, match="damaged") as error:
        list(FileTrace(tmp_path / "t").chunks())
    assert "argument" not in str(error.value)


def test_more_tokens_than_bytes_can_hold_are_not_believed(tmp_path: Path) -> None:
    trace_file.TraceWriter(tmp_path / "t", 3, 9, 2).close()
    with (tmp_path / "t").open("ab") as file:
        file.write(trace_file.FRAME.pack(trace_file.MARK, 2**32 - 1, 1, 100) + bytes(100))
    with pytest.raises(TraceError, match="so many tokens"):
        FileTrace(tmp_path / "t")
