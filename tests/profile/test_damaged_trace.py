"""What a damaged trace says, and one that is of another model, or of a later version."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import TraceError
from core.profile.trace import ArrayTrace, Chunk, FileTrace, TraceHead, TraceWriter
from core.profile.trace import file as trace_file
from core.profile.trace.chunk import map_type
from core.profile.trace.file import save
from tests.profile.passes import drawn_predictions, read, routed, step, written


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
    with TraceWriter(tmp_path / "t", TraceHead(3, 9, 2)) as writer, pytest.raises(TraceError, match="does not belong"):
        writer.add(step(np.zeros((4, 1, 2))))
    with pytest.raises(TraceError, match="cannot be written"):
        TraceWriter(tmp_path / "none" / "t", TraceHead(3, 9, 2))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("of", 1, "maps of layers"),
        ("at", 3, "maps of layers"),
        ("layer", -1, "maps of layers"),
        ("distribution", 1.5, "no probabilities"),
        ("distribution", np.nan, "no probabilities"),
    ],
)
def test_maps_of_what_there_is_not_are_refused(tmp_path: Path, name: str, value: float, why: str) -> None:
    maps = np.array([(0, 0, 1, np.full(9, 1 / 9))], map_type(9))
    maps[name] = value
    one = np.ones(1, np.int32)
    with TraceWriter(tmp_path / "t", TraceHead(3, 9, 2, predictor=("expert_map", {}))) as writer:
        ids = np.array(routed(1), np.uint8)
        writer.write(Chunk(ids, one, one > 0, one, ranked=drawn_predictions(1, 1), maps=maps))
    with pytest.raises(TraceError, match=why):
        read(FileTrace(tmp_path / "t"))


@pytest.mark.parametrize(("name", "value"), [("of", 1), ("at", -2), ("layer", 3), ("expert", 9), ("expert", -1)])
def test_guesses_of_what_there_is_not_are_refused(tmp_path: Path, name: str, value: int) -> None:
    with TraceWriter(tmp_path / "t", TraceHead(3, 9, 2, predictor=("gate", {}))) as writer:
        one = step(routed(1).transpose(1, 0, 2))
        one.ranked = drawn_predictions(1, 3)
        one.ranked[name][1] = value
        writer.add(one)
    with pytest.raises(TraceError, match="predictions for layers or experts that do not exist"):
        read(FileTrace(tmp_path / "t"))


def test_distributions_of_another_model_are_refused(tmp_path: Path) -> None:
    one = step(routed(1).transpose(1, 0, 2))
    one.probs = np.zeros((3, 1, 8), np.float16)
    with (
        TraceWriter(tmp_path / "t", TraceHead(3, 9, 2, probs=True)) as writer,
        pytest.raises(TraceError, match="do not belong"),
    ):
        writer.add(one)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"layers": -1},
        {"experts": 2**40},
        {"experts": 10**400},
        {"top_k": 0},
        {"top_k": True},
        {"layers": "3"},
        {"model": None},
        {"version": 1.5},
        {"version": []},
        {"predictor": []},
        {"predictor": 7},
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
    trace_file.TraceWriter(tmp_path / "t", trace_file.TraceHead(3, 9, 2)).close()
    data = io.BytesIO()
    np.savez(data, **arrays)
    frame = trace_file.FRAME.pack(trace_file.MARK, 4, 2, data.tell())
    with (tmp_path / "t").open("ab") as file:
        file.write(frame + data.getvalue())
    with pytest.raises(TraceError, match="damaged") as error:
        list(FileTrace(tmp_path / "t").chunks())
    assert "argument" not in str(error.value)


def test_more_tokens_than_bytes_can_hold_are_not_believed(tmp_path: Path) -> None:
    trace_file.TraceWriter(tmp_path / "t", trace_file.TraceHead(3, 9, 2)).close()
    with (tmp_path / "t").open("ab") as file:
        file.write(trace_file.FRAME.pack(trace_file.MARK, 2**32 - 1, 1, 100) + bytes(100))
    with pytest.raises(TraceError, match="so many tokens"):
        FileTrace(tmp_path / "t")


@pytest.mark.parametrize("wrong", [{"by": 2}, {"expert": -1}])
def test_rows_of_predictors_or_experts_that_are_not_there_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    trace = written(tmp_path / "t", **wrong)
    with pytest.raises(TraceError, match="do not exist"):
        list(trace.chunks())


def test_a_head_that_lists_no_predictors_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "t").path.read_bytes()
    for strange in (b'"beside": [null, ', b'"beside": [{"name": 3, "params": {}}, '):
        (tmp_path / "bad").write_bytes(data.replace(b'"beside": [', strange))
        with pytest.raises(TraceError, match="damaged"):
            FileTrace(tmp_path / "bad")
