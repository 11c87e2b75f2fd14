"""A redraw of a job's tab does not take away what was said of its form while the redraw was on its way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.services.host import Host
from app.ui.tabs.analysis import AnalysisTab
from app.ui.tabs.quality import QualityTab

NEWS = SimpleNamespace(stamp="other", dark=True)


@pytest.mark.parametrize("tab", [QualityTab, AnalysisTab])
def test_a_notice_stays_until_the_job_has_something_to_say(host: Host, tab: Any) -> None:
    with gr.Blocks():
        made = tab(host)
    more = () if tab is QualityTab else (None,)
    redrawn = made._renew({"stamp": "", "dark": True}, *more, NEWS)
    assert redrawn[made.outputs.index(made.alert)] == gr.skip()
