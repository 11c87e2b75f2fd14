"""A setting that acts on a GPU alone has a control where the model is on one."""

from __future__ import annotations

from pathlib import Path

import gradio as gr
import pytest

from app.ui.sidebar import CacheSection
from tests.app.conftest import open_host, page
from tests.fakes import FakeEngine


def test_who_leads_decoding_is_shown_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_host(tmp_path)
    try:
        with page():
            controls = CacheSection(host, [], gr.HTML(), lambda *form: "").setting_controls
        assert not controls.acts("gpu_decode") and not controls.controls["gpu_decode"].visible
        monkeypatch.setattr(FakeEngine, "on_gpu", True)
        assert controls.acts("gpu_decode") and controls.acts("link")
    finally:
        host.close()
