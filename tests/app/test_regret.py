"""The regret meter around the shadows: right figures, no waiting, no process left behind, whatever happens to it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from fastapi.testclient import TestClient

from app.server import frames
from app.server.api import build_app
from app.services import regret
from app.services.host import Host
from app.services.progress import Answer
from app.services.regret import Regret
from app.services.regret_feed import WINDOW, arrays, imitated
from app.services.regret_feed import Step as Fed
from app.services.regret_process import Lost, Process
from core.profile.trace import Chunk
from core.settings.config import Settings
from core.simulate.regret import RegretReport, Shadows
from core.system.worker_process import WorkerProcess
from core.types import StepRecord
from tests.app.conftest import WAIT_S, ended, open_host
from tests.app.test_regret_process import Told, passes, told
from tests.fake_models import SHAPE


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other tests leave no time to who is modest; that the process is, test_regret_process.py sees."""
    monkeypatch.setattr(regret, "GATHER_S", 0.001)
    monkeypatch.setitem(WorkerProcess.__init__.__kwdefaults__, "niceness", 0)  # type: ignore[arg-type]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = open_host(tmp_path)
    assert host.chats.set_sampling(max_new_tokens=40) == ""
    yield host
    closed(host)
    assert host.regret.pid is None


def closed(host: Host) -> None:
    """Closing waits some seconds for the meter's thread: on a busy machine it may take longer."""
    host.close()
    thread = host.regret._thread
    if thread is not None:
        thread.join(WAIT_S)


def seen(host: Host, until: Callable[[Told], bool]) -> Told:
    return told(host.regret, host.models.load_id, host.models.settings, until)


def figures(host: Host, tokens: int) -> Told:
    return seen(host, lambda view: view["tokens"] == tokens)


def ask(host: Host, chat: int | None = None) -> Answer:
    return ended(host.chats.ask(chat, "what is in the cache"))


def expected(host: Host, steps: list[StepRecord], warm: int, settings: Settings) -> RegretReport:
    """The figures of `steps` after the first `warm`, worked out directly."""
    fed = [Fed(1, SHAPE, settings, step) for step in steps]
    shadows = Shadows(imitated(fed[-1]), WINDOW)

    def chunk(part: list[Fed]) -> Chunk:
        found = arrays(part)
        return Chunk(found["ids"], found["sizes"], found["decode"], np.zeros(len(part), np.int32))

    if warm:
        shadows.warm(chunk(fed[:warm]))
    rest = arrays(fed[warm:])
    shadows.feed(chunk(fed[warm:]), rest["hits"], rest["requests"])
    report = shadows.report()
    assert report is not None
    return report


def test_the_figures_are_those_of_the_sessions_routing(host: Host) -> None:
    assert host.regret.view(host.models.load_id, host.models.settings) is not None
    answer = ask(host)
    view = figures(host, 40)
    steps = list(host.store.steps.records(load=host.models.load_id))
    report = expected(host, steps, 0, host.models.settings)
    decode = [step for step in steps if step.phase == "decode"]
    assert view["state"] == "ready"
    assert (view["policy"], view["title"], view["left_out"]) == ("lfru", "LFRU", 0)
    assert view["own"] == pytest.approx(sum(s.hits for s in decode) / sum(s.requests for s in decode))
    assert (view["belady"], view["alone"]) == (report.belady, report.rates["lfru"])
    best = max((rate, name) for name, rate in report.rates.items() if name != "lfru")[0]
    assert view["best_rate"] == best == report.rates[view["best"]]
    assert [rate for _, rate in view["rates"]] == sorted(report.rates.values(), reverse=True)
    assert view["belady"] >= best
    ask(host, answer.chat_id)
    assert figures(host, 80)["state"] == "ready"


def test_the_deck_gets_the_figures_with_its_frames(host: Host) -> None:
    with TestClient(build_app(host), base_url="http://127.0.0.1:7860") as client:
        first = client.get("/live/frame")
        assert frames.decode(first.content)[0]["regret"]["state"] == "waiting"
        ask(host)
        view = figures(host, 40)
        reply = client.get("/live/frame", params={"since": first.headers["x-version"]})
        assert frames.decode(reply.content)[0]["regret"] == view
        assert client.get("/live/frame", params={"since": reply.headers["x-version"]}).status_code == 204
        assert host.models.change("regret", False) == ""
        off = client.get("/live/frame", params={"since": reply.headers["x-version"]})
        assert frames.decode(off.content)[0]["regret"] is None


@pytest.mark.long(0.1)
def test_another_policy_begins_a_new_count_and_another_budget_new_shadows(host: Host) -> None:
    chat = ask(host).chat_id
    figures(host, 40)
    assert host.models.change("eviction", "lfu") == ""
    view = host.regret.view(host.models.load_id, host.models.settings)
    assert (view["state"], view["tokens"], view["title"]) == ("warming", 0, "LFU")
    ask(host, chat)
    view = figures(host, 40)
    steps = list(host.store.steps.records(load=host.models.load_id))
    last = [step for step in steps[-40:] if step.phase == "decode"]
    assert view["own"] == pytest.approx(sum(s.hits for s in last) / sum(s.requests for s in last))
    assert host.models.change("budget", "75%") == ""
    ask(host, chat)
    all_steps = list(host.store.steps.records(load=host.models.load_id))
    report = expected(host, all_steps, len(steps), host.models.settings)
    rates = report.belady, report.rates["lfu"]
    seen(host, lambda view: view["tokens"] == 40 and (view["belady"], view["alone"]) == rates)


@pytest.mark.long(0.1)
def test_off_ends_the_process_and_on_begins_again(host: Host) -> None:
    ask(host)
    figures(host, 40)
    pid = host.regret.pid
    assert pid is not None
    assert host.models.change("regret", False) == ""
    assert host.regret.view(host.models.load_id, host.models.settings) is None
    gone(pid)
    ask(host)
    assert host.regret.pid is None
    assert host.models.change("regret", True) == ""
    ask(host)
    assert figures(host, 40)["state"] == "ready"
    assert host.models.change("telemetry", "off") == ""
    split = host.regret.view(host.models.load_id, host.models.settings, in_blocks=True)
    assert split["state"] == "in blocks"
    other = host.regret.view(host.models.load_id, host.models.settings, text_to_text=True)
    assert other is not None and other["state"] == "text to text"
    untold = host.regret.view(host.models.load_id, host.models.settings)
    assert untold["state"] == "untold"


@pytest.mark.long(0.1)
def test_a_model_that_goes_takes_the_process_along_and_the_next_one_starts_afresh(host: Host) -> None:
    ask(host)
    figures(host, 40)
    pid = host.regret.pid
    assert pid is not None
    host.models.unload()
    assert host.regret.view(host.models.load_id, host.models.settings) is None
    gone(pid)
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    ask(host)
    assert figures(host, 40)["state"] == "ready"


def gone(pid: int) -> None:
    try:
        psutil.Process(pid).wait(WAIT_S)
    except psutil.NoSuchProcess:
        return


def test_closing_leaves_no_process(tmp_path: Path) -> None:
    host = open_host(tmp_path)
    host.chats.set_sampling(max_new_tokens=40)
    ask(host)
    figures(host, 40)
    pid = host.regret.pid
    assert pid is not None
    closed(host)
    assert not psutil.pid_exists(pid)


@pytest.mark.long(0.1)
def test_a_process_that_is_lost_is_replaced_and_too_many_losses_are_told(host: Host) -> None:
    chat = ask(host).chat_id
    figures(host, 40)
    pid = host.regret.pid
    assert pid is not None
    killed = host.regret._feed.process
    psutil.Process(pid).kill()
    ask(host, chat)  # its first passes find nobody, the others, if any were left, a new one ...
    seen(host, lambda view: host.regret._feed.process is not killed)
    ask(host, chat)  # ... which these are enough for, however few those were
    seen(host, lambda view: view["state"] == "ready" and host.regret.pid not in (None, pid))

    def broken() -> Process:
        raise Lost("it could not be started")

    meter = Regret(start=broken)
    for number, step in enumerate(passes(3), 1):
        meter.add(1, SHAPE, Settings(), step)
        assert meter.wait(number - 1, WAIT_S) == number
    view = meter.view(1, Settings())
    assert view["state"] == "failed"
    meter.close()


@pytest.mark.parametrize(("own", "prefetch", "better"), [(0.5, False, True), (0.7, False, False), (0.7, True, True)])
def test_another_policy_is_better_only_if_it_hits_more_of_the_same(own: float, prefetch: bool, better: bool) -> None:
    """0.6 is more than LRU's shadow hits; the engine hits more still, which counts unless prefetching did it."""
    rates = {"lru": 0.55, "lfu": 0.6, "fifo": 0.6}
    blocks = {"lru": [0.5, 0.6, 0.54, 0.56], "lfu": [0.55, 0.65, 0.59, 0.61], "fifo": [0.6] * 4}
    report = {"own": own, "belady": 0.9, "rates": rates, "blocks": blocks, "bypass": False}
    told = regret.ranked("lru", report, prefetch)
    assert (told["best"], told["best_title"], told["alone"], told["better"]) == ("lfu", "LFU", 0.55, better)
    assert told["bound"] == "Belady (forced admission)"
    assert regret.ranked("lru", {**report, "bypass": True}, prefetch)["bound"] == "Belady with bypass"


@pytest.mark.parametrize(
    ("lfu", "better"), [([0.6, 0.6, 0.6, 0.6], True), ([0.9, 0.3, 0.9, 0.3], False), ([0.6], False), ([], False)]
)
def test_a_gain_within_its_noise_advises_nothing(lfu: list[float], better: bool) -> None:
    """Five points on blocks of the same tokens: alike on all, on some and not on others, and too few to tell."""
    report = {
        "own": 0.55,
        "belady": 0.9,
        "rates": {"lru": 0.55, "lfu": 0.6},
        "blocks": {"lru": [0.55, 0.56, 0.54, 0.55][: len(lfu)], "lfu": lfu},
        "bypass": False,
    }
    told = regret.ranked("lru", report, prefetch=False)
    assert (told["best"], told["better"]) == ("lfu", better)
    assert (told["error"] is None) == (len(lfu) < 2)


def test_what_the_best_policy_would_miss_sets_the_speed_limit_everywhere(host: Host) -> None:
    with TestClient(build_app(host), base_url="http://127.0.0.1:7860") as client:
        assert client.get("/limit").json()["share"] is None and client.get("/export/limit.csv").status_code == 404
        assert "moestro_limit" not in client.get("/metrics").text
        ask(host)
        belady = figures(host, 40)["belady"]
        fewest = host.regret.fewest(host.models.load_id, host.models.settings)
        assert fewest is not None and (fewest.rate, fewest.tokens) == (1.0 - belady, 40)
        steps = list(host.store.steps.records(load=host.models.load_id))
        assert fewest.until == steps[-1].index
        limit = host.limit()
        assert limit is not None and limit.known and limit.tokens == 40
        told = client.get("/limit").json()
        assert told["policies_compared"] and told["share"] == limit.share and told["parts_ms"] == limit.parts
        assert sum(told["parts_ms"].values()) == pytest.approx(told["total_ms"])
        head, arrays = frames.decode(client.get("/live/frame").content)
        assert head["limit"] == {**limit.facts(), "names": list(limit.parts)}
        assert arrays["limit.by_pass"].tolist() == limit.by_pass[:, -240:].tolist()
        lines = client.get("/export/limit.csv").text.splitlines()
        assert len(lines) == 41 and lines[1].startswith(f"{steps[-40].index},")
        told_metrics = client.get("/metrics").text
        assert f'moestro_limit_share{{link="measured"}} {limit.share!r}' in told_metrics
        assert told_metrics.count("moestro_limit_part_seconds{part=") == len(limit.parts)
        assert host.models.change("eviction", "lru") == ""
        assert host.regret.fewest(host.models.load_id, host.models.settings) is None, "of other settings"
        assert host.models.change("regret", False) == ""
        off = host.limit()
        assert off is not None and not off.known
    assert host.regret.fewest(None, host.models.settings) is None
