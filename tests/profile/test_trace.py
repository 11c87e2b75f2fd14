"""Traces: written and read back, what the lab recorded beside the routing, and what a damaged one says."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import TraceError
from core.metrics.record import ShadowPredictions
from core.profile.trace import ArrayTrace, Chunk, FileTrace, TraceHead, TraceWriter
from core.profile.trace import file as trace_file
from core.profile.trace.chunk import BESIDE, beside_map_type, map_type
from core.profile.trace.file import save
from core.simulate import Config
from core.simulate.prefetchers import TimedConfig, predictor_for
from core.simulate.replayed import Replayed
from core.simulate.timed_replay import passes
from core.simulate.trace_view import TraceView
from tests.profile.passes import drawn_predictions, read, routed, step


@pytest.mark.parametrize("experts", [9, 300])
def test_passes_are_read_as_they_were_recorded(tmp_path: Path, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "CHUNK", 8)
    sizes, ids = [5, 1, 1, 12, 1], routed(20, experts)
    rng, at = np.random.default_rng(1), 0
    weights, tok = rng.random((20, 3, 2)).astype(np.float16), rng.integers(0, 99, 20)
    with TraceWriter(tmp_path / "t", TraceHead(3, experts, 2, model="m", model_hash="h")) as writer:
        for rid, size in enumerate(sizes):
            part = slice(at, at + size)
            writer.add(
                step(ids[part].transpose(1, 0, 2), "decode" if size == 1 else "prefill", rid),
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
    with TraceWriter(tmp_path / "t", TraceHead(3, 9, 2)) as writer, pytest.raises(TraceError, match="does not belong"):
        writer.add(step(np.zeros((4, 1, 2))))
    with pytest.raises(TraceError, match="cannot be written"):
        TraceWriter(tmp_path / "none" / "t", TraceHead(3, 9, 2))


def test_distributions_and_guesses_are_read_as_they_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "CHUNK", 8)
    ids, sizes = routed(20), [5, 1, 1, 12, 1]
    probs, predictions = np.random.default_rng(1).random((20, 3, 9)).astype(np.float16), drawn_predictions(5, 4)
    at = 0
    with TraceWriter(tmp_path / "t", TraceHead(3, 9, 2, probs=True, predictor=("gate", {"width": 3}))) as writer:
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
    assert first.tolist() == predictions[predictions["of"] < 4].tolist()
    assert last["of"].tolist() == [0] * 4 and last["score"].tolist() == predictions["score"][-4:].tolist()
    again = save(trace, tmp_path / "again")
    assert again.predictor == trace.predictor
    assert [c.ranked.tolist() for c in again.chunks() if c.ranked is not None] == [first.tolist(), last.tolist()]


def test_maps_are_read_as_they_were_recorded(tmp_path: Path) -> None:
    rng, found = np.random.default_rng(2), list[list[tuple[int, int, list[float]]]]()
    with TraceWriter(tmp_path / "t", TraceHead(3, 9, 2, predictor=("expert_map", {}))) as writer:
        for of in range(4):
            one = step(routed(1).transpose(1, 0, 2))
            one.ranked = drawn_predictions(1, 2)
            one.maps = [(int(at), int(rng.integers(3)), rng.random(9, np.float32)) for at in range(-1, of - 1)]
            found.append([(at, layer, distribution.tolist()) for at, layer, distribution in one.maps])
            writer.add(one)
            if of == 1:
                writer.flush()
    chunks = list(save(FileTrace(tmp_path / "t"), tmp_path / "again").chunks())
    again = [
        [(int(at), int(layer), row.tolist()) for _, at, layer, row in chunk.maps[chunk.maps["of"] == of]]
        for chunk in chunks
        if chunk.maps is not None
        for of in range(len(chunk.sizes))
    ]
    assert again == found


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


def test_a_plain_trace_stays_one_that_older_versions_read(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", TraceHead(3, 9, 2)) as writer:
        one = step(routed(2).transpose(1, 0, 2))
        one.probs, one.ranked = np.zeros((3, 2, 9), np.float16), drawn_predictions(1, 2)
        writer.add(one)
    assert b'"version": 1' in (tmp_path / "t").read_bytes()
    (chunk,) = FileTrace(tmp_path / "t").chunks()
    assert chunk.probs is chunk.ranked is None
    with TraceWriter(tmp_path / "new", TraceHead(3, 9, 2, probs=True)) as writer:
        writer.add(one)
    assert b'"version": 2' in (tmp_path / "new").read_bytes()
    assert FileTrace(tmp_path / "new").predictor is None


def test_large_distributions_do_not_gather_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "PENDING_BYTES", 200)
    one = step(routed(1).transpose(1, 0, 2))
    one.probs = np.zeros((3, 1, 9), np.float16)  # 54 bytes, and 6 of ids
    with TraceWriter(tmp_path / "t", TraceHead(3, 9, 2, probs=True)) as writer:
        for _ in range(10):
            writer.add(one)
            assert writer._bytes < 200
    assert [len(chunk.sizes) for chunk in FileTrace(tmp_path / "t").chunks()] == [4, 4, 2]


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


GATE: Any = ("gate", {"width": 0, "floor": 0.0, "distance": 0})
MAPS: Any = ("expert_map", {"distance": 0, "capacity": 1000, "semantic": True, "dynamic": True, "learn": True})
SOME = TimedConfig(Config("lru", 8), "gate")


def written(path: Path, *, by: int = 0, expert: int = 4) -> FileTrace:
    """Three passes; in pass n the gate names expert n in layer 1 from layer 0, and the maps expert 8 at the start."""
    with TraceWriter(path, TraceHead(3, 9, 2, beside=[GATE, MAPS])) as writer:
        for number, ids in enumerate(routed(3)):
            one = step(ids[:, None])
            rows = [(by, 0, 0, 1, min(number, expert), 0.5), (1, 0, -1, 0, 8, 0.25)]
            found = [(1, 0, 1, 2, np.full(9, number / 9, np.float32))]
            one.beside = ShadowPredictions((GATE, MAPS), np.array(rows, BESIDE), np.array(found, beside_map_type(9)))
            writer.add(one)
        strange = step(routed(1)[0][:, None])
        strange.beside = ShadowPredictions(
            (GATE,), np.array([(0, 0, 0, 1, 5, 0.5)], BESIDE), np.empty(0, beside_map_type(9))
        )
        writer.add(strange)  # of other predictors than the file's
    return FileTrace(path)


def told(trace: FileTrace, config: TimedConfig) -> list[list[tuple[int, int]]]:
    """What a replay names in each pass: (layer, expert)."""
    predictor, found = predictor_for(config, trace), []
    assert isinstance(predictor, Replayed)
    for _, chunk, at, tokens in passes(trace):
        predictor.follow(chunk, at)
        view = TraceView(trace, chunk, at, tokens, None)
        named = [*predictor.begin(view)]
        for layer in range(trace.layers):
            view.reach(layer)
            named += predictor.predict(view)
        found.append([(layer, expert) for layer, expert, _ in named])
    return found


def test_each_predictor_is_replayed_from_its_own_rows(tmp_path: Path) -> None:
    trace = written(tmp_path / "t")
    assert trace.beside == (GATE, MAPS) and trace.predictor is None
    copy = save(trace, tmp_path / "copy")
    for one in (trace, copy):
        assert told(one, SOME) == [[(1, 0)], [(1, 1)], [(1, 2)], []]
        assert told(one, TimedConfig(Config("lru", 8), "expert_map"))[:3] == [[(0, 8)]] * 3
    predictor = predictor_for(TimedConfig(Config("lru", 8), "expert_map"), trace)
    assert isinstance(predictor, Replayed)
    (chunk, *_) = trace.chunks()
    predictor.follow(chunk, 2)
    view = TraceView(trace, chunk, 2, slice(2, 3), None)
    view.reach(1)
    predictor.predict(view)
    [(layer, distribution)] = predictor.take_maps()
    assert layer == 2 and distribution == pytest.approx(np.full(9, 2 / 9))


def test_what_was_recorded_with_other_parameters_is_not_taken(tmp_path: Path) -> None:
    trace = written(tmp_path / "t")
    with pytest.raises(TraceError, match=r"it has those of gate with width=0.*Telemetry to “lab”"):
        predictor_for(TimedConfig(Config("lru", 8), "gate", {"width": 2}), trace)
    with pytest.raises(TraceError, match="it has those of gate, expert_map"):
        predictor_for(TimedConfig(Config("lru", 8), "stride"), trace)


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
