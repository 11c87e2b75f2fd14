"""Jobs on the page: a calibration with the real engine, and a batch that is followed, stopped and downloaded."""

import json
from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import FITS, Dashboard
from tests.browser.test_looks import CUT


def only(dashboard: Dashboard, *parts: str) -> None:
    """Tick these parts alone."""
    page = dashboard.page
    boxes = page.locator("#calibration-parts label")
    for at in range(boxes.count()):
        box = boxes.nth(at)
        wanted = any(box.inner_text().strip().startswith(part) for part in parts)
        box.locator("input").set_checked(wanted)


def slid(dashboard: Dashboard, element: str, value: float) -> None:
    """Drag a slider and let it go."""
    dashboard.slide(element, value)
    dashboard.page.evaluate(
        "id => document.querySelector(`#${id} input[type=range]`).dispatchEvent("
        "new Event('pointerup', {bubbles: true}))",
        element,
    )


@pytest.mark.long
def test_a_calibration_ends_with_a_summary_and_opens_what_needs_it(open_page: Open, tmp_path: Path) -> None:
    server = Server(tmp_path / "home", MOESTRO_TEST_ENGINE="real")
    try:
        dashboard = open_page(url=server.start().url)
        page = dashboard.page
        page.get_by_role("tab", name="Calibrate").click()
        dashboard.wait_text("#calibration-empty", "Not calibrated yet")
        only(
            dashboard,
            "Activations",
            "Co-activations",
            "Alike experts",
            "Default vectors",
            "Next-layer gate",
            "Gate entropy",
        )
        page.locator("#calibration-limit input").fill("0")
        page.click("#calibration-go")
        page.wait_for_selector("#calibration-progress", state="visible")
        page.click("#calibration-cancel")
        dashboard.wait_text("#calibration-alert", "Cancelled")
        assert not list(server.home.glob("profiles/*"))
        page.locator("#calibration-limit input").fill("600")
        page.click("#calibration-go")
        dashboard.wait_text("#calibration-head", "Profile of Demo model")
        dashboard.wait_text("#calibration-head", "tokens of the bundled prompts")
        for figure in ("counts", "pairs", "similarity", "entropy", "recall"):
            page.wait_for_selector(f"#profile-{figure} .plot-container .main-svg")
        slid(dashboard, "profile-layer", 2)
        for figure in ("pairs", "similarity"):
            dashboard.wait_text(f"#profile-{figure}", "layer 2")
        dashboard.choose("profile-measure", "Share of co-activations")
        dashboard.wait_text("#profile-similarity", "Share of co-activations in layer 2")
        assert len(list(server.home.glob("profiles/*.safetensors"))) == 1
        dashboard.choose("set-predictor", "Default vectors")
        page.wait_for_function("document.querySelector('#set-predictor input').value === 'Default vectors'")
        page.get_by_role("tab", name="Chat + Live").click()
        dashboard.ask("What does print do, in 40 words?").answered()
        page.get_by_role("tab", name="Calibrate").click()
        page.click("#profile-delete")
        page.wait_for_selector("#profile-confirm")
        page.click("#profile-delete-yes")
        page.wait_for_selector("#calibration-alert .notice.error")
        assert len(list(server.home.glob("profiles/*.safetensors"))) == 1, "what is chosen needs it"
        dashboard.choose("set-predictor", "None")
        page.wait_for_function("document.querySelector('#set-predictor input').value === 'None'")
        page.click("#profile-delete")
        page.click("#profile-delete-yes")
        dashboard.wait_text("#calibration-empty", "Not calibrated yet")
        assert not list(server.home.glob("profiles/*.safetensors"))
        assert page.evaluate(FITS)
        server.end()
    finally:
        server.kill()


LINES = 8


def batch(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Batch").click()
    dashboard.page.wait_for_selector("#batch-go:visible, #batch-cancel:visible")
    return dashboard


def test_answered_followed_stopped_and_gone_on_with(dashboard: Dashboard, server: Server, tmp_path: Path) -> None:
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
    dashboard.wait_text("#batch-latest", "line ")
    page.get_by_role("tab", name="Chat + Live").click()
    page.fill("#message textarea", "Hello")
    page.press("#message textarea", "Enter")
    page.wait_for_selector("text=The model is being used for a batch")
    batch(dashboard).page.click("#batch-cancel")
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


@pytest.mark.long(0.3)  # tests/app/test_system_tab.py has what it shows
def test_the_machine_and_the_log_can_be_read_and_copied(dashboard: Dashboard) -> None:
    page = dashboard.page
    page.get_by_role("tab", name="System").click()
    page.wait_for_selector("#log-lines p, #log-lines pre")
    page.click("#examine")
    dashboard.wait_text("#examined", "Memory")
    page.click("#examined [data-copy-of]")
    page.wait_for_function("document.querySelector('#examined [data-copy-of]').textContent === 'Copied'")
    page.get_by_role("tab", name="Chat + Live").click()
