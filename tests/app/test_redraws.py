"""A redraw of a job's tab does not take away what was said of its form while the redraw was on its way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.services.evaluator import Evaluation
from app.services.host import Host
from app.services.importer import ImportJob
from app.ui.sidebar import ModelSection
from app.ui.tabs.analysis import AnalysisTab
from app.ui.tabs.calibrate import CalibrateTab
from app.ui.tabs.library import LibraryTab
from app.ui.tabs.quality import QualityTab
from core.errors import MoestroError
from tests.app.conftest import WAIT_S

NEWS = SimpleNamespace(stamp="other", dark=True)


@pytest.mark.parametrize(("tab", "more"), [(QualityTab, ()), (AnalysisTab, (None,)), (CalibrateTab, (0,))])
def test_a_notice_stays_until_the_job_has_something_to_say(host: Host, tab: Any, more: tuple[Any, ...]) -> None:
    with gr.Blocks():
        made = tab(host)
    redrawn = made._renew({"stamp": "", "dark": True}, *more, NEWS)
    assert redrawn[made.outputs.index(made.alert)] == gr.skip()


def test_a_redraw_of_the_library_leaves_what_was_said_of_the_import_s_form(host: Host) -> None:
    with gr.Blocks():
        made = LibraryTab(host, ModelSection(host), gr.Tabs())
    at, now = made.moved.index(made.failed), made.list.value
    assert made.values(now)[at] == gr.skip()
    job = ImportJob("somewhere/model", Path("packs/model"), "auto", False)
    job.state, job.error = "error", "No luck."
    host.jobs.recall(job)
    redrawn = made.values(now)
    assert "No luck." in redrawn[at]
    assert made.values(redrawn[made.moved.index(made.list)])[at] == gr.skip()


def test_the_end_of_a_job_is_said_once_and_taken_back_by_the_next_one(host: Host) -> None:
    with gr.Blocks():
        made = QualityTab(host)

    def fail() -> None:
        raise MoestroError("No luck.")

    def redraw() -> Any:
        nonlocal now
        now, said, *_ = made._renew(now, NEWS)
        return said

    now: dict[str, Any] = {"stamp": "", "dark": True, "said": ""}
    assert host.jobs.start(Evaluation("demo", host.models.settings), fail).join(WAIT_S)
    assert "No luck." in redraw()
    assert redraw() == gr.skip(), "the form may have said something since"
    assert host.jobs.start(Evaluation("demo", host.models.settings), fail).join(WAIT_S)
    assert "No luck." in redraw(), "the same of another job is news"
    assert host.jobs.start(Evaluation("demo", host.models.settings), lambda: None).join(WAIT_S)
    assert redraw() == ""
    assert redraw() == gr.skip()
