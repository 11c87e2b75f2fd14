"""Traces: written and read back, and what the lab recorded beside the routing."""

from pathlib import Path

import numpy as np
import pytest

from core.errors import TraceError
from core.profile.trace import ArrayTrace, FileTrace, TraceHead, TraceWriter
from core.profile.trace import file as trace_file
from core.profile.trace.file import save
from core.simulate import Config
from core.simulate.prefetchers import TimedConfig, predictor_for
from core.simulate.replayed import Replayed
from core.simulate.timed_replay import passes
from core.simulate.trace_view import TraceView
from tests.profile.passes import GATE, MAPS, drawn_predictions, read, routed, step, written


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


def test_distributions_and_guesses_are_read_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


SOME = TimedConfig(Config("lru", 8), "gate")


def told(trace: FileTrace, config: TimedConfig) -> list[list[tuple[int, int]]]:
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
