"""What is drawn again, and what a redraw that comes late leaves as it is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.server.live_state import host_state, stamp
from app.services.evaluator import Evaluation
from app.services.host import Host
from app.services.importer import ImportJob
from app.services.loading import Loaded, Loading
from app.store import Chat
from app.ui.controls import answered
from app.ui.news import noticed
from app.ui.page import create_ui
from app.ui.sidebar import ModelSection
from app.ui.sidebar.model import CHOICES
from app.ui.tabs.analysis import AnalysisTab
from app.ui.tabs.calibrate import CalibrateTab
from app.ui.tabs.chat_live import ChatLive
from app.ui.tabs.library import LibraryTab
from app.ui.tabs.quality import QualityTab
from app.ui.text import notice
from core.engine.arithmetic import Arithmetic
from core.errors import MoestroError
from core.settings.config import Settings
from tests.app.conftest import WAIT_S, ended, open_host, page
from tests.fake_models import fake_pack

NEWS = SimpleNamespace(stamp="other", dark=True)


@pytest.fixture
def section(host: Host) -> ModelSection:
    with page():
        return ModelSection(host, gr.HTML({}))


def test_words_stand_where_there_is_no_result_and_its_parts_where_there_is_one() -> None:
    assert answered(None, 2) == [gr.update(visible=True), gr.update(visible=False), gr.skip(), gr.skip()]
    assert answered(["head", "plot"], 2) == [gr.update(visible=False), gr.update(visible=True), "head", "plot"]


@pytest.mark.parametrize(("tab", "more"), [(QualityTab, ()), (AnalysisTab, (None,)), (CalibrateTab, (0, "cosine"))])
def test_a_notice_stays_until_the_job_has_something_to_say(host: Host, tab: Any, more: tuple[Any, ...]) -> None:
    with page():
        made = tab(host)
    redrawn = made._renew({"stamp": "", "dark": True}, *more, NEWS)
    assert redrawn[made.outputs.index(made.alert)] == gr.skip()


def test_a_redraw_of_the_library_leaves_what_was_said_of_the_import_s_form(host: Host) -> None:
    with page():
        made = LibraryTab(host, ModelSection(host, gr.HTML({})), gr.Tabs())
    at, now = made.moved.index(made.failed), made.list.value
    assert made.values({}, now, "demo")[at] == gr.skip()
    job = ImportJob("somewhere/model", Path("packs/model"), "auto", False)
    job.state, job.error = "error", "No luck."
    host.jobs.recall(job)
    redrawn = made.values({}, now, "demo")
    assert "No luck." in redrawn[at]
    assert made.values(redrawn[made.moved.index(made.known)], now, "demo")[at] == gr.skip()


def test_a_model_that_was_deleted_makes_way_in_the_form(host: Host, section: ModelSection, tmp_path: Path) -> None:
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / "config.json").touch()
    assert host.loader.load(host.loader.plan(str(folder))).join(WAIT_S)
    host.models.unload()
    there = section.offer(str(folder))
    assert "value" not in there and str(folder) in [path for _, path in there["choices"]]
    (folder / "config.json").rename(folder / "left.txt")
    gone = section.offer(str(folder))
    assert gone["value"] == "demo" and str(folder) not in [path for _, path in gone["choices"]]


def test_the_sidebar_names_the_fallback(host: Host, section: ModelSection, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    assert "arithmetic" not in section._status()
    assert isinstance(host.models.loaded, Loaded)
    monkeypatch.setattr(host.models.loaded.engine, "arithmetic", Arithmetic("reference", "no kernels <here>"))
    assert "The reference arithmetic computes this model: no kernels &lt;here&gt;." in section._status()


def test_a_redraw_of_the_sidebar_leaves_what_was_said_of_the_load_s_form(host: Host, section: ModelSection) -> None:
    at = section.outputs.index(section.bar.alert)
    assert section.values({})[at] == gr.skip()
    host.models.change("budget", "20%")
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    known, _, said = section.values({})
    assert "short" in said
    assert section.values(known)[at] == gr.skip(), "the form may have said something since"
    host.models.change("budget", "50%")
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    known, _, said = section.values(known)
    assert said == ""
    assert section.values(known)[at] == gr.skip()


def test_a_verdict_on_another_form_is_judged_again(host: Host, section: ModelSection, tmp_path: Path) -> None:
    names = [param.name for param in CHOICES]
    plain = ["demo", *section._chosen(host.loader.plan("demo"))]
    pack = [str(fake_pack(tmp_path / "Sparse")), *plain[1:]]
    card = section.refit(*pack)
    assert "read when needed" in card["html"]
    fit, limits = section._settle(card, *pack)
    assert fit == gr.skip() and section._restrict(limits, *pack[1:])[names.index("host")]["visible"]
    fit, limits = section._settle(card, *plain)
    assert "not needed" in fit["html"] and not section._restrict(limits, *plain[1:])[names.index("host")]["visible"]
    host.models.change("budget", "80%")
    assert section._settle(card, *pack)[0]["html"] != card["html"], "the settings moved meanwhile"


def test_the_end_of_a_job_is_said_once_and_taken_back_by_the_next_one(host: Host) -> None:
    with page():
        made = QualityTab(host)

    def fail() -> None:
        raise MoestroError("No luck.")

    def redraw() -> Any:
        nonlocal now
        now, said, *_ = made._renew(now, NEWS)
        return said

    now: dict[str, Any] = {"stamp": "", "dark": True, "notice": ""}
    assert host.jobs.start(Evaluation("demo", host.models.settings), fail).join(WAIT_S)
    assert "No luck." in redraw()
    assert redraw() == gr.skip(), "the form may have said something since"
    assert host.jobs.start(Evaluation("demo", host.models.settings), fail).join(WAIT_S)
    assert "No luck." in redraw(), "the same of another job is news"
    assert host.jobs.start(Evaluation("demo", host.models.settings), lambda: None).join(WAIT_S)
    assert redraw() == ""
    assert redraw() == gr.skip()


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        (Evaluation("demo", Settings()).no_answer(), True),
        (Loading("demo").no_answer(), True),
        (Loading("demo").refusal("try again"), True),
        ("This chat is already being answered. Stop that answer or let it end, then ask again.", True),
        ("No model at somewhere.", False),
        ("The message is empty.", False),
    ],
)
def test_what_says_who_is_busy_is_marked_to_go_once_nobody_is(said: str, passes: bool) -> None:
    """The page takes it away; said again in the same words, it is news."""
    assert ("data-while-busy" in notice(said)) == passes
    assert (notice(said) != notice(said)) == passes


def test_a_press_comes_with_the_page_s_state_of_when_it_was_made() -> None:
    """If it comes after the redraw that tells of the job's end, the page has an old stamp and is redrawn again."""

    def act(fails: bool) -> None:
        if fails:
            raise MoestroError("No luck.")

    now = {"stamp": "before", "notice": ""}
    assert noticed(act)(now, False) == [now, ""]
    state, said = noticed(act)(now, True)
    assert state is now and "No luck." in said


def test_an_event_tells_one_component_that_it_is_pending(host: Host) -> None:
    """Not all of its outputs, of which a redraw of the sidebar has nearly a hundred."""
    events = create_ui(host).fns.values()
    assert max(len(event.outputs) for event in events) > 80
    assert {len(event.show_progress_on or event.outputs) for event in events} == {1}


def test_a_page_is_served_as_things_are(tmp_path: Path) -> None:
    """Not as they were when it was built, which it would show until the server's first answers come."""
    host = open_host(tmp_path, loaded=False)
    ui = create_ui(host)

    def shown() -> dict[str, Any]:
        return {one["props"].get("elem_id"): one["props"] for one in ui.config["components"]}

    assert "No model loaded" in shown()["model-status"]["value"]
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    assert host.models.change_many({"budget": "37%", "predictor": "gate"}) == ""
    now = shown()
    assert (now["set-budget"]["value"], now["set-budget-text"]["value"]) == (37, "37%")
    assert now["set-predictor"]["value"] == "gate" and now["set-predictor-width"]["visible"]
    assert "Auto, changed" in str(now["set-preset"]["choices"]) and now["reset-preset"]["visible"]
    assert "Demo model" in now["model-status"]["value"] and "data-exactness" in now["loaded"]["value"]
    assert 'data-loaded="1"' in now["fit"]["value"]["html"]
    assert now["known"]["value"]["settings"] == host_state(host)["settings"], "no redraw is asked for"


def test_what_changes_while_a_page_is_made_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_host(tmp_path)
    with page():
        made = ChatLive(host, gr.HTML())
    answer = host.chats.ask(None, "One, in 2 words")
    ended(answer)
    chat, find = answer.chat_id, host.store.chats.find
    assert chat is not None and made.open(chat)[0]["stamp"] == stamp(host, chat)

    def late(id: int) -> Chat:  # open() has read the messages by now
        ended(host.chats.ask(chat, "Two, in 2 words"))
        return find(id)

    monkeypatch.setattr(host.store.chats, "find", late)
    shown = made.open(chat)
    assert len(shown[1]["messages"]) == 2 and len(host.chats.messages(chat)) == 4
    assert shown[0]["stamp"] != stamp(host, chat)
