"""The analyst: the routing that it replays (chats, files), through other processes; stopped, kept, refused."""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.live_state import jobs_state
from app.services.analysis import sources
from app.services.analysis.analyst import Analyst
from app.services.analysis.question import Question
from app.services.analysis.sources import RoutingSource
from app.services.host import Host
from app.services.jobs import JobRunner
from app.store import Store
from core.errors import BusyError, SettingError, TraceError
from core.profile.trace import Chunk, FileTrace, TraceHead, TraceWriter
from core.settings.loading import LoadSpec
from core.system.tasks import Stopped
from core.types import ModelShape
from tests.app.conftest import WAIT_S, ended, open_host, open_store
from tests.fake_models import SHAPE
from tests.fake_profiles import fake_profile

LAYERS, EXPERTS, K = 3, 12, 2


def ids(tokens: int = 60, seed: int = 0) -> Any:
    """[tokens, layers, k] with favourites."""
    random = np.random.default_rng(seed)
    liked = random.gumbel(size=(LAYERS, EXPERTS))
    return np.argsort(-(liked + random.gumbel(size=(tokens, LAYERS, EXPERTS))), 2)[..., :K]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere.npz"
    np.savez(path, experts=ids().transpose(1, 0, 2))
    return path


@pytest.fixture
def chatted(tmp_path: Path) -> Iterator[tuple[Host, int]]:
    host = open_host(tmp_path / "home")
    answer = ended(host.chats.ask(None, "How does the cache behave?"))
    assert answer.chat_id is not None
    yield host, answer.chat_id
    host.close()


@pytest.fixture
def analyst(tmp_path: Path) -> Iterator[Analyst]:
    with closing(Store(tmp_path / "home")) as store:
        yield Analyst(store, JobRunner())


def test_a_chat_is_put_through_every_policy_and_budget(chatted: tuple[Host, int]) -> None:
    host, chat = chatted
    question = Question(
        RoutingSource("chat", chat),
        ("lfu", "fifo"),
        settings=host.models.settings,
        load=host.models.load_id,
        slots=32,
        shape=SHAPE,
        budgets="25%, 50%, 100%",
    )
    job = ended(host.analyst.start(question))
    assert (job.state, job.error, job.share) == ("done", "", 1.0)
    made = host.analyst.table
    assert {(row.policy, row.slots) for row in made.rows} == {
        (policy, slots) for policy in ("lru", "lfu", "fifo", "lfru") for slots in (16, 32, 64)
    }
    assert (made.about.name, made.about.model) == ("“How does the cache behave?”", "demo")
    assert made.about.expert_bytes == SHAPE.expert_bytes
    for row in made.rows:
        bound = made.bound(row.slots)
        assert row.hit_rate is not None and row.tpot_ms is not None
        assert bound.hit_rate is not None and bound.perfect_ms is not None and made.resident_ms is not None
        assert row.hit_rate <= bound.hit_rate + 1e-9
        assert row.tpot_ms >= bound.perfect_ms - 1e-9 >= made.resident_ms - 2e-9
    everything = [row.hit_rate for row in made.rows if row.slots == 64]
    assert everything == [1.0] * 4, "filled with everything: no miss is left"


def test_answers_are_kept_and_seen_by_all(chatted: tuple[Host, int], tmp_path: Path) -> None:
    host, chat = chatted
    before = host.analyst.stamp
    question = Question(RoutingSource("chat", chat), ("lru",), budgets="50%", settings=host.models.settings)
    ended(host.analyst.start(question))
    assert host.analyst.stamp != before
    assert jobs_state(host)["analysis"]["state"] == "done"
    with TestClient(build_app(host), base_url="http://127.0.0.1") as web:
        reply = web.get("/export/whatif.csv")
        assert reply.status_code == 200
        assert "attachment" in reply.headers["content-disposition"]
        assert reply.text.count("\n") > 10
        assert "lru,none,32" in reply.text
        assert web.get("/export/predictors.csv").status_code == 404
    table = host.analyst.table
    host.close()
    again = Host(Store(tmp_path / "home"))
    assert again.analyst.table == table
    again.store.db.put("whatif", {"about": {}, "rows": [], "bounds": []})
    assert Analyst(again.store, JobRunner()).table is None, "what another version wrote is forgotten"
    again.close()


def test_a_file_from_elsewhere_has_hit_rates_and_times_only_when_they_are_typed(analyst: Analyst, trace: Path) -> None:
    question = Question(
        RoutingSource.parse("file", f' "{trace}" ', EXPERTS), ("lru",), ("none", "recent"), budgets="50%"
    )
    assert ended(analyst.start(question)).state == "done"
    made = analyst.table
    assert (made.about.tokens, made.about.layers, made.about.experts, made.about.clock) == (60, LAYERS, EXPERTS, None)
    assert [row.predictor for row in made.rows] == ["none"]
    assert any("Recently used" in note and "Times are needed" in note for note in made.about.notes)
    assert ended(analyst.start(replace(question, compute_ms=5.0, load_ms=1.0))).state == "done"
    made = analyst.table
    plain, ahead = made.rows
    assert (plain.predictor, ahead.predictor) == ("none", "recent")
    assert plain.tpot_ms is not None and ahead.tpot_ms is not None
    assert ahead.saved_ms == pytest.approx(plain.tpot_ms - ahead.tpot_ms)
    assert plain.tpot_ms == pytest.approx(5.0 + (plain.misses or 0.0) * 1.0), "by hand: no product hides a copy"
    assert ahead.copies is not None and plain.copies is not None
    assert ahead.copies >= plain.copies


def test_routing_of_another_model_than_the_loaded_one_says_so(chatted: tuple[Host, int], tmp_path: Path) -> None:
    host, chat = chatted
    (loaded,) = host.store.steps.loads([host.models.load_id or 0])
    own = sources.from_store(host.store, RoutingSource("chat", chat), tmp_path / "own.trace")
    assert own.model_hash and sources.beside(own, loaded) == own
    other = sources.beside(replace(own, model="org/Other", model_hash="other", notes=("Cut.",)), loaded)
    assert other.notes == ("Recorded with Other, not with Demo model (bundled), which is loaded.", "Cut.")
    question = Question(RoutingSource("chat", chat), ("lru",), budgets="50%", load=host.models.load_id)
    ended(host.analyst.start(question))
    assert host.analyst.table is not None and not any(
        "Recorded with" in note for note in host.analyst.table.about.notes
    )


def test_a_file_of_the_loaded_model_s_shape_takes_its_times(chatted: tuple[Host, int], tmp_path: Path) -> None:
    host, _ = chatted
    random = np.random.default_rng(0)
    path = tmp_path / "same.npz"
    np.savez(path, experts=random.random((SHAPE.layers, 40, SHAPE.experts)).argsort(2)[..., : SHAPE.top_k])
    source, models = RoutingSource("file", path=str(path), experts=SHAPE.experts), host.models
    question = Question(source, ("lru",), budgets="50%", settings=models.settings, load=models.load_id)
    ended(host.analyst.start(question))
    made = host.analyst.table
    assert made.about.clock is not None
    assert any("in this session" in note for note in made.about.notes)


def test_what_cannot_be_asked_is_refused_at_once(analyst: Analyst) -> None:
    with pytest.raises(SettingError, match="no eviction called"):
        analyst.start(Question(RoutingSource("chat", 1), ("nonsense",)))
    with pytest.raises(SettingError, match="at least one prefetcher"):
        analyst.start(Question(RoutingSource("chat", 1), predictors=(), kind="lab"))
    with pytest.raises(TraceError, match="Say which routing"):
        RoutingSource.parse("file", " ")
    job = ended(analyst.start(Question(RoutingSource("chat", 1), ("lru",))))
    assert "Nothing has been recorded" in job.error


@pytest.mark.long(0.1)
def test_much_work_is_done_elsewhere(analyst: Analyst, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analyst = Analyst(analyst.store, JobRunner(), processes=1)
    question = Question(RoutingSource("file", path=str(trace)), ("lru",), budgets="50%")
    assert ended(analyst.start(question)).state == "done"
    made = analyst.table
    monkeypatch.setattr("app.services.analysis.analyst.SMALL", 0)
    assert ended(analyst.start(question)).state == "done"
    assert analyst.table.rows == made.rows
    assert analyst.table.bounds == made.bounds


def test_one_at_a_time_and_stopped_when_asked(analyst: Analyst, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def never(tasks: Any, processes: int, cancel: threading.Event) -> Iterator[Any]:
        began.set()
        assert cancel.wait(WAIT_S)
        raise Stopped("Stopped.")

    monkeypatch.setattr("app.services.analysis.analyst.here", never)
    question = Question(RoutingSource("file", path=str(trace)), ("lru",))
    job = analyst.start(question)
    assert began.wait(WAIT_S)
    with pytest.raises(BusyError, match="is running"):
        analyst.start(question)
    analyst.cancel()
    assert ended(job).state == "cancelled"
    assert not list(analyst.store.folder.glob("analysis/*"))
    monkeypatch.undo()
    assert ended(analyst.start(replace(question, budgets="50%"))).state == "done"


def test_the_lab_says_what_each_foresees_and_why_some_cannot(analyst: Analyst, trace: Path) -> None:
    question = Question(
        RoutingSource("file", path=str(trace), experts=EXPERTS),
        predictors=("recent", "transitions", "gate", "estimator"),
        kind="lab",
        compute_ms=5.0,
        load_ms=1.0,
        expert_bytes=1000,
        budgets="50%",
    )
    job = ended(analyst.start(question))
    assert job.error == ""
    lab = analyst.lab
    runs = {run.predictor: run for run in lab.runs}
    assert set(runs) == {"none", "oracle", "recent", "transitions", "gate", "estimator"}
    assert "hidden states" in runs["gate"].problem
    assert "profile" in runs["estimator"].problem
    for name in ("recent", "transitions"):
        run = runs[name]
        assert len(run.recall) == len(run.recall_most) == LAYERS
        assert all(0 <= k <= m <= 1 for k, m in zip(run.recall, run.recall_most, strict=True) if k is not None and m)
        assert run.saved_ms == pytest.approx((runs["none"].tpot_ms or 0.0) - (run.tpot_ms or 0.0))
    assert runs["none"].saved_ms == 0.0
    oracle = runs["oracle"].saved_ms
    assert oracle is not None
    assert oracle >= max(runs[name].saved_ms or 0.0 for name in ("recent", "transitions"))
    assert (lab.most, lab.about.chosen[2]) == (2 * K, 18)
    assert Analyst(analyst.store, JobRunner()).lab == lab
    assert ended(analyst.start(replace(question, compute_ms=None))).state == "done"
    untimed = {run.predictor: run for run in analyst.lab.runs}
    assert (untimed["recent"].tpot_ms, untimed["recent"].recall) == (None, runs["recent"].recall)


def test_a_profile_counts_for_its_own_model_only(chatted: tuple[Host, int]) -> None:
    host, chat = chatted
    routing = sources.from_store(host.store, RoutingSource("chat", chat), host.store.folder / "a.trace")
    question = Question(RoutingSource("chat", chat), profile=fake_profile())
    assert routing.model_hash == "fake"
    assert question.profile_of(routing) is question.profile
    assert question.profile_of(replace(routing, model_hash="other")) is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.npz", None, "There is no file"),
        ("bad.npz", b"nonsense", "not a readable .npz"),
        ("words.txt", b"hello", "not a trace"),
        ("empty.csv", b"", "no rows"),
    ],
)
def test_bad_files_say_why(analyst: Analyst, tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    path = tmp_path / name
    question = Question(RoutingSource("file", path=str(path)), ("lru",))
    if content is None:
        with pytest.raises(SettingError, match=said):
            analyst.start(question)
    else:
        path.write_bytes(content)
        job = ended(analyst.start(question))
        assert job.state == "error"
        assert said in job.error
    assert analyst.table is None


def test_a_text_to_text_model_has_nothing_to_replay_and_it_says_why(tmp_path: Path) -> None:
    store = open_store(tmp_path / "home")
    shape = ModelShape(4, 12, 1, 64, 1000, encoder_layers=2)
    load = store.steps.add_load("switch", LoadSpec().describe(), {}, shape, {})
    with pytest.raises(TraceError, match="text-to-text model is not recorded"):
        sources.from_store(store, RoutingSource("load", load), tmp_path / "a.trace")
    with pytest.raises(TraceError, match="Ask the model something first"):
        sources.from_store(store, RoutingSource("chat", 1), tmp_path / "a.trace")


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
    (trace,) = host.store.traces(chat)
    assert f"· {trace.tokens} tokens recorded" in offered[f"chat:{chat}"], "as the result counts them"
    assert list(offered)[-1] == "file"
    assert RoutingSource.parse("load:3", load=7) == RoutingSource("load", 7), "the form was drawn before this load"
    assert RoutingSource.parse("file", ' "x.trace" ', 3) == RoutingSource("file", path="x.trace", experts=3)
