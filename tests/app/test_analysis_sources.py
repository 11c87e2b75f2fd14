"""The routing that an analysis replays: chats, sessions and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.services.analysis import sources
from app.services.analysis.analyst import Analyst
from app.services.analysis.question import Question
from app.services.analysis.sources import RoutingSource
from app.services.host import Host
from app.services.jobs import JobRunner
from app.store import Store
from core.errors import SettingError, TraceError
from core.profile.trace import Chunk, FileTrace, TraceHead, TraceWriter
from core.settings.loading import LoadSpec
from core.types import ModelShape
from tests.app.conftest import ended
from tests.app.test_analysis import EXPERTS, LAYERS, K, ids, over
from tests.app.test_analysis import chatted as chatted


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.npz", None, "There is no file"),
        ("bad.npz", b"nonsense", "not a readable .npz"),
        ("words.txt", b"hello", "not a trace"),
        ("empty.csv", b"", "no rows"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    analyst, path = Analyst(Store(tmp_path / "home"), JobRunner()), tmp_path / name
    question = Question(RoutingSource("file", path=str(path)), ("lru",))
    if content is None:
        with pytest.raises(SettingError, match=said):
            analyst.start(question)
    else:
        path.write_bytes(content)
        job = over(analyst.start(question))
        assert job.state == "error"
        assert said in job.error
    assert analyst.table is None
    analyst.store.close()


def test_a_text_to_text_model_has_nothing_to_replay_and_it_says_why(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    shape = ModelShape(4, 12, 1, 64, 1000, encoder_layers=2)
    load = store.steps.add_load("switch", LoadSpec().describe(), {}, shape, {})
    with pytest.raises(TraceError, match="text-to-text model is not recorded"):
        sources.from_store(store, RoutingSource("load", load), tmp_path / "a.trace")
    with pytest.raises(TraceError, match="Ask the model something first"):
        sources.from_store(store, RoutingSource("chat", 1), tmp_path / "a.trace")
    store.close()


def test_a_session_s_trace_has_its_passes_and_answers(chatted: tuple[Host, int]) -> None:
    host, chat = chatted
    ended(host.chats.ask(chat, "And then?"))
    assert host.models.load_id is not None
    routing = sources.from_store(host.store, RoutingSource("load", host.models.load_id), host.store.folder / "b.trace")
    records = list(host.store.steps.records(load=host.models.load_id))
    chunks = list(FileTrace(Path(routing.path)).chunks())
    assert routing.tokens == sum(record.tokens for record in records)
    assert [int(n) for chunk in chunks for n in chunk.sizes] == [record.tokens for record in records]
    assert sorted({int(r) for chunk in chunks for r in chunk.rid}) == [0, 1]
    got = np.concatenate([chunk.ids for chunk in chunks])
    assert np.array_equal(got, np.concatenate([record.ids.transpose(1, 0, 2) for record in records]))


def test_the_last_tokens_are_whole_passes(tmp_path: Path) -> None:
    sizes = np.array([4, 1, 1, 1], np.int32)
    chunk = Chunk(
        ids(7).astype(np.uint8), sizes, sizes == 1, np.arange(4, dtype=np.int32), tok=np.arange(7, dtype=np.int32)
    )
    with TraceWriter(tmp_path / "whole.trace", TraceHead(LAYERS, EXPERTS, K, model="demo", model_hash="h")) as writer:
        writer.write(chunk)
    whole = FileTrace(tmp_path / "whole.trace")
    for tokens, kept in ((2, [1, 1]), (6, [1, 1, 1]), (7, [4, 1, 1, 1]), (0, [1])):
        short = sources.shortened(whole, tokens, tmp_path / f"{tokens}.trace")
        [found] = short.chunks()
        assert found.sizes.tolist() == kept
        assert found.tok is not None
        assert found.tok.tolist() == list(range(7))[-sum(kept) :]
        assert np.array_equal(found.ids, chunk.ids[-sum(kept) :])
        assert short.model_hash == "h"
    routing = sources.from_file(RoutingSource("file", path=str(whole.path)), str(tmp_path / "x.trace"), 2)
    assert routing.tokens == 2
    assert "Of 7 tokens, only the last 2" in routing.notes[0]


def test_choices_name_what_there_is(chatted: tuple[Host, int]) -> None:
    host, chat = chatted
    offered = {value: title for title, value in sources.choices(host.store, host.models.load_id)}
    assert next(iter(offered)) == f"load:{host.models.load_id}"
    assert "12 tokens" in offered[f"chat:{chat}"]
    assert list(offered)[-1] == "file"
    assert RoutingSource.parse("file", ' "x.trace" ', 3) == RoutingSource("file", path="x.trace", experts=3)
