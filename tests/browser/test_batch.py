"""Batch: a file is answered while every open page follows, stopped, gone on with, and downloaded."""

from __future__ import annotations

import json
from pathlib import Path

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import Dashboard
from tests.browser.test_simple import CUT

FITS = "document.documentElement.scrollWidth <= innerWidth"

LINES = 16


def batch(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Batch").click()
    dashboard.page.wait_for_selector("#batch-go:visible, #batch-cancel:visible")
    return dashboard


def test_answered_followed_stopped_and_gone_on_with(
    dashboard: Dashboard, open_page: Open, server: Server, tmp_path: Path
) -> None:
    """Lines that give no length are as long as the sidebar says: without end in the first run, short in the second."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"say {n}", "id": f"line {n}", **({"max_tokens": 3} if n < 3 else {})} for n in range(LINES)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no json\n", "utf-8")
    batch(dashboard)
    page = dashboard.page
    dashboard.wait_text("#batch-empty", "No batch yet")
    page.click("#batch-go")
    dashboard.wait_text("#batch-alert", "Drop a file of prompts")
    page.set_input_files("#batch-upload input[type=file]", file)
    dashboard.wait_text("#batch-upload", "prompts")
    page.locator("#batch-how .label-wrap").click()
    page.locator("#batch-at-once").get_by_role("spinbutton").fill("4")
    page.click("#batch-go")
    page.wait_for_selector("#batch-cancel", state="visible")
    dashboard.wait_text("#batch-cards", f"of {LINES + 1}")
    other = batch(open_page())
    other.page.wait_for_selector("#batch-cancel", state="visible")
    other.wait_text("#batch-latest", "line ")
    other.page.get_by_role("tab", name="Chat + Live").click()
    other.page.fill("#message textarea", "Hello")
    other.page.press("#message textarea", "Enter")
    other.page.wait_for_selector("text=The model is being used for a batch")
    page.click("#batch-cancel")
    dashboard.wait_text("#batch-progress", "topping after those being written")
    page.click("#batch-cancel")
    dashboard.wait_text("#batch-alert", "Stopped")
    (out,) = server.home.glob("batches/prompts-*.answers.jsonl")
    before = {one["id"] for one in map(json.loads, out.read_text("utf-8").splitlines())}
    assert "line 0" in before and len(before) < LINES
    longest = dashboard.value("#set-sampling-max_new_tokens input")
    dashboard.limit_answers("3")
    page.click("#batch-go")
    dashboard.wait_text("#batch-cards", "were answered before")
    dashboard.wait_text("#batch-cards", f"{LINES + 1} of {LINES + 1}")
    dashboard.wait_text("#batch-cards", "Experts a layer")
    dashboard.limit_answers(longest)
    page.wait_for_selector("#batch-plot .plot-container .main-svg")
    with page.expect_download() as download:
        page.click("#batch-answers")
    assert download.value.suggested_filename == out.name
    found = [json.loads(one) for one in Path(download.value.path()).read_text("utf-8").splitlines()]
    assert len(found) == LINES + 1 == len({one["id"] for one in found})
    assert [one["id"] for one in found if "error" in one] == [f"line-{LINES + 1}"]
    for width, height in ((390, 844), (1366, 768)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate(FITS), width
        # Gradio lays a file's name out anew after this, and measures its tabs in a copy that nobody sees
        page.wait_for_function(f"""() => !{CUT}.some((one) => !one.includes('role="tab"'))""")
